"""NIXL's notifications: what they contain, and when a room has received all of them.

    {room}_kv_{chunk}_{is last: 0|1}_{sender}     {room}_state_{sender}
    {room}_aux_{sender}                           {room}_failed_{sender}_{reason}
    {room}_digests_{sender}_{bytes}

Stock peers write and read the first three (they neither write nor read the sender of aux) and skip
the others. A sender's number is unique over TP x PP on our prefill, but only the PP rank on a stock
one, so arrivals are counted by the NIXL agent that sends them, which is unique on both.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Optional


@dataclass(frozen=True)
class Notification:
    """One notification.

    Attributes:
        kind: `kv`, `aux`, `state`, `failed` or `digests`.
        chunk: Number of the KV chunk, from 0.
        digests: Encoded `RoomDigests`.
    """

    room: int
    kind: str
    chunk: int = 0
    is_last: bool = False
    reason: str = ""
    digests: bytes = b""


def format_notification(notification: Notification, sender: int) -> bytes:
    """Encodes a notification; `sender` must be unique over the prefill server's ranks."""
    if notification.kind == "kv":
        tail = f"{notification.chunk}_{int(notification.is_last)}_{sender}"
    elif notification.kind == "failed":
        tail = f"{sender}_{notification.reason}"
    else:
        tail = f"{sender}"
    if notification.kind == "digests":
        tail += "_"
    head = f"{notification.room}_{notification.kind}_{tail}".encode("ascii", "backslashreplace")
    return head + notification.digests


def parse_notification(message: bytes) -> Optional[Notification]:
    """Decodes a notification; returns None for one that no release sends."""
    parts = message.decode("ascii", "replace").split("_", 4)
    try:
        room, kind = int(parts[0]), parts[1]
        if kind == "digests":
            return Notification(room, kind, digests=message.split(b"_", 3)[3])
        if kind == "kv":
            return Notification(room, kind, chunk=int(parts[2]), is_last=bool(int(parts[3])))
        if kind == "failed":
            return Notification(room, kind, reason="_".join(parts[3:]))
    except (ValueError, IndexError):
        return None
    return Notification(room, kind) if kind in ("aux", "state") else None


@dataclass
class TransferStatus:
    """What has arrived for one room.

    Attributes:
        senders: Number of prefill ranks that must report; None until it is known.
        expects_state: Whether each of them sends state, too.
        expects_digests: Whether each of them sends digests of what it wrote.
    """

    senders: Optional[int] = None
    expects_state: bool = False
    expects_digests: bool = False
    _chunks: dict[Hashable, set[int]] = field(default_factory=dict)
    _expected: dict[Hashable, int] = field(default_factory=dict)
    _aux: set[Hashable] = field(default_factory=set)
    _state: set[Hashable] = field(default_factory=set)
    _failed: set[Hashable] = field(default_factory=set)
    _digests: set[Hashable] = field(default_factory=set)

    def add(self, sender: Hashable, notification: Notification) -> None:
        """Counts a notification; a repeated one changes nothing.

        Args:
            sender: Name of the NIXL agent that sent it.
        """
        if notification.kind == "kv":
            self._chunks.setdefault(sender, set()).add(notification.chunk)
            if notification.is_last:
                self._expected[sender] = notification.chunk + 1
        elif notification.kind == "aux":
            self._aux.add(sender)
        elif notification.kind == "state":
            self._state.add(sender)
        elif notification.kind == "failed":
            self._failed.add(sender)
        elif notification.kind == "digests":
            self._digests.add(sender)

    @property
    def is_failing(self) -> bool:
        """Whether a sender reported a failure; others may still be writing."""
        return bool(self._failed)

    def is_failed(self) -> bool:
        """Whether the room failed and no sender writes any more."""
        return self.is_failing and len(self._failed | self._complete()) >= (self.senders or 0)

    def is_done(self) -> bool:
        """Whether the room failed, or everything that each sender must send has arrived."""
        if self.is_failed():
            return True
        return self.senders is not None and len(self._complete()) >= self.senders

    def _complete(self) -> set[Hashable]:
        """Returns senders whose chunks, aux, and state and digests if expected, have arrived."""
        whole = {who for who, count in self._expected.items() if len(self._chunks[who]) == count}
        state = self._state if self.expects_state else whole
        return whole & self._aux & state & (self._digests if self.expects_digests else whole)
