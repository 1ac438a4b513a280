"""A rank keeps no memory of requests that are over."""

import os
from pathlib import Path

import fleet as fleets
import pytest
from transfer_checks import PAGES

from pd_harness.cluster import why_not_here
from pd_harness.forks import SHARED

pytestmark = pytest.mark.transport

WARM_UP = 400
REQUESTS = 400
GROWTH_KIB = 100  # a quarter of a KiB for each request


@pytest.fixture(scope="module")
def idle_fork_server():
    """A fork server of this test's own.

    What one writes to that forks ranks for other tests, too, becomes its ranks' private memory.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(SHARED, raising=False)
        return fleets.ForkServer("patched", nixl=os.environ.get("SGLANG_PD_NIXL", ""))


def own_kib(rank: fleets.Rank) -> int:
    """Memory that a rank has written to and shares with no other process."""
    lines = Path(f"/proc/{rank.pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Private_Dirty:"))


@pytest.mark.parametrize("backend", ["nixl", "mooncake"])
def test_memory_is_flat(idle_fork_server, backend):
    fleet = fleets.Fleet(backend=backend)
    if reason := why_not_here(backend, fleet.size, ("patched",)):
        pytest.skip(reason)
    with fleets.running(fleet, idle_fork_server, idle_fork_server) as servers:
        ranks = [*servers.prefill, *servers.decode]
        sizes = []
        for count in (WARM_UP, REQUESTS, REQUESTS):
            for _ in range(count):
                outcome = servers.request(*PAGES)
                assert outcome.state == "right", outcome
            sizes.append([own_kib(rank) for rank in ranks])
        # What is leaked grows both times; what is touched for the first time, only once.
        for first, second, third in zip(*sizes):
            assert min(second - first, third - second) <= GROWTH_KIB, sizes
