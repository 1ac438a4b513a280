"""Notes what happens to a rank's rooms; a thread of its own makes metrics and lines of it.

scheduler, workers,     append an event, which    a thread, every second    /metrics, and one line
threads for messages    waits for nothing         (`Rooms`, `Series`)       for each request
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any, Callable, Deque, Dict, Optional, Set, Tuple

from .files import SeriesFiles, metrics_folder
from .peers import PeerActivity
from .records import RecordFile, record_file, records_folder
from .rooms import Rooms
from .series import LOST_EVENTS, Series

logger = logging.getLogger(__name__)

WRITE_SECONDS = 1.0
# Events that may wait to be counted; further ones are lost, and that is counted.
MAX_EVENTS = 1 << 17
# A scheduler that is held up for longer has stalled.
STALL_SECONDS = 0.05

_numbers = itertools.count()


class TransferLog:
    """What happens to a rank's rooms. Each method appends an event, and can neither wait nor fail.

    Without `start`, nothing is kept: metrics are off, and no file for requests is set.
    """

    _events: Optional[Deque[Tuple]] = None

    @staticmethod
    def is_wanted(shows_metrics: bool = True) -> bool:
        """Returns whether `start` would start anything."""
        return bool(metrics_folder() and shows_metrics or records_folder())

    def start(
        self,
        side: str,
        rank: str,
        backend: str,
        is_first_rank: bool,
        peers: Callable[[], Dict[str, int]],
        shows_metrics: bool = True,
    ) -> None:
        """Starts to keep events, if the server shows metrics or is to write a line per request.

        Args:
            side, rank, backend, is_first_rank: See `Rooms`.
            peers: See `Rooms.tick`; called in the log's own thread.
            shows_metrics: Whether the server has `/metrics`, if the folder for it is known.

        Raises:
            OSError: `SGLANG_PD_REQUEST_LOG` names a folder that cannot be written.
        """
        if not self.is_wanted(shows_metrics):
            return
        folder = metrics_folder() if shows_metrics else ""
        records = record_file(side, rank)
        activity = PeerActivity(Path(folder) if folder else None)
        rooms = Rooms(side, rank, backend, is_first_rank, Series(activity))
        self._events = deque()
        writer = _Writer(self._events, rooms, peers, folder, records)
        threading.Thread(target=writer.run, name="pd-transfer-log", daemon=True).start()

    @property
    def is_on(self) -> bool:
        """Whether events are kept."""
        return self._events is not None

    def opened(self, room: int, rid: str, peer: str, tokens: int) -> None:
        """See `Rooms.opened`; the methods below likewise."""
        self._note(Rooms.opened, room, rid, peer, tokens)

    def entered(self, room: int, state: str) -> None:
        self._note(Rooms.entered, room, state)

    def requested(self, room: int, peer: str) -> None:
        self._note(Rooms.requested, room, peer)

    def sent(
        self,
        room: int,
        peer: str,
        kind: str,
        path: str,
        size: int,
        copies: int,
        seconds: Optional[float],
    ) -> None:
        self._note(Rooms.sent, room, peer, kind, path, size, copies, seconds)

    def failed(self, room: int, reason: str) -> None:
        self._note(Rooms.failed, room, reason)

    def rejected(self, room: int, reason: str) -> None:
        self._note(Rooms.rejected, room, reason)

    def dropped(self, room: int, reason: str) -> None:
        self._note(Rooms.dropped, room, reason)

    def ended(self, room: int, seconds_ago: float = 0.0) -> None:
        self._note(Rooms.ended, room, seconds_ago=seconds_ago)

    def malformed(self) -> None:
        self._note(Rooms.malformed)

    def verified(self, peer: str, differs: bool) -> None:
        self._note(Rooms.verified, peer, differs)

    def polled(self, where: str, since: float) -> None:
        """The scheduler has polled a queue's KV transfers since `since`, on the monotonic clock."""
        if self._events is not None:
            seconds = time.monotonic() - since
            if seconds > STALL_SECONDS:
                self._note(Rooms.stalled, where, seconds)

    def _note(self, happened: Callable[..., None], *facts: Any, seconds_ago: float = 0.0) -> None:
        events = self._events
        if events is not None:
            if len(events) < MAX_EVENTS:
                events.append((happened, time.monotonic() - seconds_ago, facts))
            elif len(events) < 2 * MAX_EVENTS:
                events.append((_lose, 0.0, ()))


def _lose(rooms: Rooms, at: float) -> None:
    rooms.series.add(LOST_EVENTS, 1, rooms.side)


class _Writer:
    def __init__(
        self,
        events: Deque[Tuple],
        rooms: Rooms,
        peers: Callable[[], Dict[str, int]],
        folder: str,
        records: Optional[RecordFile],
    ):
        self.events, self.rooms, self.peers, self.records = events, rooms, peers, records
        owner = f"sglang-pd-{os.getpid()}-{next(_numbers)}"
        self.files = SeriesFiles(Path(folder), owner) if folder else None
        self.changes = -1  # as of the last write of `files`
        self.failing: Set[str] = set()

    def run(self) -> None:
        while True:
            # All ranks write at the same time, so that their sums drop a peer at once.
            time.sleep(WRITE_SECONDS - time.time() % WRITE_SECONDS)
            self.write()

    def write(self) -> None:
        """Counts what has happened, and writes it. What fails is logged once, and tried again."""
        for step in (self._count, self._tick, self._write_records, self._write_series):
            name = step.__name__.strip("_")
            try:
                step()
                self.failing.discard(name)
            except Exception:
                if name not in self.failing:
                    logger.exception(f"Metrics of KV transfers: cannot {name.replace('_', ' ')}")
                self.failing.add(name)

    def _count(self) -> None:
        while self.events:
            happened, at, facts = self.events.popleft()
            happened(self.rooms, at, *facts)

    def _tick(self) -> None:
        self.rooms.tick(time.monotonic(), round(time.time()), self.peers)

    def _write_records(self) -> None:
        ended, self.rooms.records = self.rooms.records, []
        if self.records is None or not ended:
            return
        try:
            self.records.write(ended)
        except OSError:
            self.rooms.series.add(LOST_EVENTS, len(ended), self.rooms.side)
            raise

    def _write_series(self) -> None:
        series = self.rooms.series
        if self.files is not None and series.changes != self.changes:
            changes = series.changes
            self.files.write(series)
            self.changes = changes
