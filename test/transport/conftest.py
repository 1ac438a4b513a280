"""Real transfer engines between real processes: the engine's pools and managers, no model."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

import fleet as fleets

from sglang_pd.cluster import PD_ENV, why_not_here


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


@pytest.fixture()
def note():
    """A function that keeps how a survivor learned of a fault, for `scripts/evidence.sh`."""

    def keep(case: str, backend: str, answer: dict) -> None:
        row = {"case": case, "backend": backend, "seconds": answer["seconds"]}
        file = PD_ENV / "evidence" / "transport_faults.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a") as out:
            out.write(json.dumps({**row, "reason": answer["reason"]}) + "\n")

    return keep
