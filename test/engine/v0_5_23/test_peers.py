"""A decode rank that registers gets a transfer plan, is refused, or is left to the engine.

The engine's own thread reads the registration; an exception would crash that thread.
"""

import fake_managers
import numpy as np
import pytest
from fake_managers import (
    BACKENDS,
    DECODE,
    ENGINES,
    PAGE_BYTES,
    PATCHED,
    PEER,
    STATE,
    registration_message,
)
from msgspec.structs import replace
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.kv_layout import Heads, LayoutError, RankLayout

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("published")]

backends = pytest.mark.parametrize("backend", BACKENDS)
described = pytest.mark.parametrize("is_described", [True, False], ids=["described", "stock peer"])

INDEX = 64 * 132
FULL, SOME = (INDEX,) * 4, (INDEX, 0, INDEX, 0)
BIT_63 = 0xFFFF81AB54E01000


def prefill_with_peer(
    backend, own, peer, kinds=PATCHED, is_described=True, peer_has=None, **prefill_has
):
    """A prefill rank that has read the registration of a decode rank."""
    prefill = fake_managers.make_manager(backend, own, kinds=kinds, **prefill_has)
    decode = fake_managers.make_manager(backend, peer, DECODE, **(peer_has or {}))
    fake_managers.process_messages(prefill, registration_message(decode, is_described))
    return prefill


def is_planned(info) -> bool:
    assert not (info.plan and info.refusal)
    return info.plan is not None


def is_left_to_the_engine(info) -> bool:
    return info.plan is None and not info.refusal


@backends
def test_rank_without_a_layout_leaves_all_to_the_engine(backend):
    """Its `KVArgs` lacks the patch set's fields, as where other code makes one."""
    prefill = fake_managers.make_manager(backend, fake_managers.mla_layout())
    decode = fake_managers.make_manager(backend, fake_managers.mla_layout(), DECODE)
    for manager in (prefill, decode):
        del manager.kv_args.layout, manager.kv_args.verifier
    ask = fake_managers.metadata_message(decode, 7, range(4))
    prefill.request_status[7] = KVPoll.Bootstrapping
    fake_managers.process_messages(prefill, registration_message(decode), ask)
    assert is_left_to_the_engine(fake_managers.registered_peer(prefill))
    prefill.add_transfer_request(7, np.arange(4), slice(0, 4), True, aux_index=0)
    assert fake_managers.queued_chunks(prefill) == 1


# Decode context parallelism


@backends
@described
def test_dcp_decode_is_left_to_the_engine(backend, is_described):
    """The decode rank holds every other token, so it sets aside 4 pages for prefill's 8."""
    decode = fake_managers.make_manager(backend, fake_managers.mla_layout(), DECODE, dcp_size=2)
    prefill = fake_managers.make_manager(backend, fake_managers.mla_layout())
    ask = fake_managers.metadata_message(decode, 7, range(4))
    prefill.request_status[7] = KVPoll.Bootstrapping
    fake_managers.process_messages(prefill, registration_message(decode, is_described), ask)
    info = fake_managers.registered_peer(prefill)
    assert is_left_to_the_engine(info)
    assert info.requires_dcp_relayout
    assert info.dcp_token_item_lens == [PAGE_BYTES // fake_managers.PAGE] * 4
    prefill.add_transfer_request(7, np.arange(8), slice(0, 8), True, aux_index=0, num_kv_tokens=512)
    assert prefill.request_status[7] == KVPoll.WaitingForInput
    assert prefill.transfer_queues[0].get().room == 7


def test_stock_requires_a_relayout_for_a_dcp_decode():
    prefill = prefill_with_peer(
        "nixl",
        fake_managers.mla_layout(),
        fake_managers.mla_layout(),
        ENGINES,
        False,
        {"dcp_size": 2},
    )
    info = fake_managers.registered_peer(prefill)
    assert info.requires_dcp_relayout
    assert info.dcp_token_item_lens == [PAGE_BYTES // fake_managers.PAGE] * 4


@backends
def test_unsupported_dcp_decode_is_dropped(backend):
    """The engine supports DCP for MLA only: for MHA it raises, and its thread crashes."""
    mha = fake_managers.mha_layout(Heads(0, 2, 2), (0, 1))
    assert not prefill_with_peer(backend, mha, mha, peer_has={"dcp_size": 2}).decode_kv_args_table
    with pytest.raises(RuntimeError, match="Unsupported PD DCP topology"):
        prefill_with_peer(backend, mha, mha, ENGINES, False, {"dcp_size": 2})


# HiSparse: decode's pool lies in host memory


def prefill_with_peer_memory(kinds: list[str], manager_kinds=PATCHED, is_described=False):
    """A prefill rank whose NIXL finds the peer's memory only by the kinds that it registered."""
    prefill = fake_managers.make_manager("nixl", fake_managers.mla_layout(), kinds=manager_kinds)
    prefill.agent.memory_of_peer = set(kinds)
    decode = fake_managers.make_manager("nixl", fake_managers.mla_layout(), DECODE)
    decode.kv_args.kv_data_mem_kinds = kinds
    fake_managers.process_messages(prefill, registration_message(decode, is_described))
    return prefill


def test_hisparse_decode_is_left_to_the_engine():
    prefill = prefill_with_peer_memory(["DRAM"] * 4)
    assert is_left_to_the_engine(fake_managers.registered_peer(prefill))
    _, memory = prefill.prep_handles[PEER["nixl"]]
    assert memory == fake_managers.registered_peer(prefill).dst_homogeneous_mem_kind == "DRAM"


def test_hisparse_decode_with_device_layers_is_left_to_the_engine():
    prefill = prefill_with_peer_memory(["VRAM", "VRAM", "DRAM", "DRAM"])
    assert is_left_to_the_engine(fake_managers.registered_peer(prefill))
    assert len(fake_managers.registered_peer(prefill).kv_xfer_segments) == 2


def test_stock_prepares_dram_for_a_hisparse_decode():
    prefill = prefill_with_peer_memory(["DRAM"] * 4, ENGINES)
    assert prefill.prep_handles[PEER["nixl"]][1] == "DRAM"


@described
def test_decode_with_all_layers_on_its_device_is_planned(is_described):
    prefill = prefill_with_peer_memory(["VRAM"] * 4, is_described=is_described)
    assert is_planned(fake_managers.registered_peer(prefill))
    assert not prefill.prep_handles


# Numbers that no transfer plan can use


@described
@pytest.mark.parametrize("own", [fake_managers.BASE[fake_managers.PREFILL], BIT_63], ids=hex)
@pytest.mark.parametrize("kinds", [PATCHED, ENGINES], ids=["patched", "stock"])
def test_nixl_addresses_above_int64_are_left_to_the_engine(kinds, own, is_described):
    """Intel's GPUs have such addresses, and NIXL accepts them."""
    one = fake_managers.mla_layout()
    peer = {"base": BIT_63 + (1 << 28)}
    prefill = prefill_with_peer("nixl", one, one, kinds, is_described, peer, base=own)
    assert is_left_to_the_engine(fake_managers.registered_peer(prefill))
    assert PEER["nixl"] in prefill.prep_handles


@described
@pytest.mark.parametrize("base", [1 << 63, BIT_63], ids=hex)
def test_mooncake_addresses_above_int64_are_left_to_the_engine(base, is_described):
    one = fake_managers.mla_layout()
    prefill = prefill_with_peer("mooncake", one, one, PATCHED, is_described, {"base": base})
    assert is_left_to_the_engine(fake_managers.registered_peer(prefill))


@backends
@described
@pytest.mark.parametrize("model", ["latents", "heads"])
def test_decode_tp_size_of_0_is_not_planned(backend, is_described, model):
    layout = (
        fake_managers.mla_layout()
        if model == "latents"
        else fake_managers.mha_layout(Heads(0, 2, 2), (0, 1))
    )
    prefill = prefill_with_peer(backend, layout, layout, PATCHED, is_described, {"attn_tp_size": 0})
    info = fake_managers.registered_peer(prefill)  # rooms of an unknown peer would wait
    assert info.plan is None
    assert not info.refusal or "not register this decode rank: ZeroDivisionError" in info.refusal


def test_stock_nixl_thread_crashes_on_a_decode_tp_size_of_0():
    mha = fake_managers.mha_layout(Heads(0, 2, 2), (0, 1))
    with pytest.raises(ZeroDivisionError):
        prefill_with_peer("nixl", mha, mha, ENGINES, False, {"attn_tp_size": 0})


@backends
def test_refused_peer_may_register_again(backend):
    """The peer registers again when its server restarts."""
    own, other = fake_managers.mla_layout(), fake_managers.mla_layout(layers=3)
    prefill = fake_managers.make_manager(backend, own)
    fake_managers.process_messages(
        prefill, registration_message(fake_managers.make_manager(backend, other, DECODE))
    )
    assert fake_managers.registered_peer(prefill).refusal
    fake_managers.process_messages(
        prefill, registration_message(fake_managers.make_manager(backend, own, DECODE))
    )
    assert is_planned(fake_managers.registered_peer(prefill))


@backends
def test_stock_peer_may_replace_a_patched_one(backend):
    own, other = fake_managers.mla_layout(), fake_managers.mla_layout(layers=3)
    prefill = fake_managers.make_manager(backend, own)
    fake_managers.process_messages(
        prefill, registration_message(fake_managers.make_manager(backend, other, DECODE))
    )
    fake_managers.process_messages(
        prefill, registration_message(fake_managers.make_manager(backend, own, DECODE), False)
    )
    assert is_planned(fake_managers.registered_peer(prefill))


@pytest.mark.parametrize("prefill, decode", [("DRAM", "DRAM"), ("VRAM", "DRAM"), ("VRAM", "VRAM")])
def test_compatible_memory_kinds_are_planned(prefill, decode):
    """On a CPU, NIXL's agent names its own memory as it would name a GPU's."""
    own, peer = (fake_managers.mla_layout(memory=kind) for kind in (prefill, decode))
    assert is_planned(fake_managers.registered_peer(prefill_with_peer("nixl", own, peer)))


def test_dram_to_vram_is_refused():
    own, peer = (fake_managers.mla_layout(memory=kind) for kind in ("DRAM", "VRAM"))
    info = fake_managers.registered_peer(prefill_with_peer("nixl", own, peer))
    assert "prefill has DRAM, decode has VRAM" in info.refusal


@backends
@pytest.mark.parametrize("reads", [True, False], ids=["patched", "stock"])
def test_layout_is_sent_only_to_ranks_that_read_it(backend, reads, monkeypatch):
    sent = []
    engine = fake_managers.common.EngineCommonKVReceiver
    monkeypatch.setattr(engine, "_send_bootstrap_message", lambda self, **said: sent.append(said))
    decode = fake_managers.make_manager(backend, fake_managers.mla_layout(), DECODE)
    receiver = object.__new__(fake_managers.common.CommonKVReceiver)
    receiver.kv_mgr = decode
    info = {"rank_ip": "127.0.0.1", "rank_port": 1, **({"reads_layouts": True} if reads else {})}
    said = {"bootstrap_info": info, "operation": "_register_kv_args"}
    receiver._send_bootstrap_message(message=registration_message(decode), **said)
    assert sent == [{**said, "message": registration_message(decode, reads)}]


# State


def test_missing_state_pages_of_decode_fail_the_room():
    prefill = prefill_with_peer(
        "nixl", fake_managers.mla_layout(FULL), fake_managers.mla_layout(FULL)
    )
    info = fake_managers.registered_peer(prefill)
    more = {"dst_state_item_lens": info.dst_state_item_lens, "decode_tp_rank": 0}
    sent = (PEER["nixl"], [[1, 2]], info.dst_state_data_ptrs, [[3]], 0, 1)
    with pytest.raises(LayoutError):
        list(prefill.maybe_send_extra(*sent, **more))
    assert not fake_managers.posted_copies(prefill)


def sent_state_layers(prefill, own_page: int, page: int) -> list[tuple[int, int]]:
    """The layers whose state was written, by address: (prefill's, the peer's) of each copy."""
    info = fake_managers.registered_peer(prefill)
    fake_managers.posted_copies(prefill).clear()
    if fake_managers.backend_of(prefill) == "nixl":
        pointers, lengths = info.dst_state_data_ptrs, info.dst_state_item_lens
        more = {"dst_state_item_lens": lengths, "decode_tp_rank": 0}
        list(prefill.maybe_send_extra(PEER["nixl"], [[own_page]], pointers, [[page]], 0, 1, **more))
    else:
        decode = fake_managers.make_manager("mooncake", fake_managers.mla_layout(), DECODE)
        fake_managers.process_messages(
            prefill, fake_managers.metadata_message(decode, 9, [1], state_indices=[[page]])
        )
        ask = prefill.transfer_infos[9][PEER["mooncake"]]
        assert prefill.maybe_send_extra(ask, [[own_page]], None, info) == 0
    starts = (fake_managers.BASE[fake_managers.PREFILL] + STATE, fake_managers.BASE[DECODE] + STATE)
    pairs = []
    for src, dst, length in fake_managers.posted_copies(prefill):
        assert length == INDEX
        ours, theirs = src - starts[0] - own_page * INDEX, dst - starts[1] - page * INDEX
        assert ours % fake_managers.BUFFER == theirs % fake_managers.BUFFER == 0
        pairs.append((ours // fake_managers.BUFFER, theirs // fake_managers.BUFFER))
    return sorted(pairs)


@backends
@pytest.mark.parametrize(
    "own, peer", [(FULL, SOME), (SOME, FULL), (SOME, SOME)], ids=["prefill", "decode", "both"]
)
def test_elided_index_keys_are_not_sent(backend, own, peer):
    """HiSparse elides none, so two servers of one model may elide different layers."""
    prefill = prefill_with_peer(
        backend, fake_managers.mla_layout(own), fake_managers.mla_layout(peer)
    )
    assert is_planned(fake_managers.registered_peer(prefill))
    assert sent_state_layers(prefill, 3, 5) == [(0, 0), (2, 2)]


@backends
def test_index_keys_of_both_sides_are_all_sent(backend):
    prefill = prefill_with_peer(
        backend, fake_managers.mla_layout(FULL), fake_managers.mla_layout(FULL)
    )
    assert sent_state_layers(prefill, 3, 5) == [(n, n) for n in range(4)]


@backends
def test_stock_peer_with_same_index_keys_is_planned(backend):
    prefill = prefill_with_peer(
        backend, fake_managers.mla_layout(SOME), fake_managers.mla_layout(SOME), is_described=False
    )
    assert is_planned(fake_managers.registered_peer(prefill))
    assert sent_state_layers(prefill, 3, 5) == [(0, 0), (2, 2)]


@backends
def test_stock_peer_with_other_elided_layers_is_left_to_the_engine(backend):
    prefill = prefill_with_peer(
        backend, fake_managers.mla_layout(FULL), fake_managers.mla_layout(SOME), is_described=False
    )
    assert is_left_to_the_engine(fake_managers.registered_peer(prefill))


def second_stage(index_keys: tuple[int, ...]) -> RankLayout:
    """The second of two stages, each with one layer per entry of `index_keys`."""
    one, first = fake_managers.mla_layout(index_keys), len(index_keys)

    def moved(buffers):
        return tuple(replace(buffer, layer=first + buffer.layer) for buffer in buffers)

    stage = {"pp_rank": 1, "pp_size": 2, "total_layers": 2 * first}
    return replace(one, kv=moved(one.kv), state=moved(one.state), **stage)


@backends
@described
def test_stage_that_begins_with_an_elided_layer_needs_a_patched_peer(backend, is_described):
    """A stock peer does not name its layers with index keys; the engine sends by position."""
    own, peer = (
        second_stage((0, INDEX, 0, INDEX)),
        fake_managers.mla_layout((0, INDEX) * 4, layers=8),
    )
    prefill = prefill_with_peer(backend, own, peer, is_described=is_described)
    if is_described:
        assert is_planned(fake_managers.registered_peer(prefill))
        assert sent_state_layers(prefill, 3, 5) == [(1, 5), (3, 7)]
    else:
        assert is_left_to_the_engine(fake_managers.registered_peer(prefill))


@backends
def test_stock_peer_with_other_window_strides_is_left_to_the_engine(backend):
    """Such as windows in FP8: with prefill's strides, writes would miss decode's slots."""
    own, peer = (fake_managers.mha_layout(Heads(0, 2, 2), (0, 1), size) for size in (256, 128))
    prefill = prefill_with_peer(backend, own, peer, is_described=False)
    assert is_left_to_the_engine(fake_managers.registered_peer(prefill))
    assert is_planned(
        fake_managers.registered_peer(prefill_with_peer(backend, own, own, is_described=False))
    )


@backends
def test_patched_peer_with_other_window_strides_is_refused(backend):
    own, peer = (fake_managers.mha_layout(Heads(0, 2, 2), (0, 1), size) for size in (256, 128))
    assert fake_managers.registered_peer(prefill_with_peer(backend, own, peer)).refusal
