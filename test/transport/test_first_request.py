"""Over NIXL, the first large request to a decode rank takes no longer than later ones."""

import os
import signal
import time

import pytest
from fleet import Fleet, Side
from transfer_checks import assert_connected_early

from pd_harness.polling import is_in_time

pytestmark = pytest.mark.transport

TCP = Side(environment={"UCX_TLS": "tcp"})
SECONDS = 1.0  # latency of each byte in one direction
TRIP = 2 * SECONDS  # round trip
LARGE = (range(1, 41), range(2, 42))  # 10,240 copies of a token's heads to each rank


def test_decode_ranks_are_connected_at_registration(serve):
    with serve(Fleet(Side(), Side(tp=2))) as servers:
        assert_connected_early(servers)


def seconds(servers, pages: tuple) -> float:
    outcome = servers.request(*map(list, pages))
    assert outcome.state == "right", outcome
    return max(answer["seconds"] for answer in outcome.decode)


@pytest.mark.nightly
@pytest.mark.parametrize("engine", ["stock", "patched"])
def test_first_large_request_over_a_slow_network(serve, engine):
    """NIXL's threads have connected early; stock's connect with the first large write."""
    environment = {"UCX_TLS": "tcp"}
    sides = (Side(environment=environment), Side(tp=2, environment=environment))
    with serve(
        Fleet(*sides, layers=2, pages=44, page_size=64, v_width=4), engine, engine
    ) as servers:
        for rank in servers.decode:
            rank.call("slow_connections", seconds=SECONDS)
        seconds(servers, ([1], [1]))
        time.sleep(6 * TRIP)
        first = seconds(servers, LARGE)
        others = [seconds(servers, LARGE) for _ in range(2)]
        if engine == "stock":
            assert first - min(others) > 2 * TRIP
        else:
            assert first - max(others) < 1.5 * TRIP


@pytest.mark.nightly
@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL])
def test_peer_lost_while_connecting_does_not_delay_others(serve, how):
    with serve(Fleet(TCP, TCP)) as servers:
        (first,), (other,) = servers.decode, servers.start_another("decode")
        first.call("slow_connections", seconds=5 * SECONDS)
        first.call("start_request", room=9001)
        time.sleep(SECONDS)  # now it has registered, and NIXL has received nothing from it
        os.kill(first.pid, how)
        try:
            for _ in range(3):
                (outcome,) = servers.requests_at_once([(other, [1], [1])])
                assert outcome.state == "right", outcome
                assert is_in_time(outcome.decode[0]["seconds"], 3), outcome
        finally:
            if how == signal.SIGSTOP:
                os.kill(first.pid, signal.SIGCONT)
