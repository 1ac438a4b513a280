"""NIXL's notifications: what they contain, and when a room has received all of them.

    {room}_kv_{chunk}_{is last: 0|1}_{sender}     {room}_state_{sender}
    the same and _{first page}-{end}
    {room}_aux_{sender}                           {room}_failed_{sender}_{reason}
    {room}_digests_{sender}_{bytes}

Stock peers write and read `kv` without pages, `state` and `aux` (they neither write nor read the
sender of aux) and skip the others. A sender's number is unique over TP x PP on our prefill, but
only the PP rank on a stock one, so arrivals are counted by the NIXL agent that sends them, which is
unique on both.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from .layout import LayoutError
from .permutation import Unit


@dataclass(frozen=True)
class Notification:
    """One notification.

    Attributes:
        kind: `kv`, `aux`, `state`, `failed` or `digests`.
        chunk: Number of the KV chunk, from 0.
        digests: Encoded `RoomDigests`.
        unit: The chunk's pages within the request, `[first, end)`, which decode interleaves; None
            if it interleaves nothing of the chunk.
    """

    room: int
    kind: str
    chunk: int = 0
    is_last: bool = False
    reason: str = ""
    digests: bytes = b""
    unit: Unit | None = None


def format_notification(notification: Notification, sender: int) -> bytes:
    """Encodes a notification; `sender` must be unique over the prefill server's ranks."""
    if notification.kind == "kv":
        tail = f"{notification.chunk}_{int(notification.is_last)}_{sender}"
        if notification.unit is not None:
            tail += "_{}-{}".format(*notification.unit)
    elif notification.kind == "failed":
        tail = f"{sender}_{notification.reason}"
    else:
        tail = f"{sender}"
    if notification.kind == "digests":
        tail += "_"
    head = f"{notification.room}_{notification.kind}_{tail}".encode("ascii", "backslashreplace")
    return head + notification.digests


def parse_notification(message: bytes) -> Notification | None:
    """Decodes a notification; returns None for one that no release sends."""
    parts = message.decode("ascii", "replace").split("_", 4)
    try:
        room, kind = int(parts[0]), parts[1]
        if kind == "digests":
            return Notification(room, kind, digests=message.split(b"_", 3)[3])
        if kind == "kv":
            pages = parts[4].partition("_")[2] if len(parts) > 4 else ""
            first, _, end = pages.partition("-")
            unit = (int(first), int(end)) if pages else None
            return Notification(room, kind, int(parts[2]), bool(int(parts[3])), unit=unit)
        if kind == "failed":
            return Notification(room, kind, reason="_".join(parts[3:]))
    except (ValueError, IndexError):
        return None
    return Notification(room, kind) if kind in ("aux", "state") else None


@dataclass
class _Arrived:
    """What one sender has sent for a room.

    Attributes:
        missing: The kinds of notification besides `kv` that must still arrive.
        chunks: Numbers of the KV chunks that have arrived.
        expected: Number of KV chunks in all; None until the last one has arrived.
        units: Those of the chunks that decode must interleave, by chunk.
    """

    missing: set[str]
    chunks: set[int] = field(default_factory=set)
    expected: int | None = None
    units: dict[int, Unit] = field(default_factory=dict)


@dataclass
class TransferStatus:
    """What has arrived for one room.

    Attributes:
        senders: Number of prefill ranks that must report; None until it is known.
        expects_state: Whether each of them sends state, too.
        expects_digests: Whether each of them sends digests of what it wrote.
    """

    senders: int | None = None
    expects_state: bool = False
    expects_digests: bool = False
    _arrived: dict[Hashable, _Arrived] = field(default_factory=dict)
    _complete: set[Hashable] = field(default_factory=set)
    _failed: set[Hashable] = field(default_factory=set)

    def add(self, sender: Hashable, notification: Notification) -> None:
        """Counts a notification; a repeated one changes nothing.

        Args:
            sender: Name of the NIXL agent that sent it.
        """
        if sender not in self._arrived:
            kinds = {"aux": True, "state": self.expects_state, "digests": self.expects_digests}
            self._arrived[sender] = _Arrived({kind for kind in kinds if kinds[kind]})
        arrived = self._arrived[sender]
        match notification.kind:
            case "failed":
                self._failed.add(sender)
            case "kv":
                arrived.chunks.add(notification.chunk)
                if notification.unit is not None:
                    arrived.units[notification.chunk] = notification.unit
                if notification.is_last:
                    arrived.expected = notification.chunk + 1
            case kind:
                arrived.missing.discard(kind)
        # Prefill sends one chunk too many if the room must not succeed, maybe after the last one.
        if not arrived.missing and len(arrived.chunks) == arrived.expected:
            self._complete.add(sender)
        else:
            self._complete.discard(sender)

    @property
    def units(self) -> list[list[Unit]]:
        """For each sender, which of the request's pages decode must interleave.

        Raises:
            LayoutError: A sender names the pages of only a part of its chunks.
        """
        for arrived in self._arrived.values():
            if arrived.units and arrived.units.keys() != arrived.chunks:
                raise LayoutError(
                    f"of chunks {sorted(arrived.chunks)} a prefill rank names the pages of only "
                    f"{sorted(arrived.units)}; send the request again"
                )
        return [list(arrived.units.values()) for arrived in self._arrived.values()]

    @property
    def is_failing(self) -> bool:
        """Whether a sender reported a failure; others may still be writing."""
        return bool(self._failed)

    def is_failed(self) -> bool:
        """Whether the room failed and no sender writes any more."""
        return self.is_failing and len(self._failed | self._complete) >= (self.senders or 0)

    def is_done(self) -> bool:
        """Whether the room failed, or everything that each sender must send has arrived."""
        is_complete = self.senders is not None and len(self._complete) >= self.senders
        return is_complete or self.is_failed()
