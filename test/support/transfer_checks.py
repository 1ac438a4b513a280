"""Requests between ranks, and checks of their outcomes."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from engine_release import NIGHTLY_IF_NOT_DEFAULT, SINCE_0_5_18
from fleet import HELD_SECONDS, Fleet, Outcome, Rank, Servers, Side

from pd_harness.polling import is_in_time, wait_until
from pd_harness.ports import free_ports

BACKENDS = ["nixl", "mooncake"]
# Three chunks: transfers 1 to 3 bring KV, the 4th the metadata. All requests have the same pages,
# so that each one overwrites all that a failed one has left behind.
PAGES = ([1, 2, 3, 4], [4, 5, 6, 7], [1, 2, 1])
FAILURE_SECONDS = 5  # within which a busy machine reports a failure
SETTLE_SECONDS = 5  # after which nothing of a finished request is kept
# Interval at which later releases' Mooncake probes a peer after a failed write; NIXL's is 1 s.
PROBE_SECONDS = 0.1
PROBE_ENVIRONMENT = {"SGLANG_FAILED_SESSION_PROBE_INTERVAL_S": str(PROBE_SECONDS)}
HEARTBEAT_SECONDS = 2
# For a decode rank: a server is lost after one failed heartbeat.
HEARTBEAT = {
    "SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL": str(HEARTBEAT_SECONDS),
    "SGLANG_DISAGGREGATION_HEARTBEAT_MAX_FAILURE": "1",
}
HANG_SECONDS = 3  # managers alone answer in less than 0.1 s
SAMPLED_CASES = 6  # of so many, every run has one in a release other than the default
JOINS = 50
JOIN_SECONDS = 120
# (pages on prefill, pages on decode, chunks): one page, a run, scattered, scattered in chunks
REQUESTS = [
    ([3], [5], None),
    ([1, 2, 3, 4], [4, 5, 6, 7], None),
    ([9, 2, 3, 7, 1], [0, 1, 2, 8, 11], None),
    ([2, 3, 8, 5, 6, 11], [10, 9, 3, 4, 5, 0], [2, 1, 3]),
]


def only_0_5_9(why: str):
    """Returns a mark for tests of 0.5.9 only; `why` says why later releases do not need them."""
    return pytest.mark.skipif(SINCE_0_5_18, reason=f"0.5.9 alone: {why}")


def nightly_except(cases, *always) -> list:
    """Returns the cases as parameters, marked nightly if they are not in `always`."""
    at_night = [pytest.mark.nightly]
    return [pytest.param(case, marks=[] if case in always else at_night) for case in cases]


def sampled_for_other_releases(cases, more_marks=lambda case: []) -> list:
    """Returns the cases as parameters; other releases have one of `SAMPLED_CASES` by day."""
    return [
        pytest.param(
            case,
            marks=[*(NIGHTLY_IF_NOT_DEFAULT if at % SAMPLED_CASES else []), *more_marks(case)],
        )
        for at, case in enumerate(cases)
    ]


def assert_right(servers: Servers, *request, **more) -> Outcome:
    """Asserts that every byte of a request arrives; the arguments are `Servers.request`'s."""
    outcome = servers.request(*request, **more)
    assert outcome.state == "right", (request, outcome)
    return outcome


def assert_all_right(servers: Servers, requests=REQUESTS) -> None:
    for request in requests:
        assert_right(servers, *request)


def assert_no_room_kept(servers: Servers, seconds: float = SETTLE_SECONDS) -> None:
    """Asserts that within `seconds` no table of any rank has a room."""

    def kept() -> list[dict]:
        counts = servers.room_counts()
        return [tables for tables in counts if any(tables.values())]

    assert_eventually(kept, [], seconds)


def moves_heads(fleet: Fleet) -> str:
    """Returns which side rearranges KV heads if both are patched: `prefill`, `decode`, or neither.

    Prefill packs, decode interleaves; neither does if a rank of either side holds the same heads.
    """
    sizes = (fleet.prefill.tp, fleet.decode.tp)
    totals = [fleet.kv_heads]
    if fleet.prefill.draft_layers and fleet.decode.draft_layers:
        totals.append(fleet.draft_heads)
    if fleet.hybrid == "swa" and fleet.window_heads:
        totals.append(fleet.window_heads)
    held = [[max(1, total // size) for total in totals] for size in sizes]
    if fleet.mla or held[0] == held[1]:
        return ""
    return "prefill" if sizes[0] < sizes[1] else "decode"


def packing_counts(servers: Servers) -> tuple[list[int], list[int]]:
    """Returns what each prefill rank has packed, and what each decode rank has interleaved.

    `rank_packing.PackingCounts` says what counts.
    """
    packed = [rank.call("health")["packed"] for rank in servers.prefill]
    return packed, [rank.call("health")["interleaved"] for rank in servers.decode]


def assert_heads_moved(servers: Servers, by: str | None = None) -> None:
    """Asserts that side `by`, `moves_heads` by default, has packed or interleaved, and no other."""
    by = moves_heads(servers.fleet) if by is None else by
    packed, interleaved = packing_counts(servers)
    # A prefill stage may have nothing to pack.
    assert (max(packed) > 0) == (by == "prefill"), (by, packed)
    assert min(interleaved) > 0 if by == "decode" else max(interleaved) == 0, (by, interleaved)


def assert_transfers(servers: Servers, pages=PAGES) -> None:
    """Asserts that a request is right, and that no rank keeps its room."""
    assert_right(servers, *pages)
    assert_no_room_kept(servers)


def assert_eventually(measure, wanted, seconds: float = SETTLE_SECONDS) -> None:
    seen = []

    def settled() -> bool:
        seen[:] = [measure()]
        return seen == [wanted]

    assert wait_until(settled, seconds, pause=0.05), (seen, wanted)


def assert_recovers(servers: Servers, pages=PAGES) -> None:
    """Asserts that the next request is served; in later releases, once prefill's probe succeeds."""
    if SINCE_0_5_18:
        assert wait_until(
            lambda: servers.request(*pages).state == "right", SETTLE_SECONDS, PROBE_SECONDS
        )
    assert_transfers(servers, pages)


def assert_failed(outcome: Outcome, said: str, within: float = FAILURE_SECONDS) -> None:
    """Asserts that all ranks failed within `within` seconds, each side with `said` as reason.

    Decode may keep pages for `HELD_SECONDS` longer.
    """
    for side, limit in ((outcome.prefill, within), (outcome.decode, within + HELD_SECONDS)):
        assert {answer["state"] for answer in side} == {"failed"}, outcome
        assert is_in_time(max(answer["seconds"] for answer in side), limit), outcome
        assert any(said in answer["reason"] for answer in side), outcome


def reduce_polls(ranks: list[Rank]) -> None:
    """Makes the ranks all-reduce their polls, as the TP ranks of one server do."""
    (port,) = free_ports(1)
    with ThreadPoolExecutor(len(ranks)) as pool:
        list(pool.map(lambda rank: rank.call("reduce_polls", port=port), ranks))


def assert_ranks_can_join_while_sending(serve, decode_tp: int = 1) -> None:
    """Asserts that registrations and sends never call NIXL at the same time.

    The scheduler sends, or with more decode TP ranks threads that pack.
    """
    with serve(Fleet(decode=Side(tp=decode_tp), layers=4, page_size=1, pages=400)) as servers:
        (prefill,) = servers.prefill
        many = (list(range(0, 400, 2)), list(range(1, 400, 2)))
        assert_transfers(servers, many)
        joining, *_ = servers.start_another("decode")
        before = prefill.call("health")["peers"]
        prefill.call("count_agent_calls")
        with ThreadPoolExecutor(1) as pool:
            joined = pool.submit(joining.call, "register_decode_ranks", count=JOINS)

            def all_known() -> bool:
                assert_transfers(servers, many)
                return prefill.call("health")["peers"] > before + JOINS

            assert wait_until(all_known, JOIN_SECONDS, pause=0)
            assert joined.result() == {"state": "done"}
        assert_transfers(servers, many)
        calls = prefill.call("count_agent_calls")
        assert calls["count"] > JOINS and calls["at_once"] == 0, calls


def assert_connected_early(servers: Servers) -> None:
    """Asserts that NIXL connects all prefill and decode ranks before the first large transfer."""

    def counts() -> list[int]:
        return [rank.call("count_early_connections")["count"] for rank in servers.prefill]

    counts()
    assert_transfers(servers, ([1], [1]))
    assert_eventually(counts, [len(servers.decode)] * len(servers.prefill))
