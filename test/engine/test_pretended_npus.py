"""What CI runs on NPUs gets to the NPUs: each test up to where one is needed, on made-up ones.

Nothing is started, and no byte travels between ranks. What runs in one process runs whole, on a
device that takes the ways of a device.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from of_release import IS_LATER, at_night_elsewhere

from pd_harness.cluster import CHECKOUT
from pd_harness.device import device

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(900),
    pytest.mark.skipif(device() == "npu", reason="there are real ones"),
]

SUPPORT = Path(__file__).parents[1] / "support"
OLDER_COPIES = ("memory_of_a_dropped_copy_is_used_again", "nothing_to_copy")
WAITS = "test/engine/host_copy_waits.py"
COPIES = (
    ["test/engine/since_0.5.20/test_wide_copies.py"]
    if IS_LATER
    else [f"test/engine/before_0.5.20/test_host_copy.py::test_{name}" for name in OLDER_COPIES]
)
# A TP 1 pair is all that two NPUs serve; four serve two stages, or two groups, on either side.
STARTED = {2: {"fleets": 20, "servers": 10}, 4: {"fleets": 35, "servers": 40}}


def on_npus(count: int, folder: Path, *tests: str) -> dict:
    """How much was started on so many NPUs, and how many tests in one process passed."""
    counts = folder / "counts.json"
    path = os.pathsep.join([str(SUPPORT), str(CHECKOUT / "python")])
    variables = {"PRETENDED_NPUS": str(count), "PRETENDED_NPUS_COUNTS": str(counts)}
    command = [sys.executable, "-m", "pytest", "-p", "pretended_npus", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "-q", "--tb=short", *tests],
        cwd=CHECKOUT,
        env={**os.environ, **variables, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    return json.loads(counts.read_text())


@at_night_elsewhere
@pytest.mark.parametrize("count", [pytest.param(2, marks=pytest.mark.nightly), 4])
def test_all_that_runs_on_npus_gets_to_them(count, tmp_path):
    """Also the copy to the host takes the ways of a device, and waits for it."""
    found = on_npus(count, tmp_path, "test/transport", "test/serving", "test/npu", WAITS, *COPIES)
    for what, least in STARTED[count].items():
        assert found[what] >= least, found
    assert found["passed"] >= 15 + 12 + 4, found  # of test/npu, WAITS and COPIES


@pytest.mark.nightly
def test_the_engines_tests_pass_on_a_device(tmp_path):
    assert on_npus(2, tmp_path, "test/engine")["passed"] > 200
