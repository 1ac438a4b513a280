"""Waiting by looking again and again."""

import time
from collections.abc import Callable
from typing import TypeVar

Seen = TypeVar("Seen")


def awaited(look: Callable[[], Seen], seconds: float, pause: float = 0.02) -> Seen:
    """What ``look`` returns once that is true, or after so many seconds, whatever it is then.

    Between two looks it sleeps ``pause`` seconds.
    """
    deadline = time.monotonic() + seconds
    while not (seen := look()) and time.monotonic() < deadline:
        time.sleep(pause)
    return seen
