"""A rank keeps no memory of requests that are over."""

from pathlib import Path

import pytest
from fleet import Fleet, Rank
from transfer_checks import PAGES

pytestmark = pytest.mark.transport

WARM_UP = 400
REQUESTS = 600
GROWTH_KIB = 150  # a quarter of a KiB for each request


def kib(rank: Rank) -> int:
    """A rank's memory that is no file's, also what it shares with what it is a fork of.

    Else a page would be new that only the other has written to.
    """
    lines = Path(f"/proc/{rank.pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Anonymous:"))


@pytest.mark.parametrize("backend", ["nixl", "mooncake"])
def test_memory_is_flat(serve, backend):
    with serve(Fleet(backend=backend)) as servers:
        ranks = [*servers.prefill, *servers.decode]
        sizes = []
        for count in (WARM_UP, REQUESTS):
            for _ in range(count):
                outcome = servers.request(*PAGES)
                assert outcome.state == "right", outcome
            sizes.append([kib(rank) for rank in ranks])
        grown = [after - before for before, after in zip(*sizes)]
        assert max(grown) <= GROWTH_KIB, sizes
