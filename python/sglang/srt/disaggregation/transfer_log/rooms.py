"""Follows each room of a rank through its states, from what the rank notes.

prefill   bootstrapping   until all of its decode ranks have requested it
          prefilling      until the first byte is given to the transport
          sending         until the last byte is written
decode    allocating      until this rank requests it from prefill
          waiting         until the first byte has arrived, as far as the transport tells
          receiving       until the last byte has arrived
          interleaving    until its KV heads are interleaved, if they were sent packed
          queued          until it is scheduled
"""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Callable, Dict, List, Optional, Set

from .failures import (
    ABORTED_BY_CLIENT,
    ABORTED_BY_PEER,
    ANOTHER_RANK,
    PEER_LOST,
    failure_kind,
)
from .records import RequestRecord
from .series import (
    BYTES,
    COPIES,
    LOST_EVENTS,
    MALFORMED,
    MISMATCHED,
    PEERS,
    REQUESTS,
    ROOM_SECONDS,
    ROOMS,
    STALL_SECONDS,
    STALLS,
    TRANSFERS,
    VERIFIED,
    Series,
)

STATES = {
    "prefill": ("bootstrapping", "prefilling", "sending"),
    "decode": ("allocating", "waiting", "receiving", "interleaving", "queued"),
}
# The queues that the scheduler polls for KV transfers.
QUEUES = {"prefill": ("bootstrap", "inflight"), "decode": ("prealloc", "transfer")}
# Open rooms that are followed; a rank has fewer.
MAX_ROOMS = 1 << 16
# A failed room ends so long after its failure if nothing else ends it.
FAILED_SECONDS = 60.0
# No request stays longer in one state: each has a time-out of its own, of minutes.
SILENT_SECONDS = 3600.0
UNKNOWN_PEER = "unknown"
# Kinds of a known reason and of a later one that replaces it.
_GIVES_WAY = {(ABORTED_BY_CLIENT, PEER_LOST), (ANOTHER_RANK, ABORTED_BY_CLIENT)}
ROOM_TAKEN = "bootstrap_room is already in use by another request"


@dataclass
class _Room:
    opened: float  # since the epoch
    state: str
    since: float
    peer: str = ""
    rid: str = ""
    tokens: int = 0
    bytes: int = 0
    copies: int = 0
    paths: Set[str] = field(default_factory=set)
    seconds: Dict[str, float] = field(default_factory=dict)
    failed: float = 0.0  # when
    reason: str = ""

    def is_over(self, now: float) -> bool:
        """Whether the room has ended, though nothing has said so."""
        if self.failed:
            return now - self.failed > FAILED_SECONDS
        return now - self.since > SILENT_SECONDS


class Rooms:
    """A rank's open rooms. One thread calls it, with each event's time on the monotonic clock."""

    def __init__(self, side: str, rank: str, backend: str, is_first_rank: bool, series: Series):
        """Follows the rooms of a rank.

        Args:
            side: `prefill` or `decode`.
            rank: Such as `DP 0 TP 1/2 PP 0/1`.
            backend: `nixl`, `mooncake` or `ascend`.
            is_first_rank: Whether it counts requests, of which other ranks have the same.
        """
        self.side, self.rank, self.backend = side, rank, backend
        self.is_first_rank = is_first_rank
        self.series = series
        self.rooms: OrderedDict[int, _Room] = OrderedDict()
        self.records: List[RequestRecord] = []  # of rooms that have ended, to be written
        self._epoch = time.time() - time.monotonic()
        for state in STATES[side] if is_first_rank else ():
            series.set(ROOMS, 0, side, state)
        # Prometheus sees no increase of a counter that begins above 0.
        for metric in (MALFORMED, LOST_EVENTS):
            series.add(metric, 0, side)
        for queue in QUEUES[side]:
            series.add(STALLS, 0, side, queue)
            series.add(STALL_SECONDS, 0, side, queue)

    def opened(self, at: float, room: int, rid: str, peer: str, tokens: int) -> None:
        """The rank has got a request; `peer` is the other server, if it is known.

        If another request still has the room, which clients choose, both count as rejected: of
        which of the two later events are, nobody knows.
        """
        known = self.rooms.get(room)
        is_over = known is None or known.failed or known.state == "queued"
        is_taken = not is_over and known.rid != rid
        if is_taken:
            self.failed(at, room, ROOM_TAKEN)
        self._end(at, room)
        self._open(at, room, rid, peer, tokens)
        if is_taken:
            self.failed(at, room, ROOM_TAKEN)

    def entered(self, at: float, room: int, state: str) -> None:
        """The room enters a later state; one that it has passed changes nothing."""
        known = self.rooms.get(room)
        states = STATES[self.side]
        if known is None or known.failed:
            return
        if states.index(state) > states.index(known.state):
            self._leave(known, at)
            known.state, known.since = state, at
            self._count(state, 1)

    def requested(self, at: float, room: int, peer: str) -> None:
        """Decode requests the room from prefill; `peer` is the other server."""
        self.entered(at, room, STATES[self.side][1])
        if room in self.rooms:
            self.rooms[room].peer = peer

    def sent(
        self,
        at: float,
        room: int,
        peer: str,
        kind: str,
        path: str,
        size: int,
        copies: int,
        seconds: Optional[float],
    ) -> None:
        """Copies to a decode server are written, or have failed.

        Args:
            kind: `kv`, `state` or `aux`.
            path: `whole`, `slices`, `packed` or `engine`.
            size: Their bytes.
            seconds: Since they were given to the transport; None if that failed.
        """
        labels = (self.backend, self.series.peer(peer or UNKNOWN_PEER), kind, path)
        self.series.add(BYTES, size, *labels)
        self.series.add(COPIES, copies, *labels)
        if seconds is not None:
            self.series.observe(TRANSFERS, seconds, *labels)
        self.entered(at - (seconds or 0.0), room, "sending")
        known = self.rooms.get(room)
        if known is not None:
            known.peer = peer or known.peer
            known.bytes += size
            known.copies += copies
            if kind == "kv":
                known.paths.add(path)

    def failed(self, at: float, room: int, reason: str) -> None:
        """The room has failed; the first reason counts.

        But the engine aborts the requests of a prefill server that does not answer as if their
        clients had left, and only then is it known why; and a rank may learn that another one has
        aborted before it sees itself that the client has left.
        """
        known = self.rooms.get(room)
        if known is None:
            return
        known.failed = known.failed or at
        kinds = (failure_kind(known.reason), failure_kind(reason))
        if not known.reason or kinds in _GIVES_WAY:
            known.reason = reason

    def rejected(self, at: float, room: int, reason: str) -> None:
        """A request was refused before anything of it was open."""
        if room not in self.rooms:
            self._open(at, room)
        self.failed(at, room, reason)
        self._end(at, room)

    def dropped(self, at: float, room: int, reason: str) -> None:
        """The room is over without success, for this reason unless it has failed before."""
        known = self.rooms.get(room)
        if known is not None and not known.failed:
            self.failed(at, room, reason)
        self._end(at, room)

    def ended(self, at: float, room: int) -> None:
        """The room is over; it has succeeded unless it has failed before."""
        self._end(at, room)

    def malformed(self, at: float) -> None:
        """A message was dropped, because it cannot be read."""
        self.series.add(MALFORMED, 1, self.side)

    def verified(self, at: float, peer: str, differs: bool) -> None:
        """A request's KV was compared with what a prefill server has."""
        label = self.series.peer(peer or UNKNOWN_PEER)
        self.series.add(VERIFIED, 1, label)
        self.series.add(MISMATCHED, differs, label)

    def stalled(self, at: float, where: str, seconds: float) -> None:
        """KV transfer has held up the scheduler."""
        self.series.add(STALLS, 1, self.side, where)
        self.series.add(STALL_SECONDS, seconds, self.side, where)

    def tick(self, now: float, second: float, peers: Callable[[], Dict[str, int]]) -> None:
        """Ends rooms that nothing has ended, and updates what nothing notes; call it regularly.

        Args:
            now: On the monotonic clock.
            second: Since the epoch, the same on all ranks.
            peers: Returns how many servers this rank knows, by how it serves them.

        Raises:
            OSError: See `PeerActivity.note`.
        """
        for room in [one for one, known in self.rooms.items() if known.is_over(now)]:
            self.failed(now, room, "")
            self._end(now, room)
        self.series.expire(second)
        for kind, count in peers().items() if self.is_first_rank else ():
            self.series.set(PEERS, count, self.side, kind)

    def _open(self, at: float, room: int, rid: str = "", peer: str = "", tokens: int = 0) -> None:
        state = STATES[self.side][0]
        self.rooms[room] = _Room(self._epoch + at, state, at, peer, rid, tokens)
        self._count(state, 1)
        if len(self.rooms) > MAX_ROOMS:
            oldest = next(iter(self.rooms))
            self.failed(at, oldest, "too many requests are open")
            self._end(at, oldest)

    def _leave(self, known: _Room, at: float) -> None:
        known.seconds[known.state] = max(0.0, at - known.since)  # threads' events may overtake
        self._count(known.state, -1)

    def _count(self, state: str, change: int) -> None:
        if self.is_first_rank:
            self.series.add(ROOMS, change, self.side, state)

    def _end(self, at: float, room: int) -> None:
        known = self.rooms.pop(room, None)
        if known is None:
            return
        self._leave(known, known.failed or at)
        kind = failure_kind(known.reason) if known.failed else ""
        ended = "failed" if known.failed else "success"
        peer = self.series.peer(known.peer or UNKNOWN_PEER)
        if self.is_first_rank:
            is_aborted = kind in (ABORTED_BY_CLIENT, ABORTED_BY_PEER)
            self.series.add(REQUESTS, 1, self.side, peer, "aborted" if is_aborted else ended)
            for state, seconds in known.seconds.items():
                self.series.observe(ROOM_SECONDS, seconds, self.side, state)
        if kind not in ("", ANOTHER_RANK):
            self.series.add_failure(self._epoch + at, self.side, peer, kind)
        self.records.append(
            RequestRecord(
                self.side,
                self.rank,
                room,
                known.opened,
                known.rid,
                known.peer,
                known.tokens,
                known.bytes,
                known.copies,
                sorted(known.paths),
                known.seconds,
                ended,
                kind,
                known.reason,
            )
        )
