"""The benchmark of many ranks runs at its smallest size and saves its measurements."""

import json
import subprocess
from pathlib import Path

import pytest
from engine_release import SINCE_0_5_23

from pd_harness.device import device

pytestmark = [
    pytest.mark.transport,
    pytest.mark.skipif(device() != "cpu", reason="nothing is sent, to no device"),
]

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
RANKS, BACKENDS = 4, ("mooncake", "nixl") if SINCE_0_5_23 else ("mooncake",)


@pytest.mark.nightly
def test_smallest_scale_benchmark(tmp_path):
    file = tmp_path / "scale.json"
    smallest = ["--ranks", str(RANKS), "--rounds", "1", "--seconds", "1", "--json", file]
    done = subprocess.run(
        [SCRIPTS / "bench.sh", "scale", *smallest], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    check_rows(file, [(backend, engine) for backend in BACKENDS for engine in ("stock", "patched")])


def check_rows(file: Path, kinds: list[tuple[str, str]]) -> None:
    rows = json.loads(file.read_text())["rows"]
    assert [(row["backend"], row["engine"]) for row in rows] == kinds
    for row in rows:
        assert (row["lost"], row["prefill_died"]) == (0, 0)
        # Per prefill rank and request: decode's metadata, and prefill's status. Both sides have TP
        # 1 here, so there is nothing to interleave.
        assert row["messages"] == 2 * RANKS
        assert min(row["meet_cpu_s"], row["scheduler_ms"], row["reader_ms"]) > 0
