"""Faults of the real MemFabric over a driver stub that fails or slows down on demand."""

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from fleet import Fleet, Side
from transfer_checks import PAGES, assert_failed, assert_transfers
from transport_cases import ascend

from pd_harness.cpu_host.memfabric import DEFAULT_MEMFABRIC
from pd_harness.device import device, wait_for_memfabric_peers
from pd_harness.polling import is_in_time, wait_until

pytestmark = [
    pytest.mark.transport,
    pytest.mark.skipif(device() != "cpu", reason="a real driver fails when it likes"),
]

# Writes to the pages of PAGES, which the next request overwrites; no two copies merge.
SCATTERED = ([1, 3, 5, 7], [7, 5, 6, 4], [2, 2])
SLOW = "slow 20000\n"  # microseconds per copy
CUT = "fail 0\n"
CUT_SECONDS = 2
RECOVERY_SECONDS = 5
DECODE_SERVERS = 4  # one session for each of prefill's four workers
# Restarts are in rounds of five. Ranks of 1.0.8 find each other so late that it has fewer rounds.
ROUNDS = {DEFAULT_MEMFABRIC: 10, "1.0.8": 2}
STARTED_TOGETHER = 5
# Files, and threads, that MemFabric does not release when a decode rank is lost.
MAX_LEAK_PER_RANK = 8


@pytest.fixture()
def fault(tmp_path):
    """A file that, while it exists, says how copies of prefill's driver fail."""
    return tmp_path / "fault"


def faulty_fleet(fault, mla: bool = False) -> Fleet:
    return ascend(Side(environment={"PD_DRIVER_FAULT": str(fault)}), mla=mla)


@pytest.mark.parametrize("mla", [False, True], ids=["gqa", "mla"])
@pytest.mark.parametrize("after", [0, 3])
def test_failing_driver_copy_fails_only_its_request(serve, fault, mla, after):
    """The copy fails its request on both sides; within 5 s another request is right."""
    with serve(faulty_fleet(fault, mla)) as servers:
        assert_transfers(servers)
        fault.write_text(f"fail {after}\n")
        assert_failed(servers.request(*SCATTERED), "")
        fault.unlink()
        assert wait_until(
            lambda: servers.request(*PAGES).state == "right", RECOVERY_SECONDS, pause=0.1
        )
        assert_transfers(servers)


def test_recovers_from_a_link_outage(serve, fault):
    """Requests arrive all the time, and are served again within 5 s of the end of the cut."""
    with serve(faulty_fleet(fault)) as servers:
        assert_transfers(servers)
        fault.write_text(CUT)
        begun = time.monotonic()
        while time.monotonic() - begun < CUT_SECONDS:
            assert servers.request(*PAGES).state == "failed"
        fault.unlink()
        begun = time.monotonic()
        assert wait_until(lambda: servers.request(*PAGES).state == "right", 60, pause=0.05)
        assert is_in_time(time.monotonic() - begun, RECOVERY_SECONDS)
        assert_transfers(servers)


def test_decode_killed_in_mid_batch(serve, fault):
    with serve(faulty_fleet(fault)) as servers:
        assert_transfers(servers)
        for _ in range(2):
            fault.write_text(SLOW)
            (dying,) = servers.pids("decode")
            threading.Timer(0.15, os.kill, [dying, signal.SIGKILL]).start()
            outcome = servers.request(*SCATTERED)
            (prefill,), (decode,) = outcome.prefill, outcome.decode
            assert (prefill["state"], decode["state"]) == ("failed", "died"), outcome
            assert is_in_time(prefill["seconds"], 10), outcome
            fault.unlink()
            servers.start("decode")
            assert_transfers(servers)


def requests_to(decodes: list) -> list:
    """Returns a request of two pages to each decode rank, for `Servers.requests_at_once`."""
    return [(rank, [2 * i, 2 * i + 1], [5, 3]) for i, rank in enumerate(decodes)]


def start_decodes(servers, count: int) -> list:
    with ThreadPoolExecutor(count) as pool:
        return [
            rank for (rank,) in pool.map(lambda _: servers.start_another("decode"), range(count))
        ]


def assert_all_transfer(servers, decodes: list) -> None:
    for outcome in servers.requests_at_once(requests_to(decodes)):
        assert outcome.state == "right", outcome


@pytest.mark.parametrize(
    "memfabric", [DEFAULT_MEMFABRIC, pytest.param("1.0.8", marks=pytest.mark.nightly)]
)
def test_concurrent_first_writes_to_new_decode_servers(serve, fault, memfabric):
    """The workers connect to several peers at the same time."""
    with serve(faulty_fleet(fault), memfabric=memfabric) as servers:
        decodes = start_decodes(servers, DECODE_SERVERS - 1)
        wait_for_memfabric_peers(memfabric)
        assert_all_transfer(servers, [*decodes, *servers.decode])
        assert_transfers(servers)


def test_decode_server_starts_while_all_workers_write(serve, fault):
    with serve(faulty_fleet(fault)) as servers:
        writing = [*start_decodes(servers, DECODE_SERVERS - 1), *servers.decode]
        assert_all_transfer(servers, writing)
        fault.write_text("slow 500000\n")
        with ThreadPoolExecutor(1) as pool:
            busy = pool.submit(servers.requests_at_once, requests_to(writing))
            time.sleep(0.2)
            new = servers.start_another("decode")
            assert not busy.done()
            fault.unlink()
            for outcome in busy.result():
                assert outcome.state == "right", outcome
        assert_all_transfer(servers, new)


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("memfabric", ROUNDS)
def test_repeated_decode_restarts_do_not_leak(serve, fault, memfabric):
    """Restarts decode again and again; MemFabric keeps its connections and threads of each."""
    rounds = ROUNDS[memfabric]
    with serve(faulty_fleet(fault), memfabric=memfabric) as servers:
        assert_transfers(servers)
        (pid,) = servers.pids("prefill")[1:]
        before = open_files_and_threads(pid)
        for _ in range(rounds):
            decodes = start_decodes(servers, STARTED_TOGETHER)
            wait_for_memfabric_peers(memfabric)
            assert_all_transfer(servers, decodes)
            for rank in decodes:
                os.kill(rank.pid, signal.SIGKILL)
            assert_transfers(servers)
        kept = [now - then for now, then in zip(open_files_and_threads(pid), before)]
        assert max(kept) < MAX_LEAK_PER_RANK * rounds * STARTED_TOGETHER, kept


def open_files_and_threads(pid: int) -> tuple[int, int]:
    """Returns a process's counts of open files and of threads, also those outside of Python."""
    return tuple(len(os.listdir(f"/proc/{pid}/{what}")) for what in ("fd", "task"))
