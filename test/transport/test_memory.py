"""A rank frees the memory of finished requests and of lost decode ranks."""

import os
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import fleet as fleets
import pytest
from engine_release import SINCE_0_5_18
from rank_faults import kill
from transfer_checks import PAGES, assert_right

from pd_harness.cluster import skip_reason
from pd_harness.forks import SHARED_FOLDER_VARIABLE
from pd_harness.polling import wait_until

pytestmark = pytest.mark.transport

REQUESTS, WINDOWS = 300, 3
GROWTH_KIB = 75  # a quarter of a KiB per request
RESTARTS, WINDOW_RESTARTS, MAX_RELEASED = 100, 20, 2
GROWTH_PER_RESTART_KIB = 8  # measured: 1 to 4 with the patched engine, 13 (0.5.18) to 50 with stock


@pytest.fixture(scope="module")
def idle_fork_server():
    """A fork server that no other test uses.

    Pages that a shared fork server writes to for other tests become private memory of its ranks.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(SHARED_FOLDER_VARIABLE, raising=False)
        return fleets.ForkServer("patched", nixl=os.environ.get("SGLANG_PD_NIXL", ""))


def private_kib(rank: fleets.Rank) -> int:
    """Returns the KiB that a rank has written to and shares with no other process."""
    lines = Path(f"/proc/{rank.pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Private_Dirty:"))


@pytest.mark.nightly
@pytest.mark.parametrize("backend", ["nixl", "mooncake"])
def test_memory_does_not_grow_with_requests(idle_fork_server, backend):
    fleet = fleets.Fleet(backend=backend)
    if reason := skip_reason(backend, fleet.size, ("patched",)):
        pytest.skip(reason)
    with fleets.running(fleet, idle_fork_server, idle_fork_server) as servers:
        ranks = [*servers.prefill, *servers.decode]
        sizes = []
        for _ in range(WINDOWS + 1):  # the first window fills caches
            for _ in range(REQUESTS):
                assert_right(servers, *PAGES)
            sizes.append([private_kib(rank) for rank in ranks])
        # A leak grows in each window; memory that is touched for the first time grows once.
        for of_rank in zip(*sizes):
            growths = [after - before for before, after in pairwise(of_rank)]
            assert min(growths) <= GROWTH_KIB, sizes


def growth_per_restart(servers, settle: Callable[[], object]) -> float:
    """Restarts decode, each time with one request; returns prefill's growth in KiB per restart.

    Args:
        settle: Called before each measurement.

    Returns:
        The least of several windows of restarts: a leak grows in each of them, while an allocator
        grows mostly in the first.
    """
    (prefill,) = servers.prefill
    sizes = []
    for number in range(RESTARTS + 1):
        if number and number % WINDOW_RESTARTS == 0:
            settle()
            sizes.append(private_kib(prefill))
        if number < RESTARTS:
            for pid in servers.pids("decode"):
                kill(pid)
            servers.start("decode")
            assert_right(servers, *PAGES)
    growths = [after - before for before, after in pairwise(sizes)]
    return min(growths) / WINDOW_RESTARTS


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("engine", ["patched", "stock"])
def test_lost_decode_servers_are_dropped(serve, engine):
    """Loses a hundred decode servers over NIXL, one after the other; stock drops none of them."""
    if engine == "stock" and not SINCE_0_5_18:
        pytest.skip("stock 0.5.9's prefill raises when a decode server ends")
    fleet = fleets.Fleet(fleets.Side(environment={"SGLANG_PD_SILENT_SECONDS": "5"}))
    with serve(fleet, engine, engine) as servers:
        (prefill,) = servers.prefill

        def known_peers() -> int:
            return prefill.call("health")["peers"]

        def wait_for_release() -> None:
            """Waits for what is dropped with time; a fast machine restarts more in that time."""
            assert wait_until(lambda: known_peers() == MAX_RELEASED + 1, 30), known_peers()

        if engine == "patched":
            prefill.call("set_constants", module="peer_sockets", CLOSE_AFTER_SECONDS=1.0)
            released = {"RELEASE_AFTER_SECONDS": 1.0, "MAX_RELEASED_PEERS": MAX_RELEASED}
            prefill.call("set_constants", module="peer_silence", **released)
        kib = growth_per_restart(servers, wait_for_release if engine == "patched" else known_peers)
        print(f"{engine}: {kib:.1f} KiB for each restart")
        if engine == "stock":
            assert kib > GROWTH_PER_RESTART_KIB and known_peers() == RESTARTS, kib
        else:
            assert kib < GROWTH_PER_RESTART_KIB, kib
