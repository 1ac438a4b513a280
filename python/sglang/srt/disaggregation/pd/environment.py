"""Numeric environment variables of the patch set."""

import math
import os


def seconds_of(name: str, default: float, least: float) -> float:
    """Returns an environment variable's seconds, or `default` if it is unset or empty.

    Raises:
        ValueError: The value is not a finite number of at least `least`; the server must not start.
    """
    value = os.environ.get(name) or str(default)
    try:
        seconds = float(value)
    except ValueError:
        seconds = math.nan
    if not least <= seconds < math.inf:
        raise ValueError(f"{name} is {value!r}; expected {least:g} seconds or more")
    return seconds
