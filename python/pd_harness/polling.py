"""Waiting by looking again and again, and how long is long on a busy machine."""

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

Result = TypeVar("Result")


def wait_until(poll: Callable[[], Result], seconds: float, pause: float = 0.02) -> Result:
    """What ``look`` returns once that is true, or after so many seconds, whatever it is then.

    Between two looks it sleeps ``pause`` seconds.
    """
    deadline = time.monotonic() + seconds
    while not (result := poll()) and time.monotonic() < deadline:
        time.sleep(pause)
    return result


def busy(seconds: float = 1.0) -> float:
    """How much longer a loop takes than its processor time: 1 on a machine with a free core."""
    start, used = time.monotonic(), time.thread_time()
    while time.monotonic() - start < seconds:
        pass
    return seconds / (time.thread_time() - used)


def is_in_time(seconds: float, limit: float) -> bool:
    """Whether something took no longer than it may; on a busy machine, than it may there."""
    return seconds < limit or seconds < limit * busy()


def own_time() -> float:
    """Seconds on a clock that stands still while this thread could run and is given no core.

    Kernels that do not say so count that time, too.
    """
    waited = 0
    with contextlib.suppress(OSError, ValueError, IndexError):
        waited = int(Path("/proc/thread-self/schedstat").read_text().split()[1])
    return time.monotonic() - waited / 1e9
