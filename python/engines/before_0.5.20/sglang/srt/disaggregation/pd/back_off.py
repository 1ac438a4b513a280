"""Decode ranks to which transfers fail again and again are left alone for a while.

On a dead one each transfer costs the transfer engine's time-out, in one of few queues.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Dict

from sglang.srt.disaggregation.kv_layout import LayoutError

# After so many failures in a row, for some seconds, twice as many after each that fails then.
FAILURES_IN_A_ROW = 2
BACK_OFF_SECONDS = 10.0
MAX_BACK_OFF_SECONDS = 320.0


@dataclass
class _Failures:
    """`not_before` is when it is tried next, on the monotonic clock; infinite while it is."""

    count: int = 0
    not_before: float = -math.inf


class BackOff:
    """Counts failures in a row of each peer, from any thread."""

    def __init__(self):
        self._lock = threading.Lock()
        self._failures: Dict[str, _Failures] = {}

    @contextlib.contextmanager
    def trying(self, peer: str) -> Iterator[None]:
        """Around a transfer; after some failures one at a time.

        Raises:
            RuntimeError: It failed a short time ago, or is being tried.
        """
        self._check(peer)
        try:
            yield
        except LayoutError:  # nothing was tried
            with self._lock:
                if self.is_left_alone(peer):
                    self._failures[peer].not_before = 0.0
            raise
        except Exception:
            with self._lock:
                known = self._failures.setdefault(peer, _Failures())
                known.count += 1
                more = known.count - FAILURES_IN_A_ROW
                if more >= 0:
                    seconds = min(BACK_OFF_SECONDS * 2 ** min(more, 30), MAX_BACK_OFF_SECONDS)
                    known.not_before = time.monotonic() + seconds
            raise
        self.forgive(peer)

    def forgive(self, peer: str) -> None:
        """It is another process, or lives."""
        with self._lock:
            self._failures.pop(peer, None)

    def is_left_alone(self, peer: str) -> bool:
        """Whether it is tried one at a time, and not at once."""
        known = self._failures.get(peer)
        return known is not None and known.count >= FAILURES_IN_A_ROW

    def seconds_left(self, peer: str) -> float:
        """Until it is tried again; infinite while it is, 0 or less for one that may be tried."""
        known = self._failures.get(peer)
        return -math.inf if known is None else known.not_before - time.monotonic()

    def _check(self, peer: str) -> None:
        with self._lock:
            if not self.is_left_alone(peer):
                return
            seconds, failures = self.seconds_left(peer), self._failures[peer].count
            if seconds <= 0:
                self._failures[peer].not_before = math.inf  # until this try has ended
                return
        when = "when that has ended" if seconds == math.inf else f"in {seconds:.0f} s"
        raise RuntimeError(
            f"the last {failures} transfers to decode session {peer} failed; it is tried again "
            f"{when}"
        )
