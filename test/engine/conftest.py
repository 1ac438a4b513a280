"""The engine's real classes in one process: the patched engine's here, the stock engine's asked."""

import json
import os
import subprocess
from pathlib import Path

import pytest

SUPPORT = Path(__file__).resolve().parents[1] / "support"

pytest.importorskip("sglang.srt.disaggregation.kv_layout", reason="no patched engine here")

from pd_harness import cluster  # noqa: E402
from pd_harness.cpu_host import ENVIRONMENT  # noqa: E402


@pytest.fixture(scope="session")
def stock():
    """A function that runs probes, each [name, arguments...], in the stock engine."""
    try:
        python = cluster.interpreter("stock")
    except FileNotFoundError as error:
        pytest.skip(f"no stock engine to compare with: {error}")

    def ask(*calls: list) -> list:
        done = subprocess.run(
            [str(python), str(SUPPORT / "probes.py"), json.dumps(calls)],
            env={**os.environ, **ENVIRONMENT},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        return json.loads(done.stdout.splitlines()[-1])

    return ask
