"""A decode rank that registers gets a transfer plan, is refused, or is left to the engine.

The engine's own thread reads the registration; an exception would crash that thread.
"""

import fake_managers
import pytest
from engine_release import IS_0_5_18, not_0_5_18
from fake_managers import ENGINES, PATCHED, PEER, mla_layout, posted_copies, registered_peer
from msgspec.structs import replace
from rank_faults import nixl_agent
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.kv_layout import Heads, RankLayout

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("published")]

described = pytest.mark.parametrize("is_described", [True, False], ids=["described", "stock peer"])

ROOM = 7
INDEX = 64 * 132
FULL, SOME = (INDEX,) * 4, (INDEX, 0, INDEX, 0)
BIT_63 = 0xFFFF81AB54E01000
MHA = fake_managers.mha_layout(Heads(0, 2, 2), (0, 1))


def prefill_with_peer(backend, own=None, peer=None, is_described=True, peer_has=None, **more):
    """A prefill rank that has read the registration of a decode rank."""
    prefill = fake_managers.prefill_rank(backend, own, **more)
    decode = fake_managers.decode_rank(backend, peer or own, **(peer_has or {}))
    fake_managers.register(prefill, decode, is_described)
    return prefill


def is_planned(prefill) -> bool:
    info = registered_peer(prefill)
    assert not (info.plan and info.refusal)
    return info.plan is not None


def is_left_to_the_engine(prefill) -> bool:
    info = registered_peer(prefill)
    return info.plan is None and not info.refusal


def test_rank_without_a_layout_leaves_all_to_the_engine(prefill, decode):
    """Its `KVArgs` lacks the patch set's fields, as where other code makes one."""
    for manager in (prefill, decode):
        for name in ("layout", "views", "packing", "verifier"):
            delattr(manager.kv_args, name)
    fake_managers.request_rooms(prefill, decode, ROOM)
    assert is_left_to_the_engine(prefill)
    fake_managers.add_chunk(prefill, ROOM)
    assert fake_managers.queued_chunks(prefill) == 1


# Decode context parallelism


def check_dcp_relayout(prefill) -> None:
    info = registered_peer(prefill)
    assert info.requires_dcp_relayout
    assert info.dcp_token_item_lens == [fake_managers.PAGE_BYTES // fake_managers.PAGE] * 4


@not_0_5_18("needs no memory for it")
@pytest.mark.parametrize("backend", ["mooncake"])
def test_dcp_decode_for_which_memory_is_lacking_is_dropped(backend, prefill):
    """The engine allocates buffers for it in the thread that reads messages, which must go on."""

    def allocate(*size, **which) -> None:
        raise RuntimeError("out of memory")

    prefill._init_dcp_pack_buffers_once = allocate
    fake_managers.register(prefill, fake_managers.decode_rank(backend, dcp_size=2))
    assert not prefill.decode_kv_args_table
    fake_managers.register(prefill, fake_managers.decode_rank(backend))
    assert is_planned(prefill)


@described
def test_dcp_decode_is_left_to_the_engine(is_described, backend, prefill):
    """The decode rank holds every other token, so it sets aside 4 pages for prefill's 8."""
    decode = fake_managers.decode_rank(backend, dcp_size=2)
    fake_managers.request_rooms(prefill, decode, ROOM, is_described=is_described)
    assert is_left_to_the_engine(prefill)
    check_dcp_relayout(prefill)
    fake_managers.add_chunk(prefill, ROOM, range(8), num_kv_tokens=512)
    assert prefill.request_status[ROOM] == KVPoll.WaitingForInput
    assert prefill.transfer_queues[0].get().room == ROOM


def test_stock_requires_a_relayout_for_a_dcp_decode():
    stock = {"kinds": ENGINES, "is_described": False}
    check_dcp_relayout(prefill_with_peer("nixl", peer_has={"dcp_size": 2}, **stock))


def test_unsupported_dcp_decode_is_dropped(backend):
    """The engine supports DCP for MLA only: for MHA it raises, and its thread crashes."""
    dcp = {"peer_has": {"dcp_size": 2}}
    prefill = prefill_with_peer(backend, MHA, **dcp)
    if IS_0_5_18 and backend == "mooncake":  # refused instead, which fails its requests
        assert "Unsupported PD DCP topology" in registered_peer(prefill).refusal
    else:
        assert not prefill.decode_kv_args_table
    with pytest.raises(RuntimeError, match="Unsupported PD DCP topology"):
        prefill_with_peer(backend, MHA, is_described=False, kinds=ENGINES, **dcp)


# HiSparse: decode's pool lies in host memory


def prefill_with_peer_memory(memory: list[str], kinds=PATCHED, is_described=False):
    """A prefill rank whose NIXL finds the peer's memory only by the kinds that it registered."""
    prefill = fake_managers.prefill_rank("nixl", kinds=kinds)
    nixl_agent(prefill).memory_of_peer = set(memory)
    decode = fake_managers.decode_rank("nixl")
    decode.kv_args.kv_data_mem_kinds = memory
    fake_managers.register(prefill, decode, is_described)
    return prefill


def test_hisparse_decode_is_left_to_the_engine():
    prefill = prefill_with_peer_memory(["DRAM"] * 4)
    assert is_left_to_the_engine(prefill)
    _, memory = prefill.prep_handles[PEER["nixl"]]
    assert memory == registered_peer(prefill).dst_homogeneous_mem_kind == "DRAM"


def test_hisparse_decode_with_device_layers_is_left_to_the_engine():
    prefill = prefill_with_peer_memory(["VRAM", "VRAM", "DRAM", "DRAM"])
    assert is_left_to_the_engine(prefill)
    assert len(registered_peer(prefill).kv_xfer_segments) == 2


def test_stock_prepares_dram_for_a_hisparse_decode():
    prefill = prefill_with_peer_memory(["DRAM"] * 4, ENGINES)
    assert prefill.prep_handles[PEER["nixl"]][1] == "DRAM"


@described
def test_decode_with_all_layers_on_its_device_is_planned(is_described):
    prefill = prefill_with_peer_memory(["VRAM"] * 4, is_described=is_described)
    assert is_planned(prefill)
    assert not prefill.prep_handles


# Numbers that no transfer plan can use


@described
@pytest.mark.parametrize("own", [fake_managers.BASE[fake_managers.PREFILL], BIT_63], ids=hex)
@pytest.mark.parametrize("kinds", [PATCHED, ENGINES], ids=["patched", "stock"])
def test_nixl_addresses_above_int64_are_left_to_the_engine(kinds, own, is_described):
    """Intel's GPUs have such addresses, and NIXL accepts them."""
    more = {"is_described": is_described, "kinds": kinds, "base": own}
    prefill = prefill_with_peer("nixl", peer_has={"base": BIT_63 + (1 << 28)}, **more)
    assert is_left_to_the_engine(prefill)
    assert PEER["nixl"] in prefill.prep_handles


@described
@pytest.mark.parametrize("base", [1 << 63, BIT_63], ids=hex)
def test_mooncake_addresses_above_int64_are_left_to_the_engine(base, is_described):
    peer_has = {"base": base}
    prefill = prefill_with_peer("mooncake", is_described=is_described, peer_has=peer_has)
    assert is_left_to_the_engine(prefill)


@described
@pytest.mark.parametrize("layout", [mla_layout(), MHA], ids=["latents", "heads"])
def test_decode_tp_size_of_0_is_not_planned(layout, is_described, backend):
    more = {"is_described": is_described, "peer_has": {"attn_tp_size": 0}}
    info = registered_peer(prefill_with_peer(backend, layout, **more))
    assert info.plan is None  # it has an entry: rooms of an unknown peer would wait
    assert not info.refusal or "not register this decode rank: ZeroDivisionError" in info.refusal


def test_stock_nixl_thread_crashes_on_a_decode_tp_size_of_0():
    stock = {"kinds": ENGINES, "is_described": False}
    with pytest.raises(ZeroDivisionError):
        prefill_with_peer("nixl", MHA, peer_has={"attn_tp_size": 0}, **stock)


@described
def test_refused_peer_may_register_again(is_described, backend, decode):
    """The peer registers again when its server restarts, maybe as another engine."""
    prefill = prefill_with_peer(backend, mla_layout(), mla_layout(layers=3))
    assert registered_peer(prefill).refusal
    fake_managers.register(prefill, decode, is_described)
    assert is_planned(prefill)


MEMORY = [
    ("DRAM", "DRAM", ""),
    ("VRAM", "DRAM", ""),
    ("VRAM", "VRAM", ""),
    ("DRAM", "VRAM", "prefill has DRAM, decode has VRAM"),
]


@pytest.mark.parametrize("own, peer, refusal", MEMORY)
def test_only_dram_to_vram_is_refused(own, peer, refusal):
    """On a CPU, NIXL's agent names its own memory as it would name a GPU's."""
    prefill = prefill_with_peer("nixl", mla_layout(memory=own), mla_layout(memory=peer))
    if refusal:
        info = registered_peer(prefill)
        assert info.refusal.startswith(f"KV memory: {refusal}") and not info.needs_retry
        assert (info.plan, prefill.agent.peers) == (None, set())
    else:
        assert is_planned(prefill)


# State


def sent_state_layers(prefill, own_page: int, page: int) -> list[tuple[int, int]]:
    """The layers whose state was written, by address: (prefill's, the peer's) of each copy."""
    info = registered_peer(prefill)
    posted_copies(prefill).clear()
    if fake_managers.backend_of(prefill) == "nixl":
        fake_managers.send_nixl_state(prefill, [[own_page]], [[page]])
    else:
        decode = fake_managers.decode_rank("mooncake")
        ask = fake_managers.metadata_message(decode, ROOM, [1], state_indices=[[page]])
        fake_managers.process_messages(prefill, ask)
        request = prefill.transfer_infos[ROOM][PEER["mooncake"]]
        assert prefill.maybe_send_extra(request, [[own_page]], None, info) == 0
    starts = [base + fake_managers.STATE for base in fake_managers.BASE.values()]
    pairs = []
    for src, dst, length in posted_copies(prefill):
        assert length == INDEX
        ours, theirs = src - starts[0] - own_page * INDEX, dst - starts[1] - page * INDEX
        assert ours % fake_managers.BUFFER == theirs % fake_managers.BUFFER == 0
        pairs.append((ours // fake_managers.BUFFER, theirs // fake_managers.BUFFER))
    return sorted(pairs)


def second_stage(index_keys: tuple[int, ...]) -> RankLayout:
    """The second of two stages, each with one layer per entry of `index_keys`."""
    one, first = mla_layout(index_keys), len(index_keys)

    def moved(buffers):
        return tuple(replace(buffer, layer=first + buffer.layer) for buffer in buffers)

    stage = {"pp_rank": 1, "pp_size": 2, "total_layers": 2 * first}
    return replace(one, kv=moved(one.kv), state=moved(one.state), **stage)


STAGE = second_stage((0, INDEX, 0, INDEX)), mla_layout((0, INDEX) * 4, layers=8)
# Both sides' layouts, whether decode describes its own, and the layers with index keys, by their
# position on each side, that are sent; None if they are left to the engine.
INDEX_KEYS = {
    "neither elides": (mla_layout(FULL), mla_layout(FULL), True, [(n, n) for n in range(4)]),
    # HiSparse elides none, so two servers of one model may elide different layers.
    "decode elides": (mla_layout(FULL), mla_layout(SOME), True, [(0, 0), (2, 2)]),
    "prefill elides": (mla_layout(SOME), mla_layout(FULL), True, [(0, 0), (2, 2)]),
    "both elide": (mla_layout(SOME), mla_layout(SOME), True, [(0, 0), (2, 2)]),
    "both elide, stock peer": (mla_layout(SOME), mla_layout(SOME), False, [(0, 0), (2, 2)]),
    "decode elides, stock peer": (mla_layout(FULL), mla_layout(SOME), False, None),
    "stage that begins with an elided layer": (*STAGE, True, [(1, 5), (3, 7)]),
    # A stock peer does not name its layers with index keys; the engine sends by position.
    "stage that begins with an elided layer, stock peer": (*STAGE, False, None),
}


@pytest.mark.parametrize("own, peer, is_described, sent", INDEX_KEYS.values(), ids=INDEX_KEYS)
def test_index_keys_that_both_sides_hold_are_sent(own, peer, is_described, sent, backend):
    prefill = prefill_with_peer(backend, own, peer, is_described)
    if IS_0_5_18 and backend == "nixl" and own.pp_size > peer.pp_size and not is_described:
        assert "requires layer ids on both peers" in registered_peer(prefill).refusal
    elif sent is None:
        assert is_left_to_the_engine(prefill)
    else:
        assert is_planned(prefill)
        assert sent_state_layers(prefill, 3, 5) == sent


def test_peer_with_other_window_strides_is_not_planned(backend):
    """Such as windows in FP8: with prefill's strides, writes would miss decode's slots."""
    own, peer = (fake_managers.mha_layout(Heads(0, 2, 2), (0, 1), size) for size in (256, 128))
    assert registered_peer(prefill_with_peer(backend, own, peer)).refusal
    assert is_left_to_the_engine(prefill_with_peer(backend, own, peer, is_described=False))
    assert is_planned(prefill_with_peer(backend, own, own, is_described=False))
