"""A decode rank that registers: it is planned for, refused, or left to the engine.

The engine's own thread reads the registration; an exception in it would end that thread.
"""

import managers
import numpy as np
import pytest
from managers import BACKENDS, DECODE, ENGINES, PAGE_BYTES, PATCHED, PEER, STATE, registration
from msgspec.structs import replace
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.kv_layout import Heads, LayoutError, RankLayout

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("published")]

backends = pytest.mark.parametrize("backend", BACKENDS)
described = pytest.mark.parametrize("is_described", [True, False], ids=["described", "stock peer"])

INDEX = 64 * 132
FULL, SOME = (INDEX,) * 4, (INDEX, 0, INDEX, 0)
BIT_63 = 0xFFFF81AB54E01000


def met(backend, own, peer, kinds=PATCHED, is_described=True, peer_has=None, **prefill_has):
    """A prefill rank that has read the registration of a decode rank."""
    prefill = managers.rank(backend, own, kinds=kinds, **prefill_has)
    decode = managers.rank(backend, peer, DECODE, **(peer_has or {}))
    managers.read(prefill, registration(decode, is_described))
    return prefill


def is_planned(info) -> bool:
    assert not (info.plan and info.refusal)
    return info.plan is not None


def is_left_to_the_engine(info) -> bool:
    return info.plan is None and not info.refusal


# Decode context parallelism


@backends
@described
def test_a_dcp_decode_goes_the_engines_way(backend, is_described):
    """Of 8 pages it sets aside 4, for it holds every other token."""
    decode = managers.rank(backend, managers.latents(), DECODE, dcp_size=2)
    prefill = managers.rank(backend, managers.latents())
    ask = managers.request(decode, 7, range(4))
    prefill.request_status[7] = KVPoll.Bootstrapping
    managers.read(prefill, registration(decode, is_described), ask)
    info = managers.known(prefill)
    assert is_left_to_the_engine(info)
    assert info.requires_dcp_relayout
    assert info.dcp_token_item_lens == [PAGE_BYTES // managers.PAGE] * 4
    prefill.add_transfer_request(7, np.arange(8), slice(0, 8), True, aux_index=0, num_kv_tokens=512)
    assert prefill.request_status[7] == KVPoll.WaitingForInput
    assert prefill.transfer_queues[0].get().room == 7


def test_what_the_engine_does_with_a_dcp_decode():
    prefill = met("nixl", managers.latents(), managers.latents(), ENGINES, False, {"dcp_size": 2})
    info = managers.known(prefill)
    assert info.requires_dcp_relayout
    assert info.dcp_token_item_lens == [PAGE_BYTES // managers.PAGE] * 4


@backends
def test_a_dcp_decode_that_cannot_be_served_is_dropped(backend):
    """MHA has no heads for it. The engine raises, and its thread ends."""
    mha = managers.heads(Heads(0, 2, 2), (0, 1))
    assert not met(backend, mha, mha, peer_has={"dcp_size": 2}).decode_kv_args_table
    with pytest.raises(RuntimeError, match="Unsupported PD DCP topology"):
        met(backend, mha, mha, ENGINES, False, {"dcp_size": 2})


# HiSparse: decode's pool lies in host memory


def with_kinds(kinds: list[str], manager_kinds=PATCHED, is_described=False):
    """NIXL finds the peer's memory only by the kind that it registered."""
    prefill = managers.rank("nixl", managers.latents(), kinds=manager_kinds)
    prefill.agent.memory_of_peer = set(kinds)
    decode = managers.rank("nixl", managers.latents(), DECODE)
    decode.kv_args.kv_data_mem_kinds = kinds
    managers.read(prefill, registration(decode, is_described))
    return prefill


def test_a_hisparse_decode_is_left_to_the_engine():
    prefill = with_kinds(["DRAM"] * 4)
    assert is_left_to_the_engine(managers.known(prefill))
    _, memory = prefill.prep_handles[PEER["nixl"]]
    assert memory == managers.known(prefill).dst_homogeneous_mem_kind == "DRAM"


def test_so_is_one_with_some_layers_on_its_device():
    prefill = with_kinds(["VRAM", "VRAM", "DRAM", "DRAM"])
    assert is_left_to_the_engine(managers.known(prefill))
    assert len(managers.known(prefill).kv_xfer_segments) == 2


def test_what_the_engine_does_with_a_hisparse_decode():
    prefill = with_kinds(["DRAM"] * 4, ENGINES)
    assert prefill.prep_handles[PEER["nixl"]][1] == "DRAM"


@described
def test_a_decode_with_all_on_its_device_is_planned(is_described):
    prefill = with_kinds(["VRAM"] * 4, is_described=is_described)
    assert is_planned(managers.known(prefill))
    assert not prefill.prep_handles


# Numbers that no plan can be made of


@described
@pytest.mark.parametrize("own", [managers.BASE[managers.PREFILL], BIT_63], ids=hex)
@pytest.mark.parametrize("kinds", [PATCHED, ENGINES], ids=["patched", "what stock does"])
def test_addresses_beyond_signed_numbers_go_the_engines_way(kinds, own, is_described):
    """Intel's GPUs have such, and NIXL takes them."""
    one = managers.latents()
    peer = {"base": BIT_63 + (1 << 28)}
    prefill = met("nixl", one, one, kinds, is_described, peer, base=own)
    assert is_left_to_the_engine(managers.known(prefill))
    assert PEER["nixl"] in prefill.prep_handles


@described
@pytest.mark.parametrize("base", [1 << 63, BIT_63], ids=hex)
def test_so_they_do_over_mooncake(base, is_described):
    one = managers.latents()
    prefill = met("mooncake", one, one, PATCHED, is_described, {"base": base})
    assert is_left_to_the_engine(managers.known(prefill))


@backends
@described
@pytest.mark.parametrize("model", ["latents", "heads"])
def test_a_decode_tp_size_of_0(backend, is_described, model):
    layout = managers.latents() if model == "latents" else managers.heads(Heads(0, 2, 2), (0, 1))
    prefill = met(backend, layout, layout, PATCHED, is_described, {"attn_tp_size": 0})
    info = managers.known(prefill)  # rooms of a peer that is not known would wait
    assert info.plan is None
    assert not info.refusal or "could not register it: ZeroDivisionError" in info.refusal


def test_stock_nixl_ends_its_thread_of_a_decode_tp_size_of_0():
    mha = managers.heads(Heads(0, 2, 2), (0, 1))
    with pytest.raises(ZeroDivisionError):
        met("nixl", mha, mha, ENGINES, False, {"attn_tp_size": 0})


@backends
def test_a_refused_peer_may_do_better_later(backend):
    """It registers anew when its server does."""
    own, other = managers.latents(), managers.latents(layers=3)
    prefill = managers.rank(backend, own)
    managers.read(prefill, registration(managers.rank(backend, other, DECODE)))
    assert managers.known(prefill).refusal
    managers.read(prefill, registration(managers.rank(backend, own, DECODE)))
    assert is_planned(managers.known(prefill))


@backends
def test_a_stock_peer_that_registers_after_one_that_describes_itself(backend):
    own, other = managers.latents(), managers.latents(layers=3)
    prefill = managers.rank(backend, own)
    managers.read(prefill, registration(managers.rank(backend, other, DECODE)))
    managers.read(prefill, registration(managers.rank(backend, own, DECODE), False))
    assert is_planned(managers.known(prefill))


@pytest.mark.parametrize("prefill, decode", [("DRAM", "DRAM"), ("VRAM", "DRAM"), ("VRAM", "VRAM")])
def test_a_cpu_and_a_gpu(prefill, decode):
    """NIXL's agent on a CPU calls its own memory as it would call a GPU's."""
    own, peer = (managers.latents(memory=kind) for kind in (prefill, decode))
    assert is_planned(managers.known(met("nixl", own, peer)))


def test_from_a_cpu_to_a_gpu():
    own, peer = (managers.latents(memory=kind) for kind in ("DRAM", "VRAM"))
    info = managers.known(met("nixl", own, peer))
    assert "prefill has DRAM, decode has VRAM" in info.refusal


@backends
@pytest.mark.parametrize("reads", [True, False], ids=["patched", "stock"])
def test_a_description_is_sent_to_ranks_that_read_it(backend, reads, monkeypatch):
    sent = []
    engine = managers.common.EngineCommonKVReceiver
    monkeypatch.setattr(engine, "_send_bootstrap_message", lambda self, **said: sent.append(said))
    decode = managers.rank(backend, managers.latents(), DECODE)
    receiver = object.__new__(managers.common.CommonKVReceiver)
    receiver.kv_mgr = decode
    info = {"rank_ip": "127.0.0.1", "rank_port": 1, **({"reads_layouts": True} if reads else {})}
    said = {"bootstrap_info": info, "operation": "_register_kv_args"}
    receiver._send_bootstrap_message(message=registration(decode), **said)
    assert sent == [{**said, "message": registration(decode, reads)}]


# State


def test_state_pages_that_decode_has_not_set_aside_fail_the_room():
    prefill = met("nixl", managers.latents(FULL), managers.latents(FULL))
    info = managers.known(prefill)
    more = {"dst_state_item_lens": info.dst_state_item_lens, "decode_tp_rank": 0}
    sent = (PEER["nixl"], [[1, 2]], info.dst_state_data_ptrs, [[3]], 0, 1)
    with pytest.raises(LayoutError):
        list(prefill.maybe_send_extra(*sent, **more))
    assert not managers.writes(prefill)


def sent_state(prefill, own_page: int, page: int) -> list[tuple[int, int]]:
    """Which layer's buffers were written, by their addresses: ours and the peer's."""
    info = managers.known(prefill)
    managers.writes(prefill).clear()
    if managers.backend_of(prefill) == "nixl":
        pointers, lengths = info.dst_state_data_ptrs, info.dst_state_item_lens
        more = {"dst_state_item_lens": lengths, "decode_tp_rank": 0}
        list(prefill.maybe_send_extra(PEER["nixl"], [[own_page]], pointers, [[page]], 0, 1, **more))
    else:
        decode = managers.rank("mooncake", managers.latents(), DECODE)
        managers.read(prefill, managers.request(decode, 9, [1], state_indices=[[page]]))
        ask = prefill.transfer_infos[9][PEER["mooncake"]]
        assert prefill.maybe_send_extra(ask, [[own_page]], None, info) == 0
    starts = (managers.BASE[managers.PREFILL] + STATE, managers.BASE[DECODE] + STATE)
    pairs = []
    for src, dst, length in managers.writes(prefill):
        assert length == INDEX
        ours, theirs = src - starts[0] - own_page * INDEX, dst - starts[1] - page * INDEX
        assert ours % managers.BUFFER == theirs % managers.BUFFER == 0
        pairs.append((ours // managers.BUFFER, theirs // managers.BUFFER))
    return sorted(pairs)


@backends
@pytest.mark.parametrize(
    "own, peer", [(FULL, SOME), (SOME, FULL), (SOME, SOME)], ids=["here", "there", "both"]
)
def test_elided_index_keys_are_left_out(backend, own, peer):
    """HiSparse elides none, so two servers of one model may differ in it."""
    prefill = met(backend, managers.latents(own), managers.latents(peer))
    assert is_planned(managers.known(prefill))
    assert sent_state(prefill, 3, 5) == [(0, 0), (2, 2)]


@backends
def test_index_keys_that_both_sides_have_are_all_sent(backend):
    prefill = met(backend, managers.latents(FULL), managers.latents(FULL))
    assert sent_state(prefill, 3, 5) == [(n, n) for n in range(4)]


@backends
def test_a_stock_peer_with_the_same_index_keys_is_planned(backend):
    prefill = met(backend, managers.latents(SOME), managers.latents(SOME), is_described=False)
    assert is_planned(managers.known(prefill))
    assert sent_state(prefill, 3, 5) == [(0, 0), (2, 2)]


@backends
def test_a_stock_peer_that_elides_others_is_left_to_the_engine(backend):
    prefill = met(backend, managers.latents(FULL), managers.latents(SOME), is_described=False)
    assert is_left_to_the_engine(managers.known(prefill))


def second_stage(index_keys: tuple[int, ...]) -> RankLayout:
    """Of two, with as many layers."""
    one, first = managers.latents(index_keys), len(index_keys)

    def moved(buffers):
        return tuple(replace(buffer, layer=first + buffer.layer) for buffer in buffers)

    stage = {"pp_rank": 1, "pp_size": 2, "total_layers": 2 * first}
    return replace(one, kv=moved(one.kv), state=moved(one.state), **stage)


@backends
@described
def test_a_stage_that_begins_with_an_elided_layer(backend, is_described):
    """A stock peer does not say which of its layers have index keys; the engine sends by place."""
    own, peer = second_stage((0, INDEX, 0, INDEX)), managers.latents((0, INDEX) * 4, layers=8)
    prefill = met(backend, own, peer, is_described=is_described)
    if is_described:
        assert is_planned(managers.known(prefill))
        assert sent_state(prefill, 3, 5) == [(1, 5), (3, 7)]
    else:
        assert is_left_to_the_engine(managers.known(prefill))


@backends
def test_a_stock_peer_with_windows_of_other_strides_is_left_to_the_engine(backend):
    """Such as windows in FP8: with ours it would write beside its slots."""
    own, peer = (managers.heads(Heads(0, 2, 2), (0, 1), size) for size in (256, 128))
    prefill = met(backend, own, peer, is_described=False)
    assert is_left_to_the_engine(managers.known(prefill))
    assert is_planned(managers.known(met(backend, own, own, is_described=False)))


@backends
def test_one_that_describes_them_is_refused(backend):
    own, peer = (managers.heads(Heads(0, 2, 2), (0, 1), size) for size in (256, 128))
    assert managers.known(met(backend, own, peer)).refusal
