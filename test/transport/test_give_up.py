"""Requests that decode gives up, because its client has or because they take too long.

Their pages go to other requests, so that prefill must not write to them from then on.
"""

from concurrent.futures import ThreadPoolExecutor

import pytest
from fleet import Fleet, Rank, Servers, Side
from of_release import IS_LATER
from reasons import ABORTED, ELSEWHERE, GIVEN_UP_BEFORE, TOO_LATE, TOO_LATE_ON_PREFILL
from transfer_checks import BACKENDS, assert_right, eventually, few, of_first, vote

from pd_harness.waiting import in_time

pytestmark = pytest.mark.transport

SOURCE, DESTINATION = [1, 2, 3, 4], [4, 5, 6, 7]
WRITE_AT = 3.0  # seconds, after which a write begins that prefill has decided on before
ABORT_AT = 1.0
PROMPT = 1.5
PATIENCE = {"SGLANG_DISAGGREGATION_WAITING_TIMEOUT": "1"}
# Of a prefill that does not say when it has ended: stock 0.5.9, a later one that is told not to.
HELD = "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE"
SILENT = {HELD: "0"} if IS_LATER else {}
HOLDING = {f"{HELD}_TIMEOUT": "5"}
BOOTSTRAP = {"SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": "1"}
STALL = 0.5  # seconds, here beside other processes; it was one for each room


def give_up(servers: Servers, after: float) -> tuple[dict, dict]:
    """What prefill and decode say of a request that decode aborts."""
    (prefill,), (decode,) = servers.prefill, servers.decode
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(
            prefill.timed, "send", room=900, pages=SOURCE, chunks=[2, 2], seconds=15
        )
        gave_up = decode.call("give_up", room=900, pages=DESTINATION, after=after, seconds=15)
        return sending.result(), gave_up


def written_at(prefill: Rank) -> float:
    """When this rank began its late write."""
    began_at = prefill.call("waited_transfer")["began_at"]
    assert began_at, "no write was late"
    return began_at


@pytest.mark.parametrize("backend", few(BACKENDS, "nixl"))
def test_an_aborted_request_keeps_its_pages_until_prefill_has_ended(serve, backend):
    with serve(Fleet(backend=backend)) as servers:
        assert_right(servers)
        servers.prefill[0].call("plan_faults", how="wait", at=[1], seconds=WRITE_AT)
        prefill, decode = give_up(servers, after=ABORT_AT)
        assert prefill["state"] == decode["state"] == "failed", (prefill, decode)
        assert ABORTED in decode["reason"], decode
        assert decode["changed"] == []
        assert decode["over_at"] > written_at(servers.prefill[0]), decode
        assert in_time(decode["waited"], WRITE_AT + PROMPT), decode
        assert_right(servers)


@of_first("later ones hold pages until prefill has ended")
def test_stock_mooncake_writes_to_the_pages_of_others(serve):
    with serve(Fleet(backend="mooncake"), "stock", "stock") as servers:
        assert servers.request(SOURCE, DESTINATION).state == "right"
        servers.prefill[0].call("plan_faults", how="wait", at=[1], seconds=WRITE_AT)
        _, decode = give_up(servers, after=ABORT_AT)
        assert decode["state"] == "failed", decode
        assert in_time(decode["waited"], PROMPT)
        assert decode["changed"]


@pytest.mark.parametrize("backend", few(BACKENDS, "nixl"))
def test_prefill_sends_nothing_of_an_aborted_request(serve, backend):
    """It is told before it has computed anything; 0.5.9 needs not wait for its own time-out."""
    with serve(Fleet(Side(environment=BOOTSTRAP), backend=backend)) as servers:
        assert_right(servers)
        (prefill,), (decode,) = servers.prefill, servers.decode
        gave_up = decode.call("give_up", room=900, pages=DESTINATION, after=-1, seconds=5)
        assert gave_up["state"] == "failed" and ABORTED in gave_up["reason"], gave_up
        assert in_time(gave_up["waited"], PROMPT) and not gave_up["changed"], gave_up
        answer = prefill.timed("send", room=900, pages=SOURCE, chunks=[4], seconds=5)
        assert answer["state"] == "failed", answer
        assert GIVEN_UP_BEFORE in answer["reason"], answer
        assert in_time(answer["seconds"], PROMPT)
        assert_right(servers)


@pytest.mark.parametrize("backend", few(BACKENDS))
def test_decode_ranks_wait_until_no_page_of_any_is_written_to(serve, backend):
    """One gives up the room, and nothing is written to it; the other hears of it by their vote."""
    with serve(Fleet(Side(tp=2), Side(tp=2), backend=backend)) as servers:
        assert_right(servers)
        vote(servers.decode)
        servers.prefill[1].call("plan_faults", how="wait", at=[1], seconds=WRITE_AT)
        told = {"room": 900, "pages": DESTINATION, "after": ABORT_AT, "seconds": 15}
        request = {"room": 900, "pages": SOURCE, "chunks": [2, 2], "seconds": 15}
        with ThreadPoolExecutor() as pool:
            sending = [pool.submit(rank.call, "send", **request) for rank in servers.prefill]
            giving_up = [
                pool.submit(rank.call, "give_up", **told, aborts=rank is servers.decode[0])
                for rank in servers.decode
            ]
            ends = [future.result() for future in giving_up]
            assert sending[1].result()["state"] == "failed"
        assert [end["state"] for end in ends] == ["failed"] * 2, ends
        assert [end["changed"] for end in ends] == [[], []]
        assert min(end["over_at"] for end in ends) > written_at(servers.prefill[1]), ends
        assert in_time(max(end["waited"] for end in ends), WRITE_AT + PROMPT), ends
        assert ABORTED in ends[0]["reason"] and ELSEWHERE in ends[1]["reason"], ends
        eventually(lambda: [sum(kept.values()) for kept in servers.kept()], [0] * 4)


@pytest.mark.parametrize("backend", few(BACKENDS, "nixl"))
def test_a_scheduler_never_waits_for_a_room_that_another_rank_fails(serve, backend):
    """It polls on, so that what runs is not held up."""
    with serve(Fleet(Side(tp=2), Side(tp=2), backend=backend)) as servers:
        assert_right(servers)
        vote(servers.decode)
        rooms = list(range(900, 950))
        for rank in servers.decode:
            for room in rooms:
                rank.call("ask", room=room, pages=[4])
        with ThreadPoolExecutor() as pool:
            losing = [
                pool.submit(rank.call, "lose", rooms=rooms, knows=rank is servers.decode[0])
                for rank in servers.decode
            ]
            ends = [future.result() for future in losing]
        assert [end["failed"] for end in ends] == [len(rooms)] * 2, ends
        assert max(end["longest"] for end in ends) < STALL, ends


@pytest.mark.parametrize("backend", few(BACKENDS, "mooncake"))
def test_a_request_that_takes_too_long_keeps_its_pages(serve, backend):
    with serve(Fleet(decode=Side(environment=PATIENCE), backend=backend)) as servers:
        assert_right(servers)
        servers.prefill[0].call("plan_faults", how="wait", at=[1], seconds=WRITE_AT)
        outcome = servers.request(SOURCE, DESTINATION, [2, 2])
        (prefill,), (decode,) = outcome.prefill, outcome.decode
        assert prefill["state"] == decode["state"] == "failed", outcome
        assert TOO_LATE in decode["reason"], outcome
        assert TOO_LATE_ON_PREFILL[backend] in prefill["reason"], outcome
        assert decode["seconds"] > WRITE_AT - 0.5, outcome  # not 1 s
        assert in_time(decode["seconds"], WRITE_AT + PROMPT), outcome
        # Some of it was written before it was over.
        assert servers.request(SOURCE, DESTINATION).state in ("right", "wrong")
        eventually(lambda: [sum(kept.values()) for kept in servers.kept()], [0, 0])


@pytest.mark.parametrize("backend", few(BACKENDS, "nixl"))
@pytest.mark.parametrize("state", ["waiting", "failed"])
def test_a_request_that_leaves_prefill_unsent_is_over_on_both_sides(serve, backend, state):
    """Its client is gone, at first perhaps on prefill alone: decode must not wait for KV."""
    with serve(Fleet(backend=backend)) as servers:
        assert_right(servers)
        (prefill,), (decode,) = servers.prefill, servers.decode
        decode.call("ask", room=900, pages=DESTINATION)
        with ThreadPoolExecutor(1) as pool:
            leaving = pool.submit(prefill.call, "leave", room=900, state=state, seconds=10)
            if state == "failed":
                gone = decode.call("drop", room=900, seconds=5)
            else:
                gone = decode.timed("end", room=900, seconds=5)
                assert ABORTED in gone["reason"] and in_time(gone["seconds"], PROMPT), gone
            assert gone["state"] == "failed", gone
            assert leaving.result() == {"state": "left"}
        assert_right(servers)


@pytest.mark.parametrize("backend", few(BACKENDS, "mooncake"))
def test_a_request_that_decode_never_asks_for_is_not_kept_for_ever(serve, backend):
    """Its client hung up on decode before decode had read it."""
    with serve(Fleet(Side(environment=BOOTSTRAP), backend=backend)) as servers:
        assert_right(servers)
        request = {"room": 900, "pages": SOURCE, "chunks": [4], "seconds": 10}
        answer = servers.prefill[0].timed("send", **request)
        assert answer["state"] == "failed" and in_time(answer["seconds"], 3), answer
        assert "timed out" in answer["reason"] or "did not ask" in answer["reason"], answer
        assert_right(servers)


@of_first("over NIXL, too, later ones wait for so long")
def test_stock_nixl_keeps_it_for_ever(serve):
    fleet = Fleet(Side(environment=BOOTSTRAP), k_width=4, v_width=4)
    with serve(fleet, "stock", "stock") as servers:
        request = {"room": 900, "pages": SOURCE, "chunks": [4], "seconds": 4}
        assert servers.prefill[0].call("send", **request)["state"] == "hang"


@pytest.mark.parametrize("backend", few(BACKENDS))
def test_prefill_that_stays_silent_is_waited_for_in_vain(serve, backend):
    """A page cannot be kept for ever."""
    sides = Side(environment=SILENT), Side(environment=HOLDING)
    with serve(Fleet(*sides, backend=backend, v_width=4), prefill="stock") as servers:
        (decode,) = servers.decode
        gave_up = decode.call("give_up", room=900, pages=DESTINATION, after=0.2, seconds=15)
        assert gave_up["state"] == "failed" and ABORTED in gave_up["reason"], gave_up
        assert gave_up["waited"] > 4.5 and in_time(gave_up["waited"], 6.5), gave_up
        # Stock prefill was sent nothing that it cannot read: it still serves.
        assert servers.request(SOURCE, DESTINATION).state == "right"
