"""Over NIXL, the first large request to a decode rank takes no longer than later ones."""

import os
import signal
import time
from dataclasses import replace

import psutil
import pytest
from fleet import Fleet, Side
from transfer_checks import assert_connected_early, assert_eventually, assert_right

from pd_harness.polling import is_in_time

pytestmark = pytest.mark.transport

# Packed heads would take few copies, which do not give work to all threads.
TCP = Side(environment={"UCX_TLS": "tcp", "SGLANG_PD_PACKED": "0"})
SECONDS = 1.0  # latency of each byte in one direction
TRIP = 2 * SECONDS  # round trip
# 10,240 copies of a token's heads to each rank
LARGE = (list(range(1, 41)), list(range(2, 42)))


def test_decode_ranks_are_connected_at_registration(serve):
    with serve(Fleet(Side(), Side(tp=2))) as servers:
        assert_connected_early(servers)


@pytest.mark.skipif(
    os.environ.get("SGLANG_PD_NIXL", "").startswith("0.9"),
    reason="NIXL 0.9 polls without a pause, on stock engines, too",
)
@pytest.mark.parametrize("keepalive", ["1s", "20s"], ids=["ours", "default"])
def test_progress_threads_sleep_once_connected(serve, keepalive):
    """NIXL's progress threads spin until UCX's last round trip over TCP.

    When prefill read once from each decode rank, they never stopped in one start of five.
    """
    side = Side(environment={"UCX_KEEPALIVE_INTERVAL": keepalive})
    with serve(Fleet(side, replace(side, tp=4), nixl_threads=8)) as servers:
        assert_connected_early(servers)
        processes = [psutil.Process(rank.pid) for rank in (*servers.prefill, *servers.decode)]

        def are_busy() -> list[bool]:
            before = [sum(process.cpu_times()[:2]) for process in processes]
            time.sleep(1)
            after = [sum(process.cpu_times()[:2]) for process in processes]
            return [end - start > 0.3 for start, end in zip(before, after, strict=True)]

        assert_eventually(are_busy, [False] * len(processes))


def seconds(servers, pages: tuple) -> float:
    return max(answer["seconds"] for answer in assert_right(servers, *pages).decode)


@pytest.mark.nightly
@pytest.mark.parametrize("engine", ["stock", "patched"])
def test_first_large_request_over_a_slow_network(serve, engine):
    """NIXL's threads have connected early; stock's connect with the first large write."""
    fleet = Fleet(TCP, replace(TCP, tp=2), layers=2, pages=44, page_size=64, v_width=4)
    with serve(fleet, engine, engine) as servers:
        for rank in servers.decode:
            rank.call("slow_connections", seconds=SECONDS)
        seconds(servers, ([1], [1]))
        time.sleep(6 * TRIP)
        first = seconds(servers, LARGE)
        others = [seconds(servers, LARGE) for _ in range(2)]
        if engine == "stock":
            assert first - min(others) > 1.75 * TRIP  # two, measured with some noise
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
