"""The engine's real classes in one process: the patched engine's here, the stock engine's asked.

`before_0.5.20` has the tests of what the patch set replaces in those releases alone, and
`since_0.5.20` those of what only later ones have. Of a later release the stock engine can run these
tests, too, and shows in which it fails.
"""

import importlib.util
import json
from pathlib import Path

import pytest
from packaging.version import Version

from pd_harness import cluster, forks
from pd_harness.cpu_host import ENVIRONMENT
from pd_harness.releases import release
from pd_harness.waiting import awaited

SUPPORT = Path(__file__).resolve().parents[1] / "support"
STOCK_SECONDS = 120  # for all probes of one question

pytest.importorskip("sglang", reason="no engine here")
OLD = Version(release()) < Version("0.5.20")
PATCHED = importlib.util.find_spec("sglang.srt.disaggregation.kv_layout") is not None
if OLD and not PATCHED:
    pytest.skip("no patched engine here", allow_module_level=True)

collect_ignore = ["since_0.5.20" if OLD else "before_0.5.20"]
if not PATCHED:
    collect_ignore += ["test_pretended_npus.py", "test_verify.py"]


@pytest.fixture(scope="session")
def stock(tmp_path_factory):
    """A function that runs probes, each [name, arguments...], in the stock engine."""
    try:
        python = cluster.interpreter("stock")
    except FileNotFoundError as error:
        pytest.skip(f"no stock engine to compare with: {error}")

    def ask(*calls: list) -> list:
        log = tmp_path_factory.mktemp("stock") / "log"
        words = str(SUPPORT / "probes.py"), [json.dumps(calls)]
        with log.open("wb") as file:
            asked = forks.fork(str(python), *words, ENVIRONMENT, file)
        awaited(lambda: asked.poll() is not None, STOCK_SECONDS)
        asked.stop()
        said = log.read_text()
        assert asked.returncode == 0, said[-2000:]
        return json.loads(said.splitlines()[-1])

    return ask
