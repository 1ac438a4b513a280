"""Head slices between TP sizes as whole rows, which prefill packs or decode interleaves.

Every byte of decode's pools is compared, and the ranks count what they pack and interleave. The
other tests of unequal TP sizes, which count too, are in `test_transfers` and `test_state_transfer`.
"""

from concurrent.futures import ThreadPoolExecutor

import pytest
from engine_release import nightly_if_not_default
from fleet import Fleet, Rank, Servers, Side
from transfer_checks import (
    REQUESTS,
    assert_all_right,
    assert_heads_moved,
    assert_no_room_kept,
    assert_right,
    moves_heads,
    nightly_except,
    packing_counts,
)
from transport_cases import same_widths, tp, with_fields

pytestmark = pytest.mark.transport

BACKENDS = ["nixl", "mooncake", "ascend"]
SRC, DST, CHUNKS = REQUESTS[3]  # scattered pages in three chunks
PAGE_SIZES = [1, 16, 64]
SIZES = {"tp2_to_1": tp(2, 1), "tp1_to_2": tp(1, 2)}


def with_backend(backend: str, fleet: Fleet) -> Fleet:
    """Returns the fleet over this backend; K and V of NPU pools have one width."""
    fleet = with_fields(fleet, backend=backend)
    return same_widths(fleet) if backend == "ascend" else fleet


@pytest.mark.parametrize("backend", nightly_except(BACKENDS, "nixl", "mooncake"))
def test_decode_interleaves_each_chunk_of_each_buffer_once(serve, backend):
    fleet = with_backend(backend, Fleet(Side(tp=2, pp=2), layers=3))
    with serve(fleet) as servers:
        for done in (1, 2):
            assert_right(servers, SRC, DST, CHUNKS)
            assert packing_counts(servers) == ([0] * 4, [done * len(CHUNKS) * 3 * 2])


@pytest.mark.parametrize("backend", nightly_except(BACKENDS, "mooncake"))
def test_prefill_packs_each_chunk_once_for_each_decode_rank(serve, backend):
    """All buffers of a stage fit into one round: K and V have one width."""
    fleet = Fleet(Side(pp=2), Side(tp=2), layers=3, v_width=4, backend=backend)
    with serve(fleet) as servers:
        for done in (1, 2):
            assert_right(servers, SRC, DST, CHUNKS)
            assert packing_counts(servers) == ([done * len(CHUNKS) * 2] * 2, [0, 0])


def drafts(prefill_tp: int, decode_tp: int, pp: int = 1, **more) -> Fleet:
    sides = (Side(tp=prefill_tp, pp=pp, draft_layers=2), Side(tp=decode_tp, draft_layers=1))
    return Fleet(*sides, **more)


def windows(prefill_tp: int, decode_tp: int, pp: int = 1, **more) -> Fleet:
    sides = (Side(tp=prefill_tp, pp=pp), Side(tp=decode_tp))
    return Fleet(*sides, layers=6, v_width=4, hybrid="swa", **more)


def stages(prefill_tp: int, decode_tp: int) -> Fleet:
    """Returns a fleet with the same stages on both sides."""
    return Fleet(Side(tp=prefill_tp, pp=2), Side(tp=decode_tp, pp=2), layers=5)


MORE_SIZES = {
    "tp4_to_1": tp(4, 1),
    "tp1_to_4": tp(1, 4),
    "tp4_to_2": tp(4, 2, heads=8),
    "tp2_to_4": tp(2, 4),
    "pp2_tp2_to_pp2_tp1": stages(2, 1),
    "pp2_tp1_to_pp2_tp2": stages(1, 2),
    "drafts_tp1_to_2": drafts(1, 2, draft_heads=8),
    # Ranks of both sides hold one head of the target, and two and four of the draft.
    "draft_alone_tp4_to_2": drafts(4, 2, pp=2, layers=3, kv_heads=2, draft_heads=8),
    "draft_alone_tp2_to_4": drafts(2, 4, pp=2, layers=3, kv_heads=2, draft_heads=8),
    "draft_on_decode_tp2_to_1": Fleet(Side(tp=2), Side(draft_layers=1)),
    "draft_on_prefill_tp1_to_2": Fleet(Side(draft_layers=1), Side(tp=2)),
    "windows_pp2_tp2_to_1": windows(2, 1, pp=2),
    "windows_pp2_tp1_to_2": windows(1, 2, pp=2),
    "windows_alone_tp1_to_2": windows(1, 2, kv_heads=1, window_heads=4),
}


CASES = [f"{backend}-{name}" for name in MORE_SIZES for backend in ("nixl", "mooncake")]


@pytest.mark.parametrize("case", nightly_except(CASES, "nixl-draft_alone_tp4_to_2"))
def test_all_sizes(serve, case):
    backend, _, name = case.partition("-")
    with serve(with_backend(backend, MORE_SIZES[name])) as servers:
        assert moves_heads(servers.fleet)
        assert_all_right(servers)
        assert_no_room_kept(servers)
        assert_heads_moved(servers)


@pytest.mark.nightly
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("name", [*SIZES, "tp4_to_1", "tp1_to_4"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_all_page_sizes(serve, backend, name, page_size):
    fleet = with_backend(backend, {**SIZES, **MORE_SIZES}[name])
    with serve(with_fields(fleet, page_size=page_size)) as servers:
        assert_all_right(servers)
        assert_heads_moved(servers)


# Bytes that a prefill rank packs at a time, and how many rounds 6 pages of 16 tokens then take for
# each decode rank: packed rows have 64 bytes, in 6 buffers.
ROUNDS = {
    64: 96 * 6,  # a token
    1000: 6 * 6 + 3,  # 15 tokens of a buffer, the last 6 of two
    6144: 6,  # a buffer
    1 << 15: 2,  # five buffers
}


@pytest.mark.parametrize("size", nightly_except(ROUNDS, 1000))
@pytest.mark.parametrize("backend", nightly_except(BACKENDS, "nixl"))
def test_small_packing_buffers_take_several_rounds(serve, backend, size):
    fleet = Fleet(Side(), Side(tp=2), layers=3, v_width=4, backend=backend)
    with serve(fleet) as servers:
        servers.prefill[0].call("shrink_packing_buffers", size=size)
        assert_right(servers, SRC, DST)
        assert packing_counts(servers) == ([2 * ROUNDS[size]], [0, 0])
        assert_all_right(servers)


@pytest.mark.nightly
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("name", ["tp1_to_4", "drafts_tp1_to_2", "windows_pp2_tp1_to_2"])
@pytest.mark.parametrize("backend", ["nixl", "mooncake"])
def test_small_packing_buffers_of_all_models(serve, backend, name, page_size):
    with serve(with_fields(MORE_SIZES[name], backend=backend, page_size=page_size)) as servers:
        for rank in servers.prefill:
            rank.call("shrink_packing_buffers", size=640)
        assert_all_right(servers)
        assert_heads_moved(servers)


OFF, NO_BUFFER = {"SGLANG_PD_PACKED": "0"}, {"SGLANG_PD_PACKING_MIB": "0"}
# TP sizes, variables of prefill and of decode, and which side moves heads nevertheless.
SWITCHED_OFF = {
    "tp2_to_1_on_prefill": ((2, 1), OFF, {}, ""),
    "tp2_to_1_on_decode": ((2, 1), {}, OFF, ""),
    "tp2_to_1_on_both": ((2, 1), OFF, OFF, ""),
    "tp2_to_1_without_buffer": ((2, 1), NO_BUFFER, {}, "decode"),
    "tp1_to_2_on_prefill": ((1, 2), OFF, {}, ""),
    "tp1_to_2_on_decode": ((1, 2), {}, OFF, "prefill"),  # decode has nothing to do
    "tp1_to_2_on_both": ((1, 2), OFF, OFF, ""),
    "tp1_to_2_without_buffer": ((1, 2), NO_BUFFER, {}, ""),
}


@pytest.mark.parametrize("name", nightly_except(SWITCHED_OFF, "tp2_to_1_on_decode"))
@pytest.mark.parametrize("backend", nightly_except(BACKENDS, "nixl"))
def test_switched_off_on_one_side(serve, backend, name):
    sizes, *variables, by = SWITCHED_OFF[name]
    sides = [Side(tp=size, environment=some) for size, some in zip(sizes, variables)]
    with serve(with_backend(backend, Fleet(*sides))) as servers:
        assert_all_right(servers)
        assert_heads_moved(servers, by=by)


STOCK_DECODE = {"mooncake": tp(1, 2), "nixl": tp(1, 4), "ascend": tp(1, 2)}


@nightly_if_not_default
@pytest.mark.parametrize("backend", nightly_except(STOCK_DECODE, "mooncake"))
def test_stock_decode_reads_packed_rows(serve, backend):
    """They arrive in their places, as slices would."""
    fleet = with_fields(same_widths(STOCK_DECODE[backend]), backend=backend)
    with serve(fleet, "patched", "stock") as servers:
        assert_all_right(servers)
        assert_heads_moved(servers, by="prefill")


# Pages on prefill and on decode of requests that are open at the same time, by decode server.
AT_ONCE = [
    [([1, 2, 9], [0, 4, 5]), ([3], [11])],
    [([7, 4], [4, 1]), ([5, 6, 8, 0], [9, 3, 0, 7])],
]


def assert_right_at_once(servers: Servers, decodes: list[list[Rank]]) -> None:
    """Sends each of these decode servers its requests of `AT_ONCE`, all at the same time."""
    rooms = [[(next(servers.rooms), *pages) for pages in of_server] for of_server in AT_ONCE]
    sent = [[room, src] for some in rooms for room, src, _ in some]
    with ThreadPoolExecutor() as pool:
        sending = [
            pool.submit(rank.call, "send_at_once", requests=sent, seconds=30)
            for rank in servers.prefill
        ]
        receiving = []
        for ranks, some in zip(decodes, rooms):
            wanted = [[room, dst] for room, _, dst in some]
            receiving += [
                pool.submit(rank.call, "receive_at_once", requests=wanted, seconds=30)
                for rank in ranks
            ]
        for done in [one.result() for one in receiving]:
            assert done["state"] == "right", done
        for done in [one.result() for one in sending]:
            assert {end["state"] for end in done["ends"]} == {"success"}, done


@pytest.mark.parametrize("name", nightly_except(SIZES, "tp1_to_2"))
@pytest.mark.parametrize("backend", nightly_except(["nixl", "mooncake"], "nixl"))
def test_requests_of_two_decode_servers_at_once(serve, backend, name):
    with serve(with_backend(backend, SIZES[name])) as servers:
        decodes = [servers.decode, servers.start_another("decode")]
        for _ in range(3):
            assert_right_at_once(servers, decodes)
        assert_heads_moved(servers)


@pytest.mark.nightly
@pytest.mark.parametrize("backend", ["nixl", "mooncake"])
def test_smaller_and_larger_decode_servers_at_once(serve, backend):
    """The same prefill ranks pack for one server, and send whole rows to the other."""
    with serve(with_backend(backend, SIZES["tp2_to_1"])) as servers:
        decodes = [servers.decode, servers.start_another("decode", Side(tp=4))]
        for _ in range(3):
            assert_right_at_once(servers, decodes)
        packed, interleaved = packing_counts(servers)
        assert all(packed) and all(interleaved), (packed, interleaved)


@pytest.mark.nightly
def test_two_fleets_at_once(serve):
    """One packs, the other one interleaves."""
    with serve(SIZES["tp1_to_2"]) as one, serve(SIZES["tp2_to_1"]) as other:
        with ThreadPoolExecutor(2) as pool:
            for done in [pool.submit(assert_all_right, servers) for servers in (one, other)]:
                done.result()
        assert_heads_moved(one)
        assert_heads_moved(other)
