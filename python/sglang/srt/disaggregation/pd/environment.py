"""Environment variables of the patch set that are numbers."""

import math
import os


def seconds_of(name: str, default: float, least: float) -> float:
    """What an environment variable says, in seconds.

    Raises:
        ValueError: It is no number, or less than `least`; the server must not start.
    """
    value = os.environ.get(name) or str(default)
    try:
        seconds = float(value)
    except ValueError:
        seconds = math.nan
    if not least <= seconds < math.inf:
        raise ValueError(f"{name} is {value!r}; it takes seconds, {least:g} or more")
    return seconds
