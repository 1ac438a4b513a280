"""Pauses transfers to decode ranks where they fail again and again.

Each transfer to a crashed rank costs the transfer engine's timeout, in one of few queues; but a
link that was cut for a moment must soon serve again. So the pauses begin short and double, and are
longer than the failures.
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

# Failures in a row before the first pause; its length, which doubles with each further failure.
FAILURES_IN_A_ROW = 2
BACK_OFF_SECONDS = 1.0
MAX_BACK_OFF_SECONDS = 30.0
# Lower limits, in durations of the last failure, for a pause and for the longest pause: a peer
# whose transfers fail by timeout leaves its queue to others most of the time.
MIN_WAIT_IN_FAILURES = 2
MAX_WAIT_IN_FAILURES = 10


@dataclass
class _PeerFailures:
    """One peer's failures in a row.

    Attributes:
        wait: Seconds of the last pause.
        retry_at: Time of the next attempt, on the monotonic clock; infinite during an attempt.
    """

    count: int = 0
    wait: float = 0.0
    retry_at: float = -math.inf


class PeerBackoff:
    """Counts each peer's failures in a row, from any thread.

    Args:
        in_a_row: Number of failures after which transfers to a peer pause.
    """

    def __init__(self, in_a_row: int = FAILURES_IN_A_ROW):
        self._in_a_row = in_a_row
        self._lock = threading.Lock()
        self._failures: Dict[str, _PeerFailures] = {}

    @contextlib.contextmanager
    def attempt(self, peer: str) -> Iterator[None]:
        """Encloses one transfer to a peer; after some failures, admits one at a time.

        Raises:
            RuntimeError: The peer failed a short time ago, or another transfer is trying it.
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
        """Counts a transfer to the peer that failed after `took` seconds."""
        with self._lock:
            known = self._failures.setdefault(peer, _PeerFailures())
            known.count += 1
            if known.count >= self._in_a_row:
                known.wait = _wait(known, took)
                known.retry_at = time.monotonic() + known.wait

    def reset(self, peer: str) -> None:
        """Clears the failures of a peer that answers, or that is a new process."""
        with self._lock:
            self._failures.pop(peer, None)

    def is_backing_off(self, peer: str) -> bool:
        """Whether transfers to the peer must pause, and then run one at a time."""
        known = self._failures.get(peer)
        return known is not None and known.count >= self._in_a_row

    def retry_in(self, peer: str) -> float:
        """Seconds until the next attempt: infinite during one, 0 or less if one may start."""
        known = self._failures.get(peer)
        return -math.inf if known is None else known.retry_at - time.monotonic()

    def _check(self, peer: str) -> None:
        with self._lock:
            if not self.is_backing_off(peer):
                return
            seconds, failures = self.retry_in(peer), self._failures[peer].count
            if seconds <= 0:
                self._failures[peer].retry_at = math.inf  # until this attempt ends
                return
        in_progress = seconds == math.inf
        when = "after the attempt in progress" if in_progress else f"in {math.ceil(seconds)} s"
        raise RuntimeError(
            f"the last {failures} transfers to decode session {peer} failed; retrying {when}"
        )


def _wait(known: _PeerFailures, took: float) -> float:
    """Returns the seconds until the next attempt."""
    longest = max(MAX_BACK_OFF_SECONDS, MAX_WAIT_IN_FAILURES * took)
    return max(BACK_OFF_SECONDS, MIN_WAIT_IN_FAILURES * took, min(2 * known.wait, longest))


class FailedSessions(set):
    """The failed sessions of engines from 0.5.18 on, without those to be tried again.

    The engine adds a session at its first failure, and removes it when it registers or answers a
    probe. Its workers check whether a session is in this set right before they write to it. A
    `PeerQueue` never gives two workers chunks of one session, so that only one tries it; with
    staging buffers two may.
    """

    _threads = threading.local()  # `sees_all`: see `showing_all`

    def __init__(self):
        super().__init__()
        self._back_off = PeerBackoff(in_a_row=1)
        # Of each worker: when it began its last transfer, and whether it had to leave that out.
        self._began = threading.local()

    @classmethod
    @contextlib.contextmanager
    def showing_all(cls) -> Iterator[None]:
        """Makes this thread also find the sessions that are to be tried again."""
        cls._threads.sees_all = True
        try:
            yield
        finally:
            cls._threads.sees_all = False

    def __contains__(self, session: str) -> bool:
        if getattr(self._threads, "sees_all", False):
            return super().__contains__(session)
        self._began.at = time.monotonic()
        is_pausing = super().__contains__(session) and self._back_off.retry_in(session) > 0
        self._began.is_pausing = is_pausing
        return is_pausing

    def has_refused(self) -> bool:
        """Returns whether the last session that this worker looked up pauses: it wrote nothing."""
        return getattr(self._began, "is_pausing", False)

    def add(self, session: str) -> None:
        """Adds a session to which a transfer failed."""
        super().add(session)
        now = time.monotonic()
        self._back_off.note_failure(session, now - getattr(self._began, "at", now))

    def discard(self, session: str) -> None:
        """Removes a session that has registered, or that answers."""
        super().discard(session)
        self._back_off.reset(session)

    def reset(self, sessions: Iterable[str]) -> None:
        """Removes sessions after successful transfers: their next failure counts as the first."""
        for session in list(sessions):
            self.discard(session)
