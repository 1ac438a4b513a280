"""Which MemFabric serves with which engine: the runs that docs/memfabric.md is made of.

SGLANG_PD_MEMFABRIC says which release. Where SGLANG_PD_RUNS names a folder, each run is kept there,
and `python -m sglang_pd.doctor.memfabric_page FOLDER/*.json > docs/memfabric.md` takes them in.
"""

import os
from pathlib import Path

import pytest
from topologies import ASCEND

from pd_harness.cpu_host.memfabric import chosen_memfabric
from pd_harness.device import device
from pd_harness.releases import release
from sglang_pd.doctor.memfabric import Run, table
from sglang_pd.doctor.memfabric_page import as_json

pytestmark = [
    pytest.mark.transport,
    pytest.mark.nightly,
    pytest.mark.skipif(
        device() != "cpu", reason="an NPU host has one MemFabric, and no stock engine"
    ),
]

OUTCOMES = {"right": "right", "hang": "hangs"}  # all else fails
REQUESTS = [([9, 2, 3], [0, 1, 2]), ([4, 5], [6, 7]), ([1], [3])]


@pytest.mark.parametrize("engine", ["stock", "patched"])
@pytest.mark.parametrize("name", ["mla", "tp2_to_1"])
def test_an_engine_and_memfabric(serve, name, engine):
    """Fleets that stock serves as far as layouts go: a patched one serves, stock as is known."""
    with serve(ASCEND[name], engine, engine) as servers:
        states = [servers.request(src, dst, seconds=20).state for src, dst in REQUESTS]
    outcome = OUTCOMES.get(states[0], "fails") if len(set(states)) == 1 else "fails"
    run = Run(chosen_memfabric(), release(), engine == "patched", name, outcome)
    if folder := os.environ.get("SGLANG_PD_RUNS"):
        keep(run, Path(folder))
    known = table().outcome(run.memfabric, run.engine, run.patched)
    assert outcome == ("right" if run.patched else known or outcome), states


def keep(run: Run, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    side = "patched" if run.patched else "stock"
    file = folder / f"{run.memfabric}-{run.engine}-{side}-{run.fleet}.json"
    file.write_text(as_json([run]))
