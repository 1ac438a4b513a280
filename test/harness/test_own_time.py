"""The clock that measures a loop's pauses on a machine with other load."""

import os
import subprocess
import sys
import time

import pytest

from pd_harness.polling import own_time

SECONDS = 0.5
RIVALS = 3


@pytest.fixture
def one_core():
    """Makes this thread share one core with some processes that compute all the time."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    rivals = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(RIVALS)]
    yield
    for rival in rivals:
        rival.kill()
        rival.wait()
    os.sched_setaffinity(0, allowed)


def test_own_time_excludes_time_of_other_processes(one_core):
    begun, own, used = time.monotonic(), own_time(), time.thread_time()
    while time.monotonic() - begun < SECONDS:
        pass
    took, used = own_time() - own, time.thread_time() - used
    assert used < SECONDS / 2, "the others have hardly computed"
    assert used - 0.05 < took < used + 0.1


def test_own_time_includes_sleep():
    own = own_time()
    time.sleep(SECONDS)
    assert SECONDS - 0.05 < own_time() - own < SECONDS + 0.2
