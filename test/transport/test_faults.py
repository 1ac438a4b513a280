"""Transfers that fail and ranks that die: the request fails with its reason, the next one works."""

import time

import pytest
from fleet import Fleet, Rank, Servers, Side
from of_release import IS_LATER, at_night_elsewhere
from rank_faults import ERROR
from reasons import CUT, FAILING, LOST_DECODE, LOST_PREFILL
from topologies import ascend
from transfer_checks import (
    AT_ONCE,
    BACKENDS,
    HANG_SECONDS,
    PAGES,
    PROBING,
    assert_failed,
    assert_right,
    assert_served_again,
    eventually,
    of_first,
)

from pd_harness.waiting import awaited, in_time

pytestmark = pytest.mark.transport

TRANSFERS = [1, 2, 3, 4]
# Mooncake has one to four connections to a peer; a leak for each of four faults would be more.
MORE_FILES = 3
# NIXL's eight worker threads close their sockets to a dead peer when they next have work, which a
# transfer of many copies (here 5,600 in a chunk) gives to all.
MANY = {"layers": 4, "page_size": 1, "pages": 4300, "nixl_threads": 8}
MANY_PAGES = (list(range(1, 4200, 2)), list(range(2, 4202, 2)), [700] * 3)
# So long after a peer has gone its socket is closed; in use it is a minute.
GONE_SECONDS = 1.0
SILENT = "has not answered for 10 s"
BACK_OFF = 2.0
DEATHS = 2
# Of a decode rank: it takes a server for lost that once does not answer.
HEARTBEAT = {
    "SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL": "2",
    "SGLANG_DISAGGREGATION_HEARTBEAT_MAX_FAILURE": "1",
}
PROBES = Side(environment=PROBING)
# Seconds for which decode keeps pages that may be written to.
KEPT = {"SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT": "5"}
NSA = {"layers": 4, "mla": True, "index_keys": True, "page_size": 64}


def held(ranks: list[Rank]) -> tuple[list[int], list[tuple[int, list[str]]]]:
    """Of each rank: open files, sockets too; and what must stay, ZeroMQ sockets and threads."""
    healths = [rank.call("health") for rank in ranks]
    same = [(health["sockets"], health["threads"]) for health in healths]
    return [health["files"] for health in healths], same


def held_without_gone_peers(ranks: list[Rank]) -> tuple:
    """The same; from now on these ranks close sockets to peers GONE_SECONDS after they went."""
    for rank in ranks:
        rank.call("forget_gone_peers", seconds=GONE_SECONDS)
    return held(ranks)


def assert_held_no_more(ranks: list[Rank], before, work=lambda: None) -> None:
    """Once the ranks have had some `work`."""
    files, same = before

    def grown() -> list:
        work()
        now = held(ranks)
        too_many = [(n, of) for n, of in zip(now[0], files) if n > of + MORE_FILES]
        return too_many + [(n, of) for n, of in zip(now[1], same) if n != of]

    eventually(grown, [])


def assert_each_fault_is_survived(servers: Servers, how: str, said: str, transfers, **plan) -> None:
    """After a warm-up with one fault nothing is held that was not held before."""
    ranks = [*servers.prefill, *servers.decode]
    assert_right(servers)
    before = None
    for at in (transfers[0], *transfers):
        servers.prefill[0].call("plan_faults", how=how, at=[at], **plan)
        assert_failed(servers.request(*PAGES), said)
        assert_served_again(servers)
        before = before or held(ranks)
    assert_held_no_more(ranks, before)


@pytest.mark.parametrize("backend, how", FAILING)
def test_a_failing_transfer_fails_its_request_alone(serve, backend, how):
    with serve(Fleet(prefill=PROBES, backend=backend)) as servers:
        assert_each_fault_is_survived(servers, how, FAILING[backend, how], TRANSFERS)


@pytest.mark.parametrize(
    "backend, how",
    [
        ("mooncake", "status"),
        ("mooncake", "exception"),
        ("nixl", "status"),
        ("nixl", "late status"),
    ],
)
def test_a_request_fails_with_its_state(serve, backend, how):
    with serve(Fleet(prefill=PROBES, backend=backend, **NSA)) as servers:
        assert_each_fault_is_survived(servers, how, FAILING[backend, how], [1] * 4, only_state=True)


@of_first("later ones leave it alone at once, and ask it whether it is alive")
@pytest.mark.parametrize(
    "failing, ends",
    [
        ([1], ["failed", "success", "success"]),
        ([1, 2], ["failed", "failed", "failed"]),
    ],
)
def test_mooncake_leaves_a_peer_alone_after_two_failures(serve, failing, ends):
    """Each try would wait for the time-out of a dead peer, and others for that."""
    rooms = [1001, 1002, 1003]
    with serve(Fleet(backend="mooncake")) as servers:
        assert_right(servers)
        (prefill,), (decode,) = servers.prefill, servers.decode
        prefill.call("back_off", seconds=BACK_OFF)
        prefill.call("plan_faults", how="status", at=failing)
        request = {"pages": [1, 2], "chunks": [2], "seconds": 10}
        sent, ended = [], []
        for room in rooms:  # that a room is new is no reason to try again
            decode.call("ask", room=room, pages=[4, 5])
            sent.append(prefill.call("send", room=room, **request))
            ended.append(decode.call("end", room=room, seconds=30))
        assert [answer["state"] for answer in sent] == ends, sent
        assert [answer["state"] for answer in ended] == ends, ended
        if ends[-1] == "failed":
            assert "it is tried again in" in sent[-1]["reason"], sent
            time.sleep(BACK_OFF)
        assert_right(servers)


CUT_SECONDS = 2.0
SERVED_AGAIN = 5.0  # seconds after the link is back
ON_A_LINK = {"mooncake": Fleet(backend="mooncake"), "ascend": ascend(mla=True)}


def cut_link(servers: Servers) -> None:
    """For two seconds each request fails; returns when the link is back."""
    assert servers.request(*PAGES).state == "right"
    servers.prefill[0].call("plan_faults", how="down", seconds=CUT_SECONDS)
    back = time.monotonic() + CUT_SECONDS
    while (left := back - time.monotonic()) > 0:
        assert servers.request([1, 2], [4, 5], seconds=30).state == "failed"
        time.sleep(min(0.1, left))


@pytest.mark.parametrize("backend", ON_A_LINK)
def test_a_link_that_is_cut_for_two_seconds(serve, backend):
    with serve(ON_A_LINK[backend]) as servers:
        cut_link(servers)
        assert awaited(lambda: servers.request(*PAGES).state == "right", SERVED_AGAIN, pause=0.1)
        assert_right(servers)


@at_night_elsewhere
@pytest.mark.parametrize(
    "backend", [pytest.param("mooncake", marks=pytest.mark.nightly), *["ascend"] * IS_LATER]
)
def test_stock_does_not_serve_after_a_link_was_cut(serve, backend):
    """0.5.9 never again, later ones once a probe is answered, half a minute later or never.

    (0.5.9 over Ascend serves nothing with MemFabric from 1.1.3 on.)
    """
    with serve(ON_A_LINK[backend], "stock", "stock") as servers:
        cut_link(servers)
        assert not awaited(
            lambda: servers.request([1, 2], [4, 5]).state == "right", SERVED_AGAIN, pause=0.1
        )


@at_night_elsewhere
@of_first("later ones count the state")
def test_stock_mooncake_reports_success_without_the_state(serve):
    with serve(Fleet(backend="mooncake", **NSA), "stock", "stock") as servers:
        servers.prefill[0].call("plan_faults", how="status", at=[1], only_state=True)
        outcome = servers.request(*PAGES, seconds=30)
        assert outcome.prefill[0]["state"] == "success", outcome
        assert outcome.decode[0]["state"] == "wrong", outcome
        assert "('state', False, 0)" in outcome.reasons


@at_night_elsewhere
def test_stock_mooncake_condemns_a_live_peer(serve):
    with serve(Fleet(backend="mooncake"), "stock", "stock") as servers:
        assert servers.request(*PAGES).state == "right"
        servers.prefill[0].call("plan_faults", how="status", at=[1])
        for said in ("Failed to send kv chunk", "is not alive", "is not alive"):
            outcome = servers.request([1, 2], [4, 5], seconds=30)
            assert outcome.state == "failed", outcome
            assert said in outcome.reasons, outcome


@at_night_elsewhere
def test_stock_mooncake_hangs_for_ever_after_an_exception(serve):
    with serve(Fleet(backend="mooncake"), "stock", "stock") as servers:
        assert servers.request(*PAGES).state == "right"
        servers.prefill[0].call("plan_faults", how="exception", at=[1])
        for _ in range(2):
            assert servers.request(*PAGES, seconds=HANG_SECONDS).state == "hang"


@at_night_elsewhere
@of_first("later ones send in threads of their own")
@pytest.mark.parametrize("how", ["status", "late status"])
def test_stock_nixl_raises_in_the_scheduler(serve, how):
    """Decode, which is not told, would wait for its time-out of minutes."""
    with serve(Fleet(k_width=4, v_width=4), "stock", "stock") as servers:
        assert servers.request(*PAGES).state == "right"
        servers.prefill[0].call("plan_faults", how=how, at=[3])
        outcome = servers.request(*PAGES, seconds=5)
        assert outcome.prefill[0]["state"] == "raised", outcome
        assert in_time(outcome.prefill[0]["seconds"], AT_ONCE)
        assert outcome.decode[0]["state"] == "hang", outcome


@at_night_elsewhere
def test_a_stock_decode_hears_of_the_failure(serve):
    """Mooncake alone: stock has no failure message for NIXL."""
    with serve(Fleet(prefill=PROBES, backend="mooncake"), decode="stock") as servers:
        for how in ("status", "exception"):
            servers.prefill[0].call("plan_faults", how=how, at=[2])
            outcome = servers.request(*PAGES)
            assert outcome.decode[0]["state"] == outcome.prefill[0]["state"] == "failed", outcome
            assert_served_again(servers)


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_of_two_decode_ranks_is_not_reached(serve, backend):
    with serve(Fleet(Side(), Side(tp=2), backend=backend)) as servers:
        assert_right(servers)
        # The first rank has all its KV and its metadata by then.
        servers.prefill[0].call("plan_faults", how="exception", at=[3])
        outcome = servers.request([1, 2], [4, 5])
        assert outcome.prefill[0]["state"] == "failed", outcome
        failed = [answer for answer in outcome.decode if answer["state"] == "failed"]
        assert failed and all(ERROR in answer["reason"] for answer in failed), outcome
        assert_right(servers)


@of_first("in later ones it is the scheduler that keeps the pages until prefill is done")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "side, wait, told_within",
    [
        (Side(tp=2), 2, (2, 4.5)),
        (Side(pp=2), 2, (2, 4.5)),
        pytest.param(Side(tp=2), 8, (5, 7.5), marks=pytest.mark.nightly),
    ],
    ids=["tp2", "pp2", "tp2_too_long"],
)
def test_decode_waits_for_the_other_senders(serve, backend, side, wait, told_within):
    """Pages are not given away while one of them may still write there, for at most 5 s here."""
    with serve(Fleet(side, Side(environment=KEPT), backend=backend)) as servers:
        assert_right(servers)
        slow, failing = servers.prefill
        slow.call("plan_faults", how="wait", at=[1], seconds=wait)
        failing.call("plan_faults", how="exception", at=[1])
        outcome = servers.request([1, 2], [4, 5])
        (decode,) = outcome.decode
        assert outcome.prefill[1]["state"] == "failed", outcome
        assert outcome.prefill[1]["seconds"] < outcome.prefill[0]["seconds"], outcome
        assert decode["state"] == "failed", outcome
        assert FAILING[backend, "exception"] in decode["reason"], outcome
        assert decode["seconds"] >= told_within[0] and in_time(decode["seconds"], told_within[1])
        assert_right(servers)


@pytest.mark.parametrize("backend", BACKENDS)
def test_prefill_is_killed_in_mid_transfer(serve, backend, note):
    with serve(Fleet(decode=Side(environment=HEARTBEAT), backend=backend)) as servers:
        assert_right(servers)
        before = held_without_gone_peers(servers.decode)
        for _ in range(DEATHS):
            dying = servers.pids("prefill")
            servers.prefill[0].call("plan_faults", how="kill", at=[2], pids=dying)
            outcome = servers.request(*PAGES)
            (prefill,), (decode,) = outcome.prefill, outcome.decode
            assert (prefill["state"], decode["state"]) == ("died", "failed"), outcome
            # Heartbeats tell, or later the connection; whichever is first.
            assert any(said in decode["reason"] for said in (LOST_PREFILL, SILENT)), outcome
            assert in_time(decode["seconds"], 15), outcome  # two heartbeats, each with its time-out
            time.sleep(GONE_SECONDS)  # since decode told it that the request is over
            servers.start("prefill")
            assert_right(servers)
        note("prefill rank killed in mid-transfer", backend, decode)
        assert_held_no_more(servers.decode, before)


@pytest.mark.parametrize("how", ["kill", pytest.param("freeze", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_decode_is_killed_in_mid_transfer(serve, backend, how, note):
    with serve(Fleet(backend=backend, **MANY)) as servers:
        assert_right(servers, MANY_PAGES)
        before = held_without_gone_peers(servers.prefill)
        for _ in range(DEATHS):
            dying = servers.pids("decode")
            servers.prefill[0].call("plan_faults", how=how, at=[2], pids=dying, seconds=1)
            outcome = servers.request(*MANY_PAGES, seconds=90)
            (prefill,), (decode,) = outcome.prefill, outcome.decode
            assert decode["state"] == "died", outcome
            # Later ones of NIXL ask decode for no answer, and may be done before it dies.
            if not (IS_LATER and how == "freeze" and prefill["state"] == "success"):
                assert prefill["state"] == "failed", outcome
                assert LOST_DECODE[backend] in prefill["reason"], outcome
            assert in_time(prefill["seconds"], 60), outcome
            time.sleep(GONE_SECONDS)
            servers.start("decode")
            assert_served_again(servers, MANY_PAGES)
        said = prefill.get("reason", "nothing: all was written")
        note(f"decode rank killed in mid-transfer ({how})", backend, {**prefill, "reason": said})
        if not IS_LATER:  # later ones keep their sockets to ranks that are dead
            assert_held_no_more(servers.prefill, before, lambda: assert_right(servers, MANY_PAGES))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_live_peer_is_connected_again(serve, backend, note):
    with serve(Fleet(prefill=PROBES, backend=backend)) as servers:
        assert_right(servers)
        for cutting in (*servers.prefill, *servers.decode):
            assert cutting.call("cut_connections")["cut"]
            may_fail = IS_LATER or backend == "mooncake"
            if may_fail and (outcome := servers.request(*PAGES)).state != "right":
                assert_failed(outcome, CUT[backend])
            assert_served_again(servers)
        servers.prefill[0].call("plan_faults", how="cut", at=[2])
        outcome = servers.request(*PAGES)
        (decode,) = outcome.decode
        said = decode.get("reason") or "nothing: the request is right"
        note("connections cut in mid-transfer", backend, {**decode, "reason": said})
        if outcome.state != "right":
            assert_failed(outcome, LOST_DECODE[backend])
        assert_served_again(servers)


@at_night_elsewhere
def test_stock_nixl_never_reaches_a_live_peer_again(serve):
    with serve(Fleet(k_width=4, v_width=4), "stock", "stock") as servers:
        assert servers.request(*PAGES).state == "right"
        assert servers.decode[0].call("cut_connections")["cut"]
        for _ in range(2):
            outcome = servers.request(*PAGES, seconds=HANG_SECONDS)
            assert outcome.prefill[0]["state"] == ("failed" if IS_LATER else "raised"), outcome
