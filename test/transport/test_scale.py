"""The benchmark of many ranks runs at its smallest size, and keeps what it has measured."""

import json
import subprocess
from pathlib import Path

from of_release import at_night_elsewhere

BENCH = Path(__file__).resolve().parents[2] / "scripts" / "bench.sh"
RANKS = 4


@at_night_elsewhere
def test_bench(tmp_path):
    file = tmp_path / "scale.json"
    smallest = ["--ranks", str(RANKS), "--only", "mooncake", "--rounds", "1", "--seconds", "1"]
    done = subprocess.run(
        [BENCH, "scale", *smallest, "--json", file], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    found = json.loads(file.read_text())
    assert [row["engine"] for row in found["rows"]] == ["stock", "patched"]
    for row in found["rows"]:
        assert (row["lost"], row["prefill_died"]) == (0, 0)
        # Each prefill rank is asked for each request, and says that it is done.
        assert row["messages"] == 2 * RANKS
        assert min(row["meet_cpu_s"], row["scheduler_ms"], row["reader_ms"]) > 0
