"""Processes of the CPU host, and those that they start, run in short slices."""

import ctypes
import os
import platform
import subprocess
import sys
import threading

import pytest

from pd_harness.cpu_host import SWITCH
from pd_harness.cpu_host.slices import ATTRIBUTES, SLICE_NS, before_others, short_slices

GET_ATTRIBUTES = {"x86_64": 315, "aarch64": 275}
RELEASE = tuple(map(int, platform.release().split(".")[:2])) if sys.platform == "linux" else (0, 0)

pytestmark = pytest.mark.skipif(
    platform.machine() not in GET_ATTRIBUTES or RELEASE < (6, 12),
    reason="before Linux 6.12 threads have no slices of their own",
)


def slice_of_this_thread() -> int:
    attributes = ctypes.create_string_buffer(ATTRIBUTES.size)
    call = GET_ATTRIBUTES[platform.machine()]
    assert ctypes.CDLL(None).syscall(call, 0, attributes, ATTRIBUTES.size, 0) == 0
    return ATTRIBUTES.unpack(attributes.raw)[5]


SHOW = f"""
import sys, threading
sys.path.insert(0, {os.path.dirname(__file__)!r})
from test_slices import slice_of_this_thread
found = [slice_of_this_thread()]
thread = threading.Thread(target=lambda: found.append(slice_of_this_thread()))
thread.start()
thread.join()
print(*found)
"""


@pytest.fixture(autouse=True)
def slices_of_the_kernel():
    """This process has the switch, too."""
    short_slices(0)
    assert slice_of_this_thread() > SLICE_NS
    yield
    short_slices()


def test_with_the_switch_threads_have_short_slices():
    environment = {**os.environ, SWITCH: "1"}
    shown = subprocess.run(
        [sys.executable, "-c", SHOW], env=environment, capture_output=True, text=True, check=True
    )
    assert shown.stdout.split() == [str(SLICE_NS)] * 2


def test_a_fork_inherits_it():
    read, write = os.pipe()
    if (pid := os.fork()) == 0:
        short_slices()
        if os.fork() == 0:
            os.write(write, str(slice_of_this_thread()).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(read, 100) == str(SLICE_NS).encode()


def test_who_asks_many_ranks_goes_before_others():
    found = []
    with before_others():
        if os.sched_getscheduler(0) == os.SCHED_OTHER:
            pytest.skip("no right to choose another policy here")
        thread = threading.Thread(target=lambda: found.append(os.sched_getscheduler(0)))
        thread.start()
        thread.join()
    assert found == [os.SCHED_RR]
    assert os.sched_getscheduler(0) == os.SCHED_OTHER and slice_of_this_thread() == SLICE_NS
