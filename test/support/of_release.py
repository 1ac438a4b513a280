"""What differs between the releases of the engine under test."""

import pytest

from pd_harness.releases import default_release, release

IS_LATER = release() != "0.5.9"  # from 0.5.20 on
IS_DEFAULT = release() == default_release()
# Marks of what every run tries in the default release, and only the night in the others.
ELSEWHERE_AT_NIGHT = [] if IS_DEFAULT else [pytest.mark.nightly]


def as_stocks(registration: list[bytes]) -> list[bytes]:
    """A registration without the frames that stock does not send."""
    if IS_LATER:
        return [frame for frame in registration if frame[:4] not in (b"KVL1", b"KVS1")]
    return registration[:-2]


def at_night_elsewhere(test):
    """The mark, of one test."""
    for mark in ELSEWHERE_AT_NIGHT:
        test = mark(test)
    return test
