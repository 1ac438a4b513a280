"""Numeric environment variables of the patch set."""

import math
import os


def number_of(name: str, default: float, least: float, unit: str) -> float:
    """Returns an environment variable's number, or `default` if it is unset or empty.

    Raises:
        ValueError: The value is not a finite number of at least `least`; the server must not start.
    """
    value = os.environ.get(name) or str(default)
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not least <= number < math.inf:
        raise ValueError(f"{name} is {value!r}; expected {least:g} {unit} or more")
    return number


def seconds_of(name: str, default: float, least: float) -> float:
    """Returns an environment variable's seconds; see `number_of`."""
    return number_of(name, default, least, "seconds")
