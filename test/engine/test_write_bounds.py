"""Writes of the engine's own code stay within the memory that both sides registered."""

import contextlib
from types import SimpleNamespace

import numpy as np
import pytest
from engine_calls import by_kind
from engine_release import SINCE_0_5_18, not_0_5_18
from sglang.srt.disaggregation.kv_layout import LayoutError, Sizes
from sglang.srt.disaggregation.mooncake.conn import MooncakeKVManager
from sglang.srt.disaggregation.pd import write_bounds

pytestmark = pytest.mark.engine

DECODE = "10.0.0.1:7000"
KV, STATE, AUX = 0x1000, 0x3000, 0x5000  # prefill's; decode's are DECODE_OFFSET higher
DECODE_OFFSET = 0x10000
EXTRA = 0x90000  # other memory that decode has registered
SIZES = Sizes((0x100, 0x100), ((0x80,),), (0x40,))


class RecordingEngine:
    def __init__(self):
        self.calls = []

    def batch_transfer_sync(self, *call):
        self.calls.append(call)
        return 7


def prefill_manager(sizes: Sizes | None = SIZES):
    """A prefill rank with two KV buffers, one of state and one of aux; knows one decode rank."""
    manager = object.__new__(MooncakeKVManager)
    manager.kv_args = SimpleNamespace(
        kv_data_ptrs=[KV, KV + 0x100],
        kv_data_lens=[0x100, 0x100],
        kv_item_lens=[0x10, 0x10],
        aux_data_ptrs=[AUX],
        aux_data_lens=[0x40],
        state_data_ptrs=by_kind([STATE]),
        state_data_lens=by_kind([0x80]),
        layout=None,
    )
    manager.engine = RecordingEngine()
    info = SimpleNamespace(
        dst_kv_ptrs=[KV + DECODE_OFFSET, KV + DECODE_OFFSET + 0x100],
        dst_aux_ptrs=[AUX + DECODE_OFFSET],
        plan=None,
    )
    manager.set_bounds(
        info, DECODE, None, sizes, [[STATE + DECODE_OFFSET]], [[0x10]], [(EXTRA, 0x10)]
    )
    manager.decode_kv_args_table = {DECODE: info}
    return manager


def block(src: int, size: int, dst: int | None = None):
    return (src, src + DECODE_OFFSET if dst is None else dst, size)


@pytest.mark.parametrize(
    "inside",
    [
        block(KV, 0x100),
        block(KV + 0x1F0, 0x10),
        block(STATE, 0x80),
        block(AUX, 1),
        block(KV, 0x10, EXTRA),
    ],
)
def test_copies_within_bounds_are_written_in_one_call(inside):
    manager = prefill_manager()
    assert manager._transfer_data(DECODE, [block(KV, 8), inside]) == 7
    src, dst, size = inside
    assert manager.engine.calls == [(DECODE, [KV, src], [KV + DECODE_OFFSET, dst], [8, size])]


def test_empty_copies_are_skipped():
    """An empty buffer has no address."""
    manager = prefill_manager()
    assert manager._transfer_data(DECODE, [(0, 0, 0), block(KV, 8), (0, 0, 0)]) == 7
    assert manager.engine.calls == [(DECODE, [KV], [KV + DECODE_OFFSET], [8])]
    assert manager._transfer_data(DECODE, [(0, 0, 0)]) == 0


@pytest.mark.parametrize(
    "outside, error",
    [
        (block(KV - 1, 8), "that this prefill rank registered"),
        (block(KV + 0xF8, 0x10), "that this prefill rank registered"),  # spans two of its buffers
        (block(AUX + 0x40, 1), "that this prefill rank registered"),
        (block(KV, 8, KV + DECODE_OFFSET - 1), f"that decode {DECODE} registered"),
        (block(KV, 0x10, STATE + DECODE_OFFSET + 0x78), f"that decode {DECODE} registered"),
        (block(KV, 8, AUX + DECODE_OFFSET + 0x40), f"that decode {DECODE} registered"),
        (block(KV, -8), "the smallest length -8 bytes"),
    ],
)
def test_call_with_out_of_bounds_copy_writes_nothing(outside, error):
    manager = prefill_manager()
    with pytest.raises(RuntimeError, match=error):
        manager._transfer_data(DECODE, [block(KV, 8), outside])
    assert not manager.engine.calls


def test_writes_to_unknown_decode_rank_are_not_checked():
    assert prefill_manager()._transfer_data("10.0.0.2:7000", [block(KV, 8, 0x7)]) == 7


def test_buffers_without_announced_sizes_end_at_the_next_buffer():
    manager = prefill_manager(None)
    assert manager._transfer_data(DECODE, [block(KV, 0x100), block(KV + 0x100, 0x100)]) == 7
    with pytest.raises(RuntimeError, match="not lie within any buffer"):
        manager._transfer_data(DECODE, [block(KV, 0x10, KV + DECODE_OFFSET + 0xF8)])


def test_memory_registered_at_runtime_is_within_bounds():
    manager = prefill_manager()
    with pytest.raises(RuntimeError):
        manager._transfer_data(DECODE, [block(0x8000, 8, KV + DECODE_OFFSET)])
    manager.extra_memory = ((0x8000, 8),)
    assert manager._transfer_data(DECODE, [block(0x8000, 8, KV + DECODE_OFFSET)]) == 7


def test_state_slots_out_of_bounds_are_refused():
    manager = prefill_manager()
    manager.check_state_slots(DECODE, [[7]])
    manager.check_state_slots(DECODE, [[7], [99]])  # a kind of unknown size
    for slot in (8, -1):
        with pytest.raises(LayoutError, match=f"state 0 slots {slot} to {slot} of 8; no state"):
            manager.check_state_slots(DECODE, [[slot]])
    prefill_manager(None).check_state_slots(DECODE, [[99]])


def test_memory_registered_during_a_transfer_counts_for_the_next(monkeypatch):
    """Another thread registers memory; only the next transfer may use it."""
    manager, bounds = prefill_manager(), write_bounds.Bounds

    def registered_meanwhile(*of):
        manager.extra_memory = ((0x8000, 8),)
        return bounds(*of)

    monkeypatch.setattr(write_bounds, "Bounds", registered_meanwhile)
    assert manager._transfer_data(DECODE, [block(KV, 8)]) == 7
    assert manager._transfer_data(DECODE, [block(0x8000, 8, KV + DECODE_OFFSET)]) == 7


only_since_0_5_18 = pytest.mark.skipif(
    not SINCE_0_5_18, reason="0.5.9 has a plan for each decode rank"
)


@pytest.fixture
def sent(monkeypatch) -> list:
    """The calls that reach the engine's own `send_kvcache_slice`."""
    from sglang.srt.disaggregation.mooncake.conn import EngineMooncakeKVManager

    calls = []
    monkeypatch.setattr(
        EngineMooncakeKVManager, "send_kvcache_slice", lambda self, *call: calls.append(call)
    )
    return calls


def send_slices(manager, item_lens, src_pages, dst_pages) -> None:
    info = manager.decode_kv_args_table[DECODE]
    info.dst_kv_item_lens = item_lens
    pages = (np.array(src_pages), info.dst_kv_ptrs, np.array(dst_pages))
    manager.send_kvcache_slice(DECODE, *pages, 0, 1, 0x10, None)


@only_since_0_5_18
def test_decode_draft_that_gets_no_heads_does_not_limit_pages(sent):
    """The draft's pages are smaller, so the target's pages are not checked against its buffer."""
    manager = prefill_manager(Sizes((0x100, 0x40), ((0x80,),), (0x40,)))
    send_slices(manager, [0x10, 0x4], range(16), range(16))
    assert len(sent) == 1


@not_0_5_18("has no such state")
@only_since_0_5_18
def test_only_the_row_of_a_dsa_tail_is_checked_as_slot():
    from sglang.srt.disaggregation.base.conn import StateType

    manager = prefill_manager()
    asked = SimpleNamespace(dst_state_indices=[[7, 3, 1, 0, 9, 64]])  # a row, and positions in it
    manager.kv_args.state_types = [StateType.DSA_TAIL]
    manager.check_state_slots(DECODE, manager._state_slots(asked))
    manager.kv_args.state_types = [StateType.DSA]
    with pytest.raises(LayoutError):
        manager.check_state_slots(DECODE, manager._state_slots(asked))


@only_since_0_5_18
@pytest.mark.parametrize("src, dst, is_written", [(15, 15, True), (16, 15, False), (15, 16, False)])
def test_head_slices_sent_by_the_engine_stay_within_bounds(sent, src, dst, is_written):
    """The second buffer ends where the memory ends; it has 16 pages of 16 bytes."""
    outside = pytest.raises(RuntimeError, match="not lie within any buffer")
    with contextlib.nullcontext() if is_written else outside:
        send_slices(prefill_manager(), [0x10, 0x10], [src, 0], [0, dst])
    assert len(sent) == is_written
