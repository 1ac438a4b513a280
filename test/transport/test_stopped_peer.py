"""While a decode server with open requests is stopped, another one's requests are served."""

import contextlib
import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
from engine_release import SINCE_0_5_20
from fleet import Fleet, Rank, Servers, Side
from transfer_checks import BACKENDS

from pd_harness.polling import is_in_time, wait_until

OPEN_REQUESTS = 60
SILENT_SECONDS = 5
# ZeroMQ notices within 5 s that a process is stopped.
NOTICED_SECONDS = SILENT_SECONDS + 6
# Two Mooncake writes, each of which waits up to a second for the harness's write lock.
SERVED_SECONDS = 4
# A turn that waits for a peer takes seconds; next to Mooncake writes to a stopped process, a turn
# may take 0.25 s.
LONGEST_TURN = 0.5
ENVIRONMENT = {"SGLANG_PD_SILENT_SECONDS": str(SILENT_SECONDS)}
FLEETS = {
    **{backend: {"backend": backend} for backend in (*BACKENDS, "ascend")},
    # Over shared memory, writes to a stopped process succeed.
    "nixl_tcp": {"backend": "nixl", "environment": {"UCX_TLS": "tcp"}},
}


@contextlib.contextmanager
def stopped(rank: Rank):
    os.kill(rank.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(rank.pid, signal.SIGCONT)


def fleet_of(name: str, **more: str) -> Fleet:
    """Returns a fleet with K and V of one width, which stock needs; `more` are its variables."""
    given = dict(FLEETS[name])
    side = Side(environment={**ENVIRONMENT, **more, **given.pop("environment", {})})
    sizes = {"pages": OPEN_REQUESTS + 8, "page_size": 64, "layers": 4, "v_width": 4}
    return Fleet(prefill=side, decode=side, **sizes, **given)


def open_rooms(servers: Servers) -> tuple[Rank, Rank, list]:
    """Returns a decode rank with open rooms, a second decode rank, and the `[room, pages]`."""
    (first,), (other,) = servers.decode, servers.start_another("decode")
    (prefill,) = servers.prefill
    served = [
        servers.requests_at_once([(rank, [OPEN_REQUESTS + 1], [OPEN_REQUESTS + 1])])[0]
        for rank in (first, other)
    ]
    assert [one.state for one in served] == ["right", "right"], served
    rooms = [[room, [page]] for page, room in enumerate(range(5000, 5000 + OPEN_REQUESTS))]
    for room, pages in rooms:
        first.call("open_room", room=room, pages=pages)
    # A stopped decode rank sends no more messages, so prefill must have read them by then.
    assert wait_until(lambda: prefill.call("room_counts")["transfer_infos"] == OPEN_REQUESTS, 10)
    return first, other, rooms


def request_from_other(servers: Servers, pool, other: Rank, rooms: list, seconds: float) -> tuple:
    """Sends `rooms` and one request of `other`; returns futures of its answer and of prefill's."""
    room, pages = 9001, [OPEN_REQUESTS + 2]
    arrives = servers.fleet.arriving_layers(range(servers.fleet.layers))
    live = {"room": room, "pages": pages, "arrives": arrives}
    received = pool.submit(other.timed, "receive", leave_out=0, seconds=seconds, **live)
    (prefill,) = servers.prefill
    sending = {"requests": [*rooms, [room, pages]], "seconds": max(60, seconds)}
    return received, pool.submit(prefill.call, "send_at_once", **sending)


# Stock assigns decode ranks to four queues by their ports, so by default only every fourth rank
# waits for the stopped one.
ONE_QUEUE = {"SGLANG_DISAGGREGATION_QUEUE_SIZE": "1"}


# (fleet, seconds for which stock serves no request of another server). 0.5.9's scheduler writes
# over NIXL itself and waits for no write.
STOCK_DELAYS = [("mooncake", 20), *([("nixl_tcp", 120)] if SINCE_0_5_20 else [])]


@pytest.mark.nightly
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name, limit", STOCK_DELAYS)
def test_stock_delays_the_other_server(serve, name, limit):
    with serve(fleet_of(name, **ONE_QUEUE), "stock", "stock") as servers:
        first, other, rooms = open_rooms(servers)
        with stopped(first), ThreadPoolExecutor(2) as pool:
            received, _ = request_from_other(servers, pool, other, rooms, limit)
            answer = received.result()
    assert answer["state"] == "hang", answer


@pytest.mark.parametrize("name", FLEETS)
def test_stopped_peer_does_not_delay_another(serve, name):
    with serve(fleet_of(name)) as servers:
        first, other, rooms = open_rooms(servers)
        with stopped(first), ThreadPoolExecutor(2) as pool:
            received, sent = request_from_other(servers, pool, other, rooms, 30)
            answer = received.result()
            assert answer["state"] == "right" and is_in_time(answer["seconds"], SERVED_SECONDS), (
                answer
            )
            answers = sent.result()
        *ends, _ = answers["ends"]
        assert {end["state"] for end in ends} <= {"failed", "success"}, ends
        failed = [end for end in ends if end["state"] == "failed"]
        if name == "nixl_tcp":  # over the other backends, writes to a stopped process succeed
            assert failed
        for end in failed:
            assert "SGLANG_PD_SILENT_SECONDS" in end["reason"], end
            assert is_in_time(end["seconds"], NOTICED_SECONDS), end
        assert is_in_time(answers["pause"], LONGEST_TURN), answers["pause"]

        def is_served_again() -> bool:
            (again,) = servers.requests_at_once(
                [(first, [OPEN_REQUESTS + 3], [OPEN_REQUESTS + 3])], seconds=5
            )
            return again.state == "right"

        for room, _ in rooms:
            end = first.call("wait_for_room", room=room, seconds=40)
            assert end["state"] in ("failed", "success"), end
        first.call("rebaseline")
        assert wait_until(is_served_again, 20, 0.5)


@pytest.mark.nightly
@pytest.mark.skipif(not SINCE_0_5_20, reason="0.5.9's scheduler writes over NIXL itself")
def test_aborted_requests_of_a_stopped_peer_free_the_worker(serve):
    """Aborts free prefill's only worker, which writes to the peer, before the peer is silent."""
    with serve(fleet_of("nixl_tcp", **ONE_QUEUE)) as servers:
        first, other, rooms = open_rooms(servers)
        with stopped(first), ThreadPoolExecutor(2) as pool:
            servers.prefill[0].call("send_at_once", requests=rooms, seconds=2)
            received, _ = request_from_other(servers, pool, other, [], 60)
            answer = received.result()
    assert answer["state"] == "right" and is_in_time(answer["seconds"], 2 * NOTICED_SECONDS), answer
