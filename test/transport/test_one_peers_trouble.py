"""A decode server that is stopped with requests open: another one's are served all the while."""

import contextlib
import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
from fleet import Fleet, Rank, Side
from transfer_checks import BACKENDS

from pd_harness.waiting import awaited, in_time

OPEN = 60
SILENT_SECONDS = 5
# ZeroMQ notices within 5 s that a process is stopped.
NOTICED_SECONDS = SILENT_SECONDS + 6
# Two writes of Mooncake, each of which waits a second for its turn in the harness.
SERVED_SECONDS = 4
LONGEST_TURN = 0.05
ENVIRONMENT = {"SGLANG_PD_SILENT_SECONDS": str(SILENT_SECONDS)}
FLEETS = {
    **{backend: {"backend": backend} for backend in (*BACKENDS, "ascend")},
    # Shared memory takes what is written to a process that is stopped.
    "nixl_tcp": {"backend": "nixl", "environment": {"UCX_TLS": "tcp"}},
}


@contextlib.contextmanager
def stopped(rank: Rank):
    os.kill(rank.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(rank.pid, signal.SIGCONT)


@pytest.mark.parametrize("name", FLEETS)
def test_another_server_is_served(serve, name):
    given = dict(FLEETS[name])
    environment = {**ENVIRONMENT, **given.pop("environment", {})}
    side = Side(environment=environment)
    fleet = Fleet(prefill=side, decode=side, pages=OPEN + 8, page_size=64, layers=4, **given)
    with serve(fleet) as servers:
        (first,), (other,) = servers.decode, servers.more("decode")
        (prefill,) = servers.prefill
        arrives = fleet.arriving(range(fleet.layers))
        served = [
            servers.requests_at_once([(rank, [OPEN + 1], [OPEN + 1])])[0] for rank in (first, other)
        ]
        assert [one.state for one in served] == ["right", "right"], served
        rooms = range(5000, 5000 + OPEN)
        for page, room in enumerate(rooms):
            first.call("ask", room=room, pages=[page])
        # What decode has not sent yet when it is stopped, prefill never reads.
        assert awaited(lambda: prefill.call("kept")["transfer_infos"] == OPEN, 10)
        with stopped(first), ThreadPoolExecutor(2) as pool:
            live = {"room": 9001, "pages": [OPEN + 2], "arrives": arrives}
            received = pool.submit(other.timed, "receive", leave_out=0, seconds=30, **live)
            given = [*([room, [page]] for page, room in enumerate(rooms)), [9001, [OPEN + 2]]]
            sent = pool.submit(prefill.call, "send_at_once", requests=given, seconds=60)
            answer = received.result()
            assert answer["state"] == "right" and in_time(answer["seconds"], SERVED_SECONDS), answer
            answers = sent.result()
        *ends, _ = answers["ends"]
        assert {end["state"] for end in ends} <= {"failed", "success"}, ends
        failed = [end for end in ends if end["state"] == "failed"]
        if name == "nixl_tcp":  # of the others the process takes what is written to it
            assert failed
        for end in failed:
            assert "SGLANG_PD_SILENT_SECONDS" in end["reason"], end
            assert in_time(end["seconds"], NOTICED_SECONDS), end
        assert in_time(answers["pause"], LONGEST_TURN), answers["pause"]

        def is_served_again() -> bool:
            (again,) = servers.requests_at_once([(first, [OPEN + 3], [OPEN + 3])], seconds=5)
            return again.state == "right"

        for room in rooms:
            end = first.call("end", room=room, seconds=40)
            assert end["state"] in ("failed", "success"), end
        first.call("accept")
        assert awaited(is_served_again, 20, 0.5)
