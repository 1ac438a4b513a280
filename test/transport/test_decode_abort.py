"""Requests that decode aborts, because their client did or because they take too long.

Decode reuses their pages for other requests, so prefill must not write to them any more.
"""

from concurrent.futures import ThreadPoolExecutor

import pytest
from engine_release import SINCE_0_5_23
from error_texts import (
    ABORTED,
    DECODE_ABORTED_EARLY,
    DECODE_TIMED_OUT,
    DECODE_TIMED_OUT_ON_PREFILL,
    REMOVED_UNSENT,
    says_another_rank_failed,
)
from fleet import Fleet, Rank, Servers, Side
from transfer_checks import (
    BACKENDS,
    assert_no_room_kept,
    assert_right,
    assert_transfers,
    nightly_except,
    only_0_5_9,
    reduce_polls,
)

from pd_harness.polling import is_in_time

pytestmark = pytest.mark.transport

ROOM = 900
SOURCE, DESTINATION = [1, 2, 3, 4], [4, 5, 6, 7]
WRITE_AT = 3.0  # seconds; a write that prefill decided on before the abort starts this late
ABORT_AT = 1.0
MAX_DELAY = 1.5
WAITING_TIMEOUT = {"SGLANG_DISAGGREGATION_WAITING_TIMEOUT": "1"}
# For a prefill server that does not notify decode when it has stopped writing: stock 0.5.9 and
# 0.5.18, or 0.5.23 with this variable set to 0.
RELEASE_VARIABLE = "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE"
NO_ACK = {RELEASE_VARIABLE: "0"} if SINCE_0_5_23 else {}
RELEASE_TIMEOUT = {f"{RELEASE_VARIABLE}_TIMEOUT": "5"}
BOOTSTRAP_TIMEOUT = {"SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": "1"}
MAX_STALL = 0.5  # seconds, next to other processes; the unpatched stall is 1 s per room


def abort_request(servers: Servers, after: float) -> tuple[dict, dict]:
    """Returns prefill's and decode's answer for a request that decode aborts after `after` s."""
    (prefill,), (decode,) = servers.prefill, servers.decode
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(servers.send, prefill, ROOM, SOURCE, [2, 2], 15)
        aborted = decode.call("abort_after", room=ROOM, pages=DESTINATION, after=after, seconds=15)
        return sending.result(), aborted


def written_at(prefill: Rank) -> float:
    """Returns when this rank started its delayed write, on the monotonic clock."""
    began_at = prefill.call("delayed_transfer")["began_at"]
    assert began_at, "no write was late"
    return began_at


@pytest.mark.parametrize("backend", nightly_except(BACKENDS, "nixl"))
def test_abort_keeps_pages_until_prefill_finishes(serve, backend):
    with serve(Fleet(backend=backend)) as servers:
        assert_transfers(servers)
        servers.prefill[0].call("plan_faults", how="wait", at=[1], seconds=WRITE_AT)
        prefill, decode = abort_request(servers, after=ABORT_AT)
        assert prefill["state"] == decode["state"] == "failed", (prefill, decode)
        assert ABORTED in decode["reason"], decode
        assert decode["changed"] == []
        assert decode["over_at"] > written_at(servers.prefill[0]), decode
        assert is_in_time(decode["waited"], WRITE_AT + MAX_DELAY), decode
        assert_transfers(servers)


@pytest.mark.skipif(SINCE_0_5_23, reason="0.5.23 holds pages until prefill has ended")
def test_stock_mooncake_writes_to_reused_pages(serve):
    with serve(Fleet(backend="mooncake"), "stock", "stock") as servers:
        assert_right(servers, SOURCE, DESTINATION)
        servers.prefill[0].call("plan_faults", how="wait", at=[1], seconds=WRITE_AT)
        _, decode = abort_request(servers, after=ABORT_AT)
        assert decode["state"] == "failed", decode
        assert is_in_time(decode["waited"], MAX_DELAY)
        assert decode["changed"]


@pytest.mark.parametrize("backend", nightly_except(BACKENDS, "nixl"))
def test_prefill_does_not_send_an_aborted_request(serve, backend):
    """The abort comes before the computation; 0.5.9 does not wait for its own time-out."""
    with serve(Fleet(Side(environment=BOOTSTRAP_TIMEOUT), backend=backend)) as servers:
        assert_transfers(servers)
        (prefill,), (decode,) = servers.prefill, servers.decode
        aborted = decode.call("abort_after", room=ROOM, pages=DESTINATION, after=-1, seconds=5)
        assert aborted["state"] == "failed" and ABORTED in aborted["reason"], aborted
        assert is_in_time(aborted["waited"], MAX_DELAY) and not aborted["changed"], aborted
        answer = servers.send(prefill, ROOM, SOURCE, seconds=5)
        assert answer["state"] == "failed", answer
        assert DECODE_ABORTED_EARLY in answer["reason"], answer
        assert is_in_time(answer["seconds"], MAX_DELAY)
        assert_transfers(servers)


@pytest.mark.parametrize("backend", nightly_except(BACKENDS))
def test_all_tp_ranks_wait_until_prefill_stops_writing(serve, backend):
    """Rank 0 aborts, but only rank 1, which learns it by the all-reduce, is written to."""
    with serve(Fleet(Side(tp=2), Side(tp=2), backend=backend)) as servers:
        assert_transfers(servers)
        reduce_polls(servers.decode)
        servers.prefill[1].call("plan_faults", how="wait", at=[1], seconds=WRITE_AT)
        request = {"room": ROOM, "pages": DESTINATION, "after": ABORT_AT, "seconds": 15}
        with ThreadPoolExecutor() as pool:
            sending = [
                pool.submit(servers.send, rank, ROOM, SOURCE, [2, 2], 15)
                for rank in servers.prefill
            ]
            aborting = [
                pool.submit(rank.call, "abort_after", **request, aborts=rank is servers.decode[0])
                for rank in servers.decode
            ]
            ends = [future.result() for future in aborting]
            assert sending[1].result()["state"] == "failed"
        assert [end["state"] for end in ends] == ["failed"] * 2, ends
        assert [end["changed"] for end in ends] == [[], []]
        assert min(end["over_at"] for end in ends) > written_at(servers.prefill[1]), ends
        assert is_in_time(max(end["waited"] for end in ends), WRITE_AT + MAX_DELAY), ends
        assert ABORTED in ends[0]["reason"], ends
        assert says_another_rank_failed(ends[1]["reason"], backend), ends
        assert_no_room_kept(servers)


@pytest.mark.parametrize("backend", nightly_except(BACKENDS, "nixl"))
def test_scheduler_does_not_block_on_a_room_failed_elsewhere(serve, backend):
    """The scheduler keeps polling, so running requests are not delayed."""
    with serve(Fleet(Side(tp=2), Side(tp=2), backend=backend)) as servers:
        assert_transfers(servers)
        reduce_polls(servers.decode)
        rooms = list(range(900, 950))
        for rank in servers.decode:
            for room in rooms:
                rank.call("open_room", room=room, pages=[4])
        with ThreadPoolExecutor() as pool:
            losing = [
                pool.submit(rank.call, "lose_prefill", rooms=rooms, knows=rank is servers.decode[0])
                for rank in servers.decode
            ]
            ends = [future.result() for future in losing]
        assert [end["failed"] for end in ends] == [len(rooms)] * 2, ends
        assert max(end["longest"] for end in ends) < MAX_STALL, ends


@pytest.mark.parametrize("backend", nightly_except(BACKENDS, "mooncake"))
def test_timed_out_request_keeps_its_pages(serve, backend):
    with serve(Fleet(decode=Side(environment=WAITING_TIMEOUT), backend=backend)) as servers:
        assert_transfers(servers)
        servers.prefill[0].call("plan_faults", how="wait", at=[1], seconds=WRITE_AT)
        outcome = servers.request(SOURCE, DESTINATION, [2, 2])
        (prefill,), (decode,) = outcome.prefill, outcome.decode
        assert prefill["state"] == decode["state"] == "failed", outcome
        assert DECODE_TIMED_OUT in decode["reason"], outcome
        assert DECODE_TIMED_OUT_ON_PREFILL[backend] in prefill["reason"], outcome
        assert decode["seconds"] > WRITE_AT - 0.5, outcome  # not 1 s
        assert is_in_time(decode["seconds"], WRITE_AT + MAX_DELAY), outcome
        # Prefill wrote some pages before the request failed.
        assert servers.request(SOURCE, DESTINATION).state in ("right", "wrong")
        assert_no_room_kept(servers)


@pytest.mark.parametrize("backend", nightly_except(BACKENDS, "nixl"))
@pytest.mark.parametrize("state", ["waiting", "failed"])
def test_request_unsent_by_prefill_fails_on_decode(serve, backend, state):
    """The client disconnects, maybe from prefill first; decode must not wait for KV."""
    with serve(Fleet(backend=backend)) as servers:
        assert_transfers(servers)
        (prefill,), (decode,) = servers.prefill, servers.decode
        decode.call("open_room", room=ROOM, pages=DESTINATION)
        with ThreadPoolExecutor(1) as pool:
            leaving = pool.submit(prefill.call, "leave_unsent", room=ROOM, state=state, seconds=10)
            if state == "failed":
                decode.call("abort", room=ROOM)
                gone = decode.call("wait_for_room", room=ROOM, seconds=5)
            else:
                gone = decode.timed("wait_for_room", room=ROOM, seconds=5)
                assert REMOVED_UNSENT in gone["reason"], gone
                assert is_in_time(gone["seconds"], MAX_DELAY), gone
            assert gone["state"] == "failed", gone
            assert leaving.result() == {"state": "left"}
        assert_transfers(servers)


@pytest.mark.parametrize("backend", nightly_except(BACKENDS, "mooncake"))
def test_request_without_decode_metadata_times_out(serve, backend):
    """The client disconnects from decode before decode reads the request."""
    with serve(Fleet(Side(environment=BOOTSTRAP_TIMEOUT), backend=backend)) as servers:
        assert_transfers(servers)
        answer = servers.send(servers.prefill[0], ROOM, SOURCE, seconds=10)
        assert answer["state"] == "failed" and is_in_time(answer["seconds"], 3), answer
        assert "timed out" in answer["reason"] or "did not request" in answer["reason"], answer
        assert_transfers(servers)


@only_0_5_9("over NIXL, too, later ones wait for so long")
def test_stock_nixl_keeps_a_request_without_metadata(serve):
    fleet = Fleet(Side(environment=BOOTSTRAP_TIMEOUT), k_width=4, v_width=4)
    with serve(fleet, "stock", "stock") as servers:
        answer = servers.send(servers.prefill[0], ROOM, SOURCE, seconds=4)
    assert answer["state"] == "hang", answer


@pytest.mark.parametrize("backend", nightly_except(BACKENDS))
def test_pages_are_released_after_timeout_without_ack(serve, backend):
    """Decode cannot keep pages for ever."""
    sides = Side(environment=NO_ACK), Side(environment=RELEASE_TIMEOUT)
    with serve(Fleet(*sides, backend=backend, v_width=4), prefill="stock") as servers:
        (decode,) = servers.decode
        aborted = decode.call("abort_after", room=ROOM, pages=DESTINATION, after=0.2, seconds=15)
        assert aborted["state"] == "failed" and ABORTED in aborted["reason"], aborted
        assert aborted["waited"] > 4.5 and is_in_time(aborted["waited"], 6.5), aborted
        # Stock prefill still serves, so decode sent it nothing that it cannot read.
        assert_right(servers, SOURCE, DESTINATION)
