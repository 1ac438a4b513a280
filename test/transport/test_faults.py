"""Failing transfers and killed ranks: the request fails with a reason, and the next one works."""

import time

import pytest
from engine_release import SINCE_0_5_18
from error_texts import CONNECTION_CUT, LOST_DECODE, LOST_PREFILL, TRANSFER_FAILURES
from fleet import HELD_SECONDS, Fleet, Rank, Servers, Side
from rank_faults import INJECTED_ERROR
from serving_checks import record
from transfer_checks import (
    BACKENDS,
    FAILURE_SECONDS,
    HANG_SECONDS,
    HEARTBEAT,
    HEARTBEAT_SECONDS,
    PAGES,
    PROBE_ENVIRONMENT,
    assert_eventually,
    assert_failed,
    assert_recovers,
    assert_right,
    assert_transfers,
    only_0_5_9,
)
from transport_cases import NSA, ascend

from pd_harness.polling import is_in_time, wait_until

pytestmark = pytest.mark.transport

TRANSFERS = [1, 2, 3, 4]
# Mooncake has one to four connections to a peer; a leak in each of four faults would exceed this.
MORE_FILES = 3
# NIXL's eight worker threads close their sockets to a dead peer when they next have work. A
# transfer of many copies (here 5,600 in a chunk) gives work to all of them.
MANY = {"layers": 4, "page_size": 1, "pages": 4300, "nixl_threads": 8}
MANY_PAGES = (list(range(1, 4200, 2)), list(range(2, 4202, 2)), [700] * 3)
# Delay between the loss of a peer and closing its socket; the default is a minute.
CLOSE_SECONDS = 1.0
SILENT_PEER = "has not answered for 10 s"
BACK_OFF = 2.0
DEATHS = 2
PROBING_PREFILL = Side(environment=PROBE_ENVIRONMENT)
# Seconds for which decode keeps pages that prefill may still write to.
RELEASE_TIMEOUT = {"SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT": "5"}


def healths(ranks: list[Rank]) -> list[dict]:
    return [rank.call("health") for rank in ranks]


def record_fault(case: str, backend: str, answer: dict, said: str) -> None:
    """Records, for `scripts/evidence.sh`, how a survivor was notified of a fault.

    Call it after the next request has been served.
    """
    seconds = round(answer["seconds"], 1)
    record("faults", case=case, backend=backend, seconds=seconds, client=said, after="right")


def healths_with_early_closing(ranks: list[Rank]) -> list[dict]:
    """Makes the ranks close sockets CLOSE_SECONDS after a peer's loss; returns their health."""
    for rank in ranks:
        rank.call("set_constants", module="peer_sockets", CLOSE_AFTER_SECONDS=CLOSE_SECONDS)
    return healths(ranks)


def assert_no_leak(ranks: list[Rank], before: list[dict], work=lambda: None) -> None:
    """Asserts that the ranks' health settles to `before`; calls `work` before each check.

    ZeroMQ sockets (a count) and threads (names) are the same then; open files include sockets.
    """

    def changed() -> list:
        work()
        return [
            (now, was)
            for now, was in zip(healths(ranks), before)
            if any(now[name] != was[name] for name in ("sockets", "threads"))
            or now["files"] > was["files"] + MORE_FILES
        ]

    assert_eventually(changed, [])


def assert_recovers_from_each_fault(
    servers: Servers, how: str, said: str, transfers, **plan
) -> None:
    """Injects a fault per transfer; after a warm-up with one fault, the ranks must not leak."""
    ranks = [*servers.prefill, *servers.decode]
    assert_transfers(servers)
    before = None
    for at in (transfers[0], *transfers):
        servers.prefill[0].call("plan_faults", how=how, at=[at], **plan)
        assert_failed(servers.request(*PAGES), said)
        assert_recovers(servers)
        before = before or healths(ranks)
    assert_no_leak(ranks, before)


@pytest.mark.parametrize("backend, how", TRANSFER_FAILURES)
def test_failing_transfer_fails_only_its_request(serve, backend, how):
    with serve(Fleet(prefill=PROBING_PREFILL, backend=backend)) as servers:
        assert_recovers_from_each_fault(servers, how, TRANSFER_FAILURES[backend, how], TRANSFERS)


@pytest.mark.parametrize(
    "backend, how",
    [
        ("mooncake", "status"),
        ("mooncake", "exception"),
        ("nixl", "status"),
        ("nixl", "late status"),
    ],
)
def test_failing_state_transfer_fails_its_request(serve, backend, how):
    with serve(Fleet(prefill=PROBING_PREFILL, backend=backend, layers=4, **NSA)) as servers:
        assert_recovers_from_each_fault(
            servers, how, TRANSFER_FAILURES[backend, how], [1] * 4, only_state=True
        )


@only_0_5_9("later ones leave it alone at once, and ask it whether it is alive")
@pytest.mark.parametrize(
    "failing, ends", [([1], ["failed", "success", "success"]), ([1, 2], ["failed"] * 3)]
)
def test_mooncake_backs_off_after_two_failures(serve, failing, ends):
    """Each attempt would block on a dead peer's time-out, and delay requests of other peers."""
    rooms = [1001, 1002, 1003]
    with serve(Fleet(backend="mooncake")) as servers:
        assert_transfers(servers)
        (prefill,), (decode,) = servers.prefill, servers.decode
        prefill.call("set_constants", module="back_off", BACK_OFF_SECONDS=BACK_OFF)
        prefill.call("plan_faults", how="status", at=failing)
        request = {"pages": [1, 2], "chunks": [2], "seconds": 10}
        sent, ended = [], []
        for room in rooms:  # a new room does not end the back-off
            decode.call("open_room", room=room, pages=[4, 5])
            sent.append(prefill.call("send", room=room, **request))
            ended.append(decode.call("wait_for_room", room=room, seconds=30))
        assert [answer["state"] for answer in sent] == ends, sent
        assert [answer["state"] for answer in ended] == ends, ended
        if ends[-1] == "failed":
            assert "retrying in" in sent[-1]["reason"], sent
            time.sleep(BACK_OFF)
        assert_transfers(servers)


CUT_SECONDS = 2.0
SERVED_AGAIN = 5.0  # seconds after the link is back
LINK_FLEETS = {"mooncake": Fleet(backend="mooncake"), "ascend": ascend(mla=True)}


def cut_link(servers: Servers) -> None:
    """Cuts the link for two seconds, in which requests fail; returns when it is back."""
    assert_right(servers, *PAGES)
    servers.prefill[0].call("plan_faults", how="down", seconds=CUT_SECONDS)
    back = time.monotonic() + CUT_SECONDS
    while (left := back - time.monotonic()) > 0:
        assert servers.request([1, 2], [4, 5], seconds=30).state == "failed"
        time.sleep(min(0.1, left))


@pytest.mark.parametrize("backend", LINK_FLEETS)
def test_recovers_from_a_link_outage(serve, backend):
    with serve(LINK_FLEETS[backend]) as servers:
        cut_link(servers)
        assert wait_until(lambda: servers.request(*PAGES).state == "right", SERVED_AGAIN, pause=0.1)
        assert_transfers(servers)


@pytest.mark.nightly
@pytest.mark.parametrize("backend", ["mooncake", *["ascend"] * SINCE_0_5_18])
def test_stock_does_not_recover_from_a_link_outage(serve, backend):
    """0.5.9 never recovers; later releases need an answered probe, half a minute later or never.

    Over Ascend, 0.5.9 does not work with MemFabric 1.1.3 or later.
    """
    with serve(LINK_FLEETS[backend], "stock", "stock") as servers:
        cut_link(servers)
        assert not wait_until(
            lambda: servers.request([1, 2], [4, 5]).state == "right", SERVED_AGAIN, pause=0.1
        )


@only_0_5_9("later ones count the state")
def test_stock_mooncake_reports_success_without_state(serve):
    with serve(Fleet(backend="mooncake", layers=4, **NSA), "stock", "stock") as servers:
        servers.prefill[0].call("plan_faults", how="status", at=[1], only_state=True)
        outcome = servers.request(*PAGES, seconds=30)
        assert outcome.prefill[0]["state"] == "success", outcome
        assert outcome.decode[0]["state"] == "wrong", outcome
        assert "('state', False, 0)" in outcome.reasons


def test_stock_mooncake_blacklists_a_live_peer(serve):
    with serve(Fleet(backend="mooncake"), "stock", "stock") as servers:
        assert_right(servers, *PAGES)
        servers.prefill[0].call("plan_faults", how="status", at=[1])
        for said in ("Failed to send kv chunk", "is not alive", "is not alive"):
            outcome = servers.request([1, 2], [4, 5], seconds=30)
            assert outcome.state == "failed", outcome
            assert said in outcome.reasons, outcome


def test_stock_mooncake_hangs_after_an_exception(serve):
    with serve(Fleet(backend="mooncake"), "stock", "stock") as servers:
        assert_right(servers, *PAGES)
        servers.prefill[0].call("plan_faults", how="exception", at=[1])
        for _ in range(2):
            assert servers.request(*PAGES, seconds=HANG_SECONDS).state == "hang"


@only_0_5_9("later ones send in threads of their own")
@pytest.mark.parametrize("how", ["status", "late status"])
def test_stock_nixl_raises_in_the_scheduler(serve, how):
    """Decode is not notified and would wait for its time-out of minutes."""
    with serve(Fleet(k_width=4, v_width=4), "stock", "stock") as servers:
        assert_right(servers, *PAGES)
        servers.prefill[0].call("plan_faults", how=how, at=[3])
        outcome = servers.request(*PAGES, seconds=5)
        assert outcome.prefill[0]["state"] == "raised", outcome
        assert is_in_time(outcome.prefill[0]["seconds"], FAILURE_SECONDS)
        assert outcome.decode[0]["state"] == "hang", outcome


def test_stock_decode_is_notified_of_a_failure(serve):
    """Tests Mooncake only, because stock has no failure message for NIXL."""
    with serve(Fleet(prefill=PROBING_PREFILL, backend="mooncake"), decode="stock") as servers:
        for how in ("status", "exception"):
            servers.prefill[0].call("plan_faults", how=how, at=[2])
            outcome = servers.request(*PAGES)
            assert outcome.decode[0]["state"] == outcome.prefill[0]["state"] == "failed", outcome
            assert_recovers(servers)


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_of_two_decode_ranks_is_unreachable(serve, backend):
    with serve(Fleet(Side(), Side(tp=2), backend=backend, v_width=4)) as servers:
        assert_transfers(servers)
        # Two transfers bring a rank all its KV, in one packing buffer, and its metadata: the first
        # rank first, except over NIXL in 0.5.9, where threads pack for both.
        servers.prefill[0].call("plan_faults", how="exception", at=[3])
        outcome = servers.request([1, 2], [4, 5])
        assert outcome.prefill[0]["state"] == "failed", outcome
        failed = [answer for answer in outcome.decode if answer["state"] == "failed"]
        assert failed and all(INJECTED_ERROR in answer["reason"] for answer in failed), outcome
        assert_transfers(servers)


@only_0_5_9("in later ones it is the scheduler that keeps the pages until prefill is done")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "side, wait, earliest, latest",
    [
        pytest.param(Side(tp=2), 2, 2, 4.5, id="tp2"),
        pytest.param(Side(pp=2), 2, 2, 4.5, id="pp2"),
        pytest.param(Side(tp=2), 8, 5, 7.5, id="tp2_too_long", marks=pytest.mark.nightly),
    ],
)
def test_decode_keeps_pages_while_other_senders_write(serve, backend, side, wait, earliest, latest):
    """Decode keeps the pages while a sender may still write to them, for at most 5 s here."""
    with serve(Fleet(side, Side(environment=RELEASE_TIMEOUT), backend=backend)) as servers:
        assert_transfers(servers)
        slow, failing = servers.prefill
        slow.call("plan_faults", how="wait", at=[1], seconds=wait)
        failing.call("plan_faults", how="exception", at=[1])
        outcome = servers.request([1, 2], [4, 5])
        (decode,) = outcome.decode
        assert outcome.prefill[1]["state"] == "failed", outcome
        assert outcome.prefill[1]["seconds"] < outcome.prefill[0]["seconds"], outcome
        assert decode["state"] == "failed", outcome
        assert TRANSFER_FAILURES[backend, "exception"] in decode["reason"], outcome
        assert decode["seconds"] >= earliest and is_in_time(decode["seconds"], latest)
        assert_transfers(servers)


@pytest.mark.nightly
@pytest.mark.parametrize("backend", BACKENDS)
def test_prefill_killed_in_mid_transfer(serve, backend):
    with serve(Fleet(decode=Side(environment=HEARTBEAT), backend=backend)) as servers:
        assert_transfers(servers)
        time.sleep(2 * HEARTBEAT_SECONDS)  # decode keeps the heartbeats' HTTP connection open
        before = healths_with_early_closing(servers.decode)
        for _ in range(DEATHS):
            dying = servers.pids("prefill")
            servers.prefill[0].call("plan_faults", how="kill", at=[2], pids=dying)
            outcome = servers.request(*PAGES)
            (prefill,), (decode,) = outcome.prefill, outcome.decode
            assert (prefill["state"], decode["state"]) == ("died", "failed"), outcome
            # Failed heartbeats or the silent connection notify decode, whichever comes first.
            assert any(said in decode["reason"] for said in (LOST_PREFILL, SILENT_PEER)), outcome
            # Two heartbeats, each with its time-out.
            assert is_in_time(decode["seconds"], 15 + HELD_SECONDS), outcome
            time.sleep(CLOSE_SECONDS)  # counts from decode's abort message to prefill
            servers.start("prefill")
            assert_transfers(servers)
        record_fault("prefill rank killed in mid-transfer", backend, decode, decode["reason"])
        assert_no_leak(servers.decode, before)


@pytest.mark.parametrize("how", ["kill", pytest.param("freeze", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_decode_killed_in_mid_transfer(serve, backend, how):
    with serve(Fleet(backend=backend, **MANY)) as servers:
        assert_transfers(servers, MANY_PAGES)
        before = healths_with_early_closing(servers.prefill)
        for _ in range(DEATHS):
            dying = servers.pids("decode")
            servers.prefill[0].call("plan_faults", how=how, at=[2], pids=dying, seconds=1)
            outcome = servers.request(*MANY_PAGES, seconds=90)
            (prefill,), (decode,) = outcome.prefill, outcome.decode
            assert decode["state"] == "died", outcome
            # Later releases' NIXL writes need no answer of decode, and may finish before it dies.
            if not (SINCE_0_5_18 and how == "freeze" and prefill["state"] == "success"):
                assert prefill["state"] == "failed", outcome
                assert LOST_DECODE[backend] in prefill["reason"], outcome
            assert is_in_time(prefill["seconds"], 60), outcome
            time.sleep(CLOSE_SECONDS)
            servers.start("decode")
            assert_recovers(servers, MANY_PAGES)
        said = prefill.get("reason", "nothing: all was written")
        record_fault(f"decode rank killed in mid-transfer ({how})", backend, prefill, said)
        if not SINCE_0_5_18:  # later releases keep their sockets to dead ranks
            assert_no_leak(servers.prefill, before, lambda: assert_transfers(servers, MANY_PAGES))


@pytest.mark.parametrize("backend", BACKENDS)
def test_lost_connections_are_restored(serve, backend):
    with serve(Fleet(prefill=PROBING_PREFILL, backend=backend)) as servers:
        assert_transfers(servers)
        for cutting in (*servers.prefill, *servers.decode):
            assert cutting.call("cut_connections")["cut"]
            may_fail = SINCE_0_5_18 or backend == "mooncake"
            if may_fail and (outcome := servers.request(*PAGES)).state != "right":
                assert_failed(outcome, CONNECTION_CUT[backend])
            assert_recovers(servers)
        servers.prefill[0].call("plan_faults", how="cut", at=[2])
        outcome = servers.request(*PAGES)
        (decode,) = outcome.decode
        said = decode.get("reason") or "nothing: the request is right"
        record_fault("connections cut in mid-transfer", backend, decode, said)
        if outcome.state != "right":
            assert_failed(outcome, LOST_DECODE[backend])
        assert_recovers(servers)


def test_stock_nixl_does_not_reconnect(serve):
    with serve(Fleet(k_width=4, v_width=4), "stock", "stock") as servers:
        assert_right(servers, *PAGES)
        assert servers.decode[0].call("cut_connections")["cut"]
        for _ in range(2):
            outcome = servers.request(*PAGES, seconds=HANG_SECONDS)
            assert outcome.prefill[0]["state"] == ("failed" if SINCE_0_5_18 else "raised"), outcome
