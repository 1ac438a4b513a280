"""Short time slices, with which threads that yield do not starve those that sleep.

Since Linux 6.18 a thread that yields gives up the rest of its slice, as often as it yields, and
Gloo yields in a loop. Where many ranks share two cores that moves the scheduler's clock so far
ahead that a thread that wakes waited for up to 15 s, 1 s with short slices: the shorter a slice,
the less is given up.
"""

import contextlib
import ctypes
import os
import platform
import struct
from collections.abc import Iterator

SLICE_NS = 100_000  # the least that the kernel takes
SET_ATTRIBUTES = {"x86_64": 314, "aarch64": 274}  # the number of the system call
# Size, policy, flags, nice, priority, runtime (of ours the slice, ns), and two more.
ATTRIBUTES = struct.Struct("=IIQiIQQQ")


def short_slices(nanoseconds: int = SLICE_NS) -> bool:
    """For this thread, and for the threads and processes that it starts; whether it was changed.

    With 0 the kernel's own. Kernels before 6.12 have one slice for all, and change nothing.
    """
    call = SET_ATTRIBUTES.get(platform.machine())
    if platform.system() != "Linux" or call is None or os.sched_getscheduler(0) != os.SCHED_OTHER:
        return False
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    wanted = ATTRIBUTES.pack(ATTRIBUTES.size, os.SCHED_OTHER, 0, nice, 0, nanoseconds, 0, 0)
    return ctypes.CDLL(None).syscall(call, 0, wanted, 0) == 0


@contextlib.contextmanager
def before_others() -> Iterator[None]:
    """Run this thread, and the threads that it starts in here, before those of all processes.

    For a test that asks many ranks at once: beside NIXL's threads, which yield, too, it was seen to
    wait for 100 s between two ranks, of which the first gave up. A process that is started in here
    would go before others, too, and for good. Without the right to do so nothing is changed.
    """
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    except PermissionError:
        yield
        return
    try:
        yield
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
        short_slices()  # which a change of policy takes away
