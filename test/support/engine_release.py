"""What differs between the releases of the engine under test."""

import pytest

from pd_harness.releases import default_release, release

SINCE_0_5_20 = release() != "0.5.9"  # from 0.5.20 on
IS_DEFAULT = release() == default_release()
# Marks of what every run tries in the default release, and only the night in the others.
NIGHTLY_IF_NOT_DEFAULT = [] if IS_DEFAULT else [pytest.mark.nightly]


def without_extension_frames(registration: list[bytes]) -> list[bytes]:
    """A registration without the frames that stock does not send."""
    if SINCE_0_5_20:
        return [frame for frame in registration if frame[:4] not in (b"KVL1", b"KVS1")]
    return registration[:-2]


def slow_memfabric_marks(case: str, decode: str = "stock") -> list:
    """Marks of a case `BACKEND-NAME`, or a backend, with this engine as decode.

    Stock 0.5.9 serves with a MemFabric alone whose ranks take half a minute to know each other.
    """
    is_slow = case.partition("-")[0] == "ascend" and decode == "stock" and not SINCE_0_5_20
    return [pytest.mark.nightly] if is_slow else []


def with_marks(*marks):
    """Puts these on a test."""

    def marked(test):
        for mark in marks:
            test = mark(test)
        return test

    return marked


# Of a test of what every run tries in the default release.
nightly_if_not_default = with_marks(*NIGHTLY_IF_NOT_DEFAULT)
