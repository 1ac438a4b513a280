"""Differences between the releases of the engine under test."""

import pytest

from pd_harness.releases import default_release, release

SINCE_0_5_18 = release() != "0.5.9"  # from 0.5.18 on
IS_0_5_18 = release() == "0.5.18"
SINCE_0_5_23 = SINCE_0_5_18 and not IS_0_5_18
IS_DEFAULT = release() == default_release()
# The module whose `Rank` is one of this release.
RANK_MODULE = f"rank_{release().replace('.', '_')}"
# Marks of tests that every run has in the default release, and only nightly runs in the others.
NIGHTLY_IF_NOT_DEFAULT = [] if IS_DEFAULT else [pytest.mark.nightly, pytest.mark.elsewhere]


def not_0_5_18(why: str):
    """Returns a mark for tests of what 0.5.18 lacks; `why` says what that is."""
    return pytest.mark.skipif(IS_0_5_18, reason=f"0.5.18 {why}")


# For a long test of code that 0.5.18 and 0.5.23 share.
shown_by_0_5_23 = pytest.mark.skipif(IS_0_5_18, reason="0.5.23, with the same code, shows it")


def without_extension_frames(registration: list[bytes]) -> list[bytes]:
    """Returns a registration message without the frames that stock does not send."""
    if SINCE_0_5_18:
        ours = (b"KVL1", b"KVS1", b"PD_R")
        return [frame for frame in registration if frame[:4] not in ours]
    return registration[:-2]


def slow_memfabric_marks(case: str, decode: str = "stock") -> list:
    """Returns the marks of a case `BACKEND-NAME`, or a backend, with this engine as decode.

    Stock 0.5.9 works only with a MemFabric whose ranks take half a minute to find each other.
    """
    is_slow = case.partition("-")[0] == "ascend" and decode == "stock" and not SINCE_0_5_18
    return [pytest.mark.nightly] if is_slow else []


def with_marks(*marks):
    """Returns a decorator that puts these marks on a test."""

    def marked(test):
        for mark in marks:
            test = mark(test)
        return test

    return marked


# For a test that every run has in the default release.
nightly_if_not_default = with_marks(*NIGHTLY_IF_NOT_DEFAULT)
