"""A room id that comes again is a new request; a decode rank that registers again is a new peer."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import count

import pytest
from fleet import Fleet, Outcome, Servers
from lines import DST, Line, await_read, recorded
from of_release import IS_LATER, as_stocks
from rank_faults import ERROR
from reasons import ABORTED, GIVEN_UP
from transfer_checks import BACKENDS, assert_failed, eventually, few

from pd_harness.waiting import in_time

pytestmark = pytest.mark.transport

ROOM, OTHER = 900, 901
# Places in what `Rank.messages` records of decode.
OPENED, ABORT, NOT_OPENED = 1, 2, 3
SRC = [9, 2, 3, 7]


def prefill_first(servers: Servers) -> Outcome:
    """One more request of this room, which comes to prefill before decode asks for it."""
    servers.prefill[0].call("begin", room=ROOM)
    return served(servers)


def decode_first(servers: Servers) -> Outcome:
    """The same the other way round."""
    (prefill,), (decode,) = servers.prefill, servers.decode
    with ThreadPoolExecutor(1) as pool:
        arrives = servers.fleet.arriving(servers._layers(decode))
        asked = {"room": ROOM, "pages": DST, "arrives": arrives, "leave_out": 0, "seconds": 20}
        receiving = pool.submit(decode.timed, "receive", **asked)
        eventually(lambda: prefill.call("kept")["transfer_infos"] > 0 or receiving.done(), True)
        sent = prefill.timed("send", room=ROOM, pages=SRC, chunks=[2, 2], seconds=20)
        got = receiving.result()
    state = "right" if sent["state"] == "success" else sent["state"]
    return Outcome(got["state"] if state == "right" else state, (sent,), (got,))


def served(servers: Servers, room: int = ROOM) -> Outcome:
    servers._rooms = count(room)
    return servers.request(SRC, DST, [2, 2])


def end(servers: Servers, rank, by_decode: bool = True) -> None:
    """The room has failed there, given up by one side."""
    is_told = rank is servers.prefill[0] and by_decode
    said = GIVEN_UP[servers.fleet.backend] if is_told else ABORTED
    answer = rank.timed("end", room=ROOM, seconds=10)
    assert answer["state"] == "failed" and said in answer["reason"], answer
    assert in_time(answer["seconds"], 4), answer


def asked(servers: Servers) -> None:
    """A request that waits for prefill to compute it."""
    (prefill,), (decode,) = servers.prefill, servers.decode
    prefill.call("begin", room=ROOM)
    decode.call("ask", room=ROOM, pages=DST)
    eventually(lambda: prefill.call("kept")["transfer_infos"], 1)


def prefill_aborts(servers: Servers) -> None:
    asked(servers)
    for rank in (servers.prefill[0], servers.decode[0]):
        if rank is servers.prefill[0]:
            rank.call("abort", room=ROOM)
        end(servers, rank, by_decode=False)


def decode_aborts(servers: Servers) -> None:
    asked(servers)
    servers.decode[0].call("abort", room=ROOM)
    for rank in (servers.prefill[0], servers.decode[0]):
        end(servers, rank)


def decode_aborts_before_it_asks(servers: Servers) -> None:
    """And prefill has its request."""
    for rank in (servers.prefill[0], servers.decode[0]):
        rank.call("begin", room=ROOM)
    servers.decode[0].call("abort", room=ROOM)
    for rank in (servers.decode[0], servers.prefill[0]):
        end(servers, rank)


def a_write_fails(servers: Servers) -> None:
    servers.prefill[0].call("plan_faults", how="exception", at=[2])
    assert_failed(served(servers), ERROR)


FAILURES = [prefill_aborts, decode_aborts, decode_aborts_before_it_asks, a_write_fails]


@pytest.mark.parametrize("again", [prefill_first, decode_first])
@pytest.mark.parametrize("fail", few(FAILURES, decode_aborts_before_it_asks, a_write_fails))
@pytest.mark.parametrize("backend", few(BACKENDS, "nixl"))
def test_a_room_that_failed_comes_again(serve, backend, fail, again):
    with serve(Fleet(backend=backend)) as servers:
        assert served(servers, OTHER).state == "right"
        for _ in range(2):
            fail(servers)
            outcome = again(servers)
            assert outcome.state == "right", outcome
        eventually(lambda: [sum(kept.values()) for kept in servers.kept()], [0, 0])


@pytest.mark.parametrize("again", [prefill_first, decode_first])
@pytest.mark.parametrize("backend", few(BACKENDS, "mooncake"))
def test_a_request_that_never_came_fails_the_next_of_its_room_at_most_once(serve, backend, again):
    """Decode gave it up; whether prefill's is yet to come or never will, nobody can know."""
    with serve(Fleet(backend=backend)) as servers:
        assert served(servers, OTHER).state == "right"
        servers.decode[0].call("begin", room=ROOM)
        servers.decode[0].call("abort", room=ROOM)
        end(servers, servers.decode[0])
        if not IS_LATER:  # which know nothing of it
            eventually(lambda: servers.prefill[0].call("knows_aborted", room=ROOM), True)
        # What decode has said before is read by then.
        assert served(servers, OTHER + 1).state == "right"
        outcome = again(servers)
        if outcome.state != "right":
            assert_failed(outcome, ABORTED)
        outcome = again(servers)
        assert outcome.state == "right", outcome


def test_the_end_of_a_room_is_no_write_of_the_next_of_its_number(serve):
    """Mooncake: it waits in the queue of the rank, behind what is written."""
    with serve(Fleet(backend="mooncake")) as servers:
        assert served(servers, OTHER).state == "right"
        again = []
        for room in (910, 911, 912):
            messages = recorded(servers.decode[0], room)
            again += [messages[OPENED], messages[ABORT], messages[OPENED]]
        servers.prefill[0].call("plan_faults", how="wait", at=[1], seconds=1.5)
        with ThreadPoolExecutor(1) as pool, closing(Line(servers.prefill[0])) as line:
            writing = pool.submit(served, servers)
            line.send(again)
            assert writing.result().state == "right"
        outcome = served(servers)
        assert outcome.state == "right", outcome


def registered_anew(servers: Servers, registration: list[bytes]) -> Line:
    """This decode rank's registration is that one now."""
    line = Line(servers.prefill[0])
    line.send([registration])
    await_read(line, servers.decode[0], 0, NOT_OPENED)
    return line


@pytest.mark.parametrize(
    "trailing",
    [[], [b"1"], [b"a fork's own", b"\1\2\3"], [b"", b"", b"16"]],
    ids=["stock", "a_number", "two", "three"],
)
@pytest.mark.parametrize("backend", few(BACKENDS))
def test_a_server_without_our_description_takes_anothers_place(serve, backend, trailing):
    """At the same address, as stock or a fork of it: it is served as stock is."""
    with serve(Fleet(backend=backend, v_width=4)) as servers:
        assert served(servers, OTHER).state == "right"
        registration = recorded(servers.decode[0], ROOM)[0]
        registered_anew(servers, as_stocks(registration) + trailing).close()
        servers.prefill[0].call("plan_faults", how="exception", at=[2])
        outcome = served(servers)
        assert outcome.prefill[0]["state"] == outcome.decode[0]["state"] == "failed", outcome
        if backend == "mooncake" and not IS_LATER:  # which does not tell stock why
            assert "it does not say why" in outcome.decode[0]["reason"], outcome
        outcome = served(servers)
        assert outcome.state == "right", outcome
        registered_anew(servers, registration).close()
        servers.prefill[0].call("plan_faults", how="exception", at=[2])
        assert_failed(served(servers), ERROR)
        assert served(servers).state == "right"


@pytest.mark.parametrize(
    "backend, what", [("nixl", "plan"), ("nixl", "connect"), ("mooncake", "plan")]
)
def test_a_registration_that_failed_once_is_tried_again(serve, backend, what):
    with serve(Fleet(backend=backend)) as servers:
        assert servers.prefill[0].call("fail_once", what=what) == {"state": "planned"}
        for _ in range(2):
            outcome = served(servers)
            assert outcome.state == "right", outcome
