"""Requests between ranks, and what is looked at in their outcomes."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from fleet import Fleet, Outcome, Rank, Servers
from of_release import ELSEWHERE_AT_NIGHT, IS_LATER

from pd_harness.ports import free_ports
from pd_harness.waiting import awaited, in_time

BACKENDS = ["nixl", "mooncake"]
# Three chunks: transfers 1 to 3 bring KV, the 4th the metadata. All requests have the same pages,
# so that the next one overwrites all that a failed one has left behind.
PAGES = ([1, 2, 3, 4], [4, 5, 6, 7], [1, 2, 1])
AT_ONCE = 5  # seconds, within which a failure is told on a machine that does much else
SETTLED = 5  # seconds, after which nothing is kept of a request that is over
# How often later ones of Mooncake look after a peer to which a write has failed; NIXL: 1 s.
PROBE_SECONDS = 0.1
PROBING = {"SGLANG_FAILED_SESSION_PROBE_INTERVAL_S": str(PROBE_SECONDS)}
HANG_SECONDS = 3  # managers alone answer in less than 0.1 s
JOINS = 50
JOIN_SECONDS = 120
# (pages on prefill, pages on decode, chunks): one page, a run, scattered, scattered in chunks
REQUESTS = [
    ([3], [5], None),
    ([1, 2, 3, 4], [4, 5, 6, 7], None),
    ([9, 2, 3, 7, 1], [0, 1, 2, 8, 11], None),
    ([2, 3, 8, 5, 6, 11], [10, 9, 3, 4, 5, 0], [2, 1, 3]),
]


def of_first(why: str):
    """A mark for what 0.5.9 alone has; why later releases have nothing of it to test."""
    return pytest.mark.skipif(IS_LATER, reason=f"0.5.9 alone: {why}")


def few(cases, *always) -> list:
    """Parameters, of which those not in `always` are tried at night."""
    at_night = [pytest.mark.nightly]
    return [pytest.param(case, marks=[] if case in always else at_night) for case in cases]


def every_second(cases, more_marks=lambda case: []) -> list:
    """Parameters, of which releases other than the default try every second one at night."""
    marks = [[], ELSEWHERE_AT_NIGHT]
    return [
        pytest.param(case, marks=[*marks[at % 2], *more_marks(case)])
        for at, case in enumerate(cases)
    ]


def assert_right(servers: Servers, pages=PAGES) -> None:
    """A request is served, every byte of it, and nothing is kept."""
    outcome = servers.request(*pages)
    assert outcome.state == "right", outcome
    eventually(lambda: [sum(kept.values()) for kept in servers.kept()], [0] * servers.fleet.size)


def eventually(measure, wanted) -> None:
    seen = []

    def settled() -> bool:
        seen[:] = [measure()]
        return seen == [wanted]

    assert awaited(settled, SETTLED, pause=0.05), (seen, wanted)


def assert_served_again(servers: Servers, pages=PAGES) -> None:
    """The next request is; in later releases once prefill has looked after its peer."""
    if IS_LATER:
        assert awaited(lambda: servers.request(*pages).state == "right", SETTLED, PROBE_SECONDS)
    assert_right(servers, pages)


def assert_failed(outcome: Outcome, said: str, within: float = AT_ONCE) -> None:
    """On every rank, in time, with this in the reason on each side."""
    for side in (outcome.prefill, outcome.decode):
        assert {answer["state"] for answer in side} == {"failed"}, outcome
        assert in_time(max(answer["seconds"] for answer in side), within), outcome
        assert any(said in answer["reason"] for answer in side), outcome


def vote(ranks: list[Rank]) -> None:
    """From now on they poll as the TP ranks of one server do."""
    (port,) = free_ports(1)
    with ThreadPoolExecutor(len(ranks)) as pool:
        list(pool.map(lambda rank: rank.call("vote", port=port), ranks))


def assert_ranks_may_join(serve) -> None:
    """The thread that reads registrations adds peers while the scheduler sends: in turns."""
    with serve(Fleet(layers=4, page_size=1, pages=400)) as servers:
        (prefill,) = servers.prefill
        many = (list(range(0, 400, 2)), list(range(1, 400, 2)))
        assert_right(servers, many)
        (joining,) = servers.more("decode")
        before = prefill.call("health")["peers"]
        prefill.call("count_agent_calls")
        with ThreadPoolExecutor(1) as pool:
            joined = pool.submit(joining.call, "join", count=JOINS)

            def all_known() -> bool:
                assert_right(servers, many)
                return prefill.call("health")["peers"] > before + JOINS

            assert awaited(all_known, JOIN_SECONDS, pause=0)
            assert joined.result()["state"] == "joined"
        assert_right(servers, many)
        calls = prefill.call("count_agent_calls")
        assert calls["count"] > JOINS and calls["at_once"] == 0, calls


def assert_connected_early(servers: Servers) -> None:
    """NIXL connects each prefill rank to each decode rank, before anything large is sent."""

    def counts() -> list[int]:
        return [rank.call("connected_early")["count"] for rank in servers.prefill]

    counts()
    assert_right(servers, ([1], [1]))
    eventually(counts, [len(servers.decode)] * len(servers.prefill))
