"""Decode ranks to which transfers fail again and again are left alone for a while.

On a dead one each transfer costs the transfer engine's time-out, in one of few queues; a link that
was cut for a moment must soon serve again. So the waits begin short and double, and are longer than
the failures.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Dict

from sglang.srt.disaggregation.kv_layout import LayoutError

# After so many failures in a row, for some seconds, twice as many after each that fails then.
FAILURES_IN_A_ROW = 2
BACK_OFF_SECONDS = 1.0
MAX_BACK_OFF_SECONDS = 30.0
# A wait is as long as so many failures, and the longest may be as long as so many: a peer that
# takes a time-out to fail leaves its queue to others for most of the time.
MIN_WAIT_IN_FAILURES = 2
MAX_WAIT_IN_FAILURES = 10


@dataclass
class _PeerFailures:
    """`retry_at` is when it is tried next, on the monotonic clock; infinite while it is."""

    count: int = 0
    wait: float = 0.0
    retry_at: float = -math.inf


class PeerBackoff:
    """Counts failures in a row of each peer, from any thread.

    in_a_row: After so many a peer is left alone.
    """

    def __init__(self, in_a_row: int = FAILURES_IN_A_ROW):
        self._in_a_row = in_a_row
        self._lock = threading.Lock()
        self._failures: Dict[str, _PeerFailures] = {}

    @contextlib.contextmanager
    def attempt(self, peer: str) -> Iterator[None]:
        """Around a transfer; after some failures one at a time.

        Raises:
            RuntimeError: It failed a short time ago, or is being tried.
        """
        self._check(peer)
        started_at = time.monotonic()
        try:
            yield
        except LayoutError:  # nothing was tried
            with self._lock:
                if self.is_backing_off(peer):
                    self._failures[peer].retry_at = 0.0
            raise
        except Exception:
            self.note_failure(peer, time.monotonic() - started_at)
            raise
        self.reset(peer)

    def note_failure(self, peer: str, took: float) -> None:
        """A transfer to it failed, after so many seconds."""
        with self._lock:
            known = self._failures.setdefault(peer, _PeerFailures())
            known.count += 1
            if known.count >= self._in_a_row:
                known.wait = _wait(known, took)
                known.retry_at = time.monotonic() + known.wait

    def reset(self, peer: str) -> None:
        """It is another process, or lives."""
        with self._lock:
            self._failures.pop(peer, None)

    def is_backing_off(self, peer: str) -> bool:
        """Whether it is tried one at a time, and not at once."""
        known = self._failures.get(peer)
        return known is not None and known.count >= self._in_a_row

    def retry_in(self, peer: str) -> float:
        """Until it is tried again; infinite while it is, 0 or less for one that may be tried."""
        known = self._failures.get(peer)
        return -math.inf if known is None else known.retry_at - time.monotonic()

    def _check(self, peer: str) -> None:
        with self._lock:
            if not self.is_backing_off(peer):
                return
            seconds, failures = self.retry_in(peer), self._failures[peer].count
            if seconds <= 0:
                self._failures[peer].retry_at = math.inf  # until this try has ended
                return
        when = "when that has ended" if seconds == math.inf else f"in {math.ceil(seconds)} s"
        raise RuntimeError(
            f"the last {failures} transfers to decode session {peer} failed; it is tried again "
            f"{when}"
        )


def _wait(known: _PeerFailures, took: float) -> float:
    """Seconds until the next try."""
    longest = max(MAX_BACK_OFF_SECONDS, MAX_WAIT_IN_FAILURES * took)
    return max(BACK_OFF_SECONDS, MIN_WAIT_IN_FAILURES * took, min(2 * known.wait, longest))


class FailedSessions(set):
    """The engine's failed sessions since 0.5.20: one that is to be tried again is not among them.

    The engine adds a session at its first failure, and removes it when it registers or answers a
    probe. Its workers ask whether a session is in here right before they write to it; those of one
    session share a queue, so that one of them tries it.
    """

    def __init__(self):
        super().__init__()
        self._back_off = PeerBackoff(in_a_row=1)
        self._asked = threading.local()  # when each worker began what may fail

    def __contains__(self, session: str) -> bool:
        self._asked.at = time.monotonic()
        return super().__contains__(session) and self._back_off.retry_in(session) > 0

    def add(self, session: str) -> None:
        """A transfer to it failed."""
        super().add(session)
        now = time.monotonic()
        self._back_off.note_failure(session, now - getattr(self._asked, "at", now))

    def discard(self, session: str) -> None:
        """It has registered, or answers."""
        super().discard(session)
        self._back_off.reset(session)

    def reset(self, sessions: Iterable[str]) -> None:
        """Transfers to these have succeeded: their next failure is a first one."""
        for session in list(sessions):
            self.discard(session)
