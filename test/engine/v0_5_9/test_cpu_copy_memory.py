"""Host copies of every pool: how much they index at a time, and how they reuse memory."""

import contextlib
import gc
import itertools

import engine_calls
import pytest
import torch
from cpu_copy_checks import as_tokens, assert_moved, fill, round_trip, snapshot
from engine_calls import POOLS
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.hardware_backend.npu import cpu_copy
from torch.utils._python_dispatch import TorchDispatchMode

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("kind", POOLS)
def test_copy_of_no_slots(kind):
    pool = POOLS[kind](4)
    assert pool.get_cpu_copy(torch.tensor([], dtype=torch.int64)) == []
    round_trip(pool, [], [])


@pytest.mark.parametrize(
    "other, slots",
    [
        (lambda: engine_calls.mla_pool(True, 4), [4, 5]),
        (lambda: engine_calls.mla_pool(False, 4, layers=3), [4, 5]),
        (lambda: engine_calls.mla_pool(False, 4), [4, 5, 6]),
        (lambda: engine_calls.mla_pool(False, 4), []),
        (lambda: engine_calls.mha_pool(False, 4), [4, 5]),
    ],
    ids=["index keys", "layers", "more slots", "no slots", "components"],
)
def test_mismatched_copy_writes_nothing(other, slots):
    source, target = engine_calls.mla_pool(False, 4), other()
    fill(source)
    fill(target)
    before = snapshot(target)
    copied = source.get_cpu_copy(torch.tensor([4, 5]))
    with pytest.raises(ValueError, match="can only be loaded into the same number of slots"):
        target.load_cpu_copy(copied, torch.tensor(slots, dtype=torch.int64))
    assert_moved(target, before, [], [])


class TorchOpRecorder(TorchDispatchMode):
    """Records the elements of each tensor that torch indexes, and the bytes of new host tensors."""

    def __init__(self):
        super().__init__()
        self.indexed: list[int] = []
        self.made: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.index_select, torch.ops.aten.index_copy_):
            self.indexed.append(args[0].numel())
        given_to_it = torch.utils._pytree.tree_leaves((args, kwargs))
        known = {storage_ptr(part) for part in given_to_it if isinstance(part, torch.Tensor)}
        on_host = isinstance(result, torch.Tensor) and result.device.type == "cpu"
        if on_host and storage_ptr(result) not in known:
            self.made.append(result.untyped_storage().nbytes())
        return result


def storage_ptr(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def row_elements(pool) -> int:
    """Elements of the widest buffer in one layer."""
    return max(layer[0].numel() for layer in as_tokens(pool).values())


@pytest.mark.parametrize("kind", POOLS)
@pytest.mark.parametrize("layers_at_once", [1, 2, 2.5])
@pytest.mark.parametrize("chunk", [2, 8192])
def test_indexed_elements_stay_below_the_npu_limit(kind, layers_at_once, chunk, monkeypatch):
    """An index operator of 32 bits reaches `layers_at_once` of the five layers at a time."""
    pool = POOLS[kind](4, start_layer=3, layers=5)
    pool.cpu_offloading_chunk_size = chunk
    limit = int(layers_at_once * row_elements(pool))
    monkeypatch.setattr(cpu_copy, "MAX_INDEXED", limit)
    with TorchOpRecorder() as watched:
        copied = pool.get_cpu_copy(torch.tensor([18, 19, 4, 0]))  # the last slot included
        pool.load_cpu_copy(copied, torch.tensor([3, 19, 1, 17]))
    assert watched.indexed and max(watched.indexed) <= limit
    round_trip(pool, [18, 19, 4, 0], [3, 19, 1, 17])


@pytest.mark.parametrize("kind", POOLS)
def test_memory_of_a_dropped_copy_is_reused(kind):
    """Also if the request is part of a cycle, or an error interrupted the copy."""
    pool = POOLS[kind](4)
    pool.cpu_offloading_chunk_size = 3
    fill(pool)
    slots = torch.arange(4, 15)
    smallest = min(part.nbytes for part in pool.get_cpu_copy(slots)[-1])

    def dropped() -> None:
        pool.get_cpu_copy(slots)

    def in_a_cycle() -> None:
        request = {"kv_cache_cpu": pool.get_cpu_copy(slots)}
        request["itself"] = request
        del request
        gc.collect()

    def cut_short() -> None:
        with contextlib.suppress(IndexError, RuntimeError):
            pool.get_cpu_copy(torch.cat([slots, torch.tensor([10**6])]))

    for leave in (dropped, in_a_cycle, cut_short, dropped):
        leave()
        with TorchOpRecorder() as watched:
            copied = pool.get_cpu_copy(slots)
        assert watched.indexed and max(watched.made, default=0) < smallest, leave
        del copied


@pytest.mark.parametrize("kind", POOLS)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_retracted_requests_do_not_share_memory(kind, data):
    """Requests are retracted, loaded and aborted in any order; each gets its own data back."""
    pool = POOLS[kind](1)
    pool.cpu_offloading_chunk_size = data.draw(st.integers(1, 4))
    retracted, number = [], itertools.count(1)
    for _ in range(data.draw(st.integers(1, 12))):
        if not retracted or data.draw(st.booleans(), label="retract"):
            tokens = data.draw(st.integers(1, pool.size))
            for layers in as_tokens(pool).values():
                for layer in layers:
                    layer.fill_(next(number))
            before = snapshot(pool)
            retracted.append((pool.get_cpu_copy(torch.arange(tokens)), before, tokens))
            continue
        copied, before, tokens = retracted.pop(data.draw(st.integers(0, len(retracted) - 1)))
        if data.draw(st.booleans(), label="load"):
            pool.load_cpu_copy(copied, torch.arange(tokens))
            for name, layers in as_tokens(pool).items():
                for layer, buffer in enumerate(layers):
                    assert torch.equal(buffer[:tokens], before[name][layer][:tokens])
        del copied


def test_stock_copies_only_fia_pages_correctly(stock):
    """MLA pools lack the buffer, MHA's pages are taken for tokens; FIA is copied by token."""
    mla, paged, fia = stock(
        ["copy_by_token", "mla", 16], ["copy_by_token", "mha", 16], ["copy_by_token", "fia", 16]
    )
    assert "kv_buffer" in mla["raised"]
    assert paged is False or "raised" in paged
    assert fia is True
