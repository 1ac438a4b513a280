"""Tests of one xdist group run on one worker."""

import re
import subprocess
import sys

GROUP = """
import pytest

@pytest.mark.xdist_group("shared")
@pytest.mark.parametrize("number", range(8))
def test_in_group(number):
    pass
"""


def test_xdist_group_runs_on_one_worker(tmp_path):
    (tmp_path / "test_group.py").write_text(GROUP)
    by_two = ["-n", "2", "--dist", "loadgroup", "-v", "-p", "no:cacheprovider", "."]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *by_two], cwd=tmp_path, capture_output=True, text=True
    )
    workers = re.findall(r"\[(gw\d)\].* PASSED", done.stdout)
    assert len(workers) == 8 and len(set(workers)) == 1, done.stdout
