"""The engine's real classes in one process: the patched engine's here, the stock engine's asked.

`before_0.5.20` has the tests of what the patch set replaces in those releases alone, and
`since_0.5.20` those of what only later ones have. Of a later release the stock engine can run these
tests, too, and shows in which it fails.
"""

import importlib.util
import json
import os
import subprocess
from pathlib import Path

import pytest
from packaging.version import Version

from pd_harness import cluster
from pd_harness.cpu_host import ENVIRONMENT
from pd_harness.releases import release

SUPPORT = Path(__file__).resolve().parents[1] / "support"

pytest.importorskip("sglang", reason="no engine here")
OLD = Version(release()) < Version("0.5.20")
PATCHED = importlib.util.find_spec("sglang.srt.disaggregation.kv_layout") is not None
if OLD and not PATCHED:
    pytest.skip("no patched engine here", allow_module_level=True)

collect_ignore = ["since_0.5.20" if OLD else "before_0.5.20"]
if not PATCHED:
    collect_ignore += ["test_pretended_npus.py", "test_verify.py"]


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
