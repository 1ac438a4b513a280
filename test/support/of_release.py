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


def slow_to_meet(case: str, decode: str = "stock") -> list:
    """Marks of a case `BACKEND-NAME`, or a backend, with this engine as decode.

    Stock 0.5.9 serves with a MemFabric alone whose ranks take half a minute to know each other.
    """
    is_slow = case.partition("-")[0] == "ascend" and decode == "stock" and not IS_LATER
    return [pytest.mark.nightly] if is_slow else []


def with_marks(*marks):
    """Puts these on a test."""

    def marked(test):
        for mark in marks:
            test = mark(test)
        return test

    return marked


# Of a test of what every run tries in the default release.
at_night_elsewhere = with_marks(*ELSEWHERE_AT_NIGHT)
