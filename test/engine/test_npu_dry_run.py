"""Runs CI's NPU tests on fake NPUs, each up to the point where it needs a real one.

No servers or ranks start, and no bytes travel between ranks. Tests in one process run to their
end, on a fake device that takes a device's code paths.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from engine_release import SINCE_0_5_18, nightly_if_not_default, shown_by_0_5_23

from pd_harness.cluster import CHECKOUT
from pd_harness.device import device

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(900),
    pytest.mark.skipif(device() == "npu", reason="there are real ones"),
]

SUPPORT = Path(__file__).parents[1] / "support"
COPY_TESTS_0_5_9 = ("memory_of_a_dropped_copy_is_reused", "copy_of_no_slots")
SYNC_TESTS = "test/engine/host_copy_sync.py"
COPY_TESTS = (
    ["test/engine/from_0_5_18/test_cpu_copy_layouts.py"]
    if SINCE_0_5_18
    else [f"test/engine/v0_5_9/test_cpu_copy_memory.py::test_{name}" for name in COPY_TESTS_0_5_9]
)
# Two NPUs suffice for a TP 1 pair only; four for two stages, or two groups, on either side.
MIN_STARTED = {2: {"fleets": 20, "servers": 10}, 4: {"fleets": 35, "servers": 40}}


def run_on_fake_npus(count: int, folder: Path, *tests: str) -> dict:
    """Runs tests on `count` fake NPUs; returns the numbers of what reached them and of passes."""
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


@nightly_if_not_default
@pytest.mark.parametrize("count", [pytest.param(2, marks=pytest.mark.nightly), 4])
def test_npu_tests_reach_the_npus(count, tmp_path):
    """The copy to the host takes a device's code paths, too, and waits for the device."""
    found = run_on_fake_npus(
        count, tmp_path, "test/transport", "test/serving", "test/npu", SYNC_TESTS, *COPY_TESTS
    )
    for what, least in MIN_STARTED[count].items():
        assert found[what] >= least, found
    assert found["passed"] >= 15 + 12 + 4, found  # test/npu, SYNC_TESTS and COPY_TESTS


@shown_by_0_5_23
@pytest.mark.nightly
def test_engine_tests_pass_on_a_fake_device(tmp_path):
    """Only those with tensors, and of every run: at night they are repeated with more examples."""
    files = (CHECKOUT / "test" / "engine").rglob("test_*.py")
    # pytest would collect files of other releases if they were named.
    others = [f"--ignore={file}" for file in files if "torch" not in file.read_text()]
    found = run_on_fake_npus(2, tmp_path, "-m", "not nightly", *others, "test/engine")
    assert found["passed"] > 200
