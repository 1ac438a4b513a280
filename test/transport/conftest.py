"""Real transfer engines between real processes: the engine's pools and managers, no model."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

import fleet as fleets

from sglang_pd.cluster import why_not_here


@pytest.fixture(scope="session")
def nursery():
    """A function from `stock` or `patched` to a process that forks ranks of that engine."""
    made: dict[str, fleets.Nursery] = {}

    def of(engine: str) -> fleets.Nursery:
        if engine not in made:
            made[engine] = fleets.Nursery(engine)
        return made[engine]

    yield of
    for one in made.values():
        one.close()


@pytest.fixture()
def serve(nursery):
    """A function that runs a fleet with the named engines on prefill and decode.

    It skips the test where this device cannot run it.
    """

    def run(fleet: fleets.Fleet, prefill: str = "patched", decode: str = "patched"):
        if reason := why_not_here(fleet.backend, fleet.size, (prefill, decode)):
            pytest.skip(reason)
        return fleets.running(fleet, nursery(prefill), nursery(decode))

    return run
