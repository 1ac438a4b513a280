"""Polling, and time limits on a busy machine."""

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

Result = TypeVar("Result")


def wait_until(poll: Callable[[], Result], seconds: float, pause: float = 0.02) -> Result:
    """Call ``poll`` until its result is true or ``seconds`` have passed; returns the last result.

    Sleeps ``pause`` seconds between two calls.
    """
    deadline = time.monotonic() + seconds
    while not (result := poll()) and time.monotonic() < deadline:
        time.sleep(pause)
    return result


def busy(seconds: float = 1.0) -> float:
    """Ratio of a loop's wall time to its processor time: 1 on a machine with a free core."""
    start, used = time.monotonic(), time.thread_time()
    while time.monotonic() - start < seconds:
        pass
    return seconds / (time.thread_time() - used)


def is_in_time(seconds: float, limit: float) -> bool:
    """Whether ``seconds`` is below ``limit``, which a busy machine extends by `busy`."""
    return seconds < limit or seconds < limit * busy()


def own_time() -> float:
    """Seconds on a clock that stops while this thread is runnable and waits for a core.

    On kernels that do not report that time, the clock does not stop.
    """
    waited = 0
    with contextlib.suppress(OSError, ValueError, IndexError):
        waited = int(Path("/proc/thread-self/schedstat").read_text().split()[1])
    return time.monotonic() - waited / 1e9
