"""Prefill: notifies decode of requests that ended here, even if decode requests them only later.

decode requests, prefill's client leaves    the engine notifies nobody: we notify decode
prefill's client leaves, decode requests    nobody would answer: we notify decode when it requests
                                            the room, or once the scheduler sees the client leave
decode requests and aborts, no request      the room stays in the engine's tables: we keep the last
                                            4096; also if decode is silent and cannot abort
a request is aborted before it is sent      the room stays there forever: we drop it with the abort

`RoomFailures` decides, and `pd.prefill_manager` acts.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from weakref import WeakValueDictionary

from sglang.srt.disaggregation.base.conn import BaseKVManager, KVPoll
from sglang.srt.disaggregation.pd.per_instance import PerInstance

logger = logging.getLogger(__name__)

# How many rooms to remember of requests that failed here, and how many without a request.
MAX_FAILED_ROOMS = 4096
ABORTED = "Aborted on prefill"
ABORTED_BY_DECODE = "Aborted by decode"
FAILED_ELSEWHERE = "the request failed on another rank, whose log may have the reason"
# How many decode ranks to remember per room as notified, or as having aborted; a fleet has fewer.
MAX_NOTIFIED_RANKS = 1024
# How many rooms to remember that may still be written to; a rank has fewer open.
MAX_POISONED_ROOMS = 1 << 16
ABORT = b"ABORT"

# A decode rank's IP address, and the port at which it reads messages.
Endpoint = tuple[str, int]


@dataclass
class FailedRoom:
    """Why a request failed here, and the decode ranks that know or are being notified."""

    reason: str
    notified: set[Endpoint]


class RoomFailures:
    """Which rooms failed or have no request, and which decode ranks to notify; it sends nothing.

    Shared by the scheduler, the thread that reads messages, and the transfer workers. On decode it
    stays empty.
    """

    def __init__(self):
        self.lock = threading.RLock()
        # The room that a decode rank requests, while the engine stores the request, and what to do
        # once it is stored: a room dropped halfway would be kept forever, or crash that thread.
        self.message_room: int | None = None
        self.postponed: list[Callable[[], None]] = []
        # Rooms of garbage-collected senders; collection may happen any time, under any lock.
        self.collected_rooms: deque[tuple[int, set[Endpoint]]] = deque()
        self.senders: WeakValueDictionary[int, NotifyingSender] = WeakValueDictionary()
        self.failed_rooms: OrderedDict[int, FailedRoom] = OrderedDict()
        # Rooms without a request, and the decode ranks that aborted each of them.
        self.rooms_without_sender: OrderedDict[int, set[Endpoint]] = OrderedDict()
        self.poisoned_rooms: OrderedDict[int, None] = OrderedDict()

    def register_sender(self, room: int, sender: NotifyingSender) -> None:
        """Registers a request's sender, and forgets the failure of an earlier one in its room."""
        sender.finalizer = weakref.finalize(
            sender, self.collected_rooms.append, (room, sender.notified)
        )
        sender.finalizer.atexit = False
        with self.lock:
            self.senders[room] = sender
            self.failed_rooms.pop(room, None)
            sender.notified.update(self.rooms_without_sender.pop(room, ()))

    def unregister_sender(self, room: int, sender: NotifyingSender) -> None:
        """Unregisters a sender that is cleared; it may live on, while stages wait for a batch."""
        with self.lock:
            if self.senders.get(room) is sender:
                del self.senders[room]

    def take_collected(self) -> Iterator[tuple[int, set[Endpoint]]]:
        """Yields rooms of garbage-collected senders, and the decode ranks that each notified."""
        with contextlib.suppress(IndexError):  # none is left
            while True:
                yield self.collected_rooms.popleft()

    def run_when_stored(self, room: int, act: Callable[[], None]) -> None:
        """Runs `act` under `lock`: now, or once the message being stored for `room` is."""
        with self.lock:
            if self.message_room == room:
                self.postponed.append(act)
            else:
                act()

    def begin_message(self, room: int, decode: Endpoint | None) -> str | None:
        """Returns why the room that a decode rank requests has failed, if it must be notified.

        A rank that requests the room again after being notified has a new request in it. On None,
        the engine stores the request, and what ends the room waits for `end_message`.

        Args:
            decode: The rank; None if it is sent nothing, and is not notified.
        """
        with self.lock:
            known = None if decode is None else self.failed_rooms.get(room)
            if known is not None and decode not in known.notified:
                _add(known.notified, decode)
                return known.reason
            if decode is not None:
                self.failed_rooms.pop(room, None)
            self.message_room = room
            return None

    def end_message(self) -> None:
        """Runs what was postponed until the engine had stored the last message."""
        with self.lock:
            self.message_room, (acts, self.postponed) = None, (self.postponed, [])
            for act in acts:
                try:
                    act()
                except Exception:  # the thread that reads messages must not end
                    logger.exception("A room that has ended could not be dropped")

    def record_failed_room(self, room: int, reason: str, notified: set[Endpoint]) -> None:
        """Records that a request failed; `notified` decode ranks know or are being notified."""
        with self.lock:
            self.senders.pop(room, None)
            self.failed_rooms[room] = FailedRoom(reason, notified)
            if len(self.failed_rooms) > MAX_FAILED_ROOMS:
                self.failed_rooms.popitem(last=False)

    def take_unnotified(self, room: int, requested: list[Endpoint]) -> list[Endpoint]:
        """Returns which decode ranks that requested a failed room to notify, each of them once."""
        with self.lock:
            known = self.failed_rooms.get(room)
            if known is None:
                return []
            targets = [to for to in requested if to not in known.notified]
            known.notified.update(targets)
            return targets

    def note_notified(self, room: int, targets: list[Endpoint]) -> None:
        """Notes decode ranks that are being notified how the room's request ended."""
        with self.lock:
            sender = self.senders.get(room)
            if sender is not None:
                sender.notified.update(targets)
                return
            for collected, notified in self.collected_rooms.copy():  # a collection may add one
                if collected == room:
                    notified.update(targets)

    def note_abort(self, room: int, decode: Endpoint) -> None:
        """Notes that a decode rank aborts the room, and is not to be notified of the failure."""
        with self.lock:
            known = self.senders.get(room) or self.failed_rooms.get(room)
            if known is not None:
                _add(known.notified, decode)

    def keep_without_sender(self, room: int, aborted_by: Endpoint | None) -> int | None:
        """Keeps a room unless it has a sender; returns which room to drop for it, if any."""
        with self.lock:
            if room in self.senders:
                return None
            known = self.rooms_without_sender.setdefault(room, set())
            if aborted_by is not None:
                _add(known, aborted_by)
            if len(self.rooms_without_sender) <= MAX_FAILED_ROOMS:
                return None
            return self.rooms_without_sender.popitem(last=False)[0]

    def keep_poisoned(self, room: int) -> int | None:
        """Keeps a room that may still be written to; returns which to forget for it, if any."""
        with self.lock:
            self.poisoned_rooms[room] = None
            self.poisoned_rooms.move_to_end(room)
            if len(self.poisoned_rooms) <= MAX_POISONED_ROOMS:
                return None
            return self.poisoned_rooms.popitem(last=False)[0]


def _add(notified: set[Endpoint], endpoint: Endpoint) -> None:
    """Adds a decode rank, up to `MAX_NOTIFIED_RANKS`: a peer may claim any port."""
    if len(notified) < MAX_NOTIFIED_RANKS:
        notified.add(endpoint)


def parse_abort(msg: list[bytes]) -> tuple[int | None, Endpoint | None, int | None]:
    """Returns an ABORT's room, decode rank, and what to send back, see `abort_message`.

    None for what it lacks or what is invalid, which the engine logs.
    """
    room = endpoint = generation = None
    if msg and msg[0] == ABORT:
        with contextlib.suppress(IndexError, ValueError):
            room = int(msg[1])
            endpoint = (msg[2].decode("ascii"), int(msg[3]))
            generation = int(msg[4])
    return room, endpoint, generation


def abort_message(room: int, decode: Endpoint, generation: int | None = None) -> list[bytes]:
    """Returns the frames with which a decode rank aborts a room on prefill.

    Args:
        generation: What prefill is to send back once it writes no more; None for no answer.
    """
    ip, port = decode
    frames = [ABORT, b"%d" % room, ip.encode("ascii"), b"%d" % port]
    return frames if generation is None else [*frames, b"%d" % generation]


class NotifyingSender:
    """Base of a prefill rank's KV sender, before the engine's: notifies decode of failures."""

    is_cleared = False
    reason: str | None = None  # why it failed
    needs_no_reason = False  # whether nobody will ask for the reason
    finalizer: weakref.finalize | None = None  # runs if it is collected without being cleared
    notified: set[Endpoint] = PerInstance(set)  # decode ranks that know how it ended

    def __init__(
        self, mgr: BaseKVManager, bootstrap_addr: str, bootstrap_room: int, *more, **options
    ):
        if hasattr(mgr, "failures"):  # Mori's manager has none
            mgr.drop_collected_rooms()
            mgr.failures.register_sender(bootstrap_room, self)
        super().__init__(mgr, bootstrap_addr, bootstrap_room, *more, **options)

    def abort(self) -> None:
        """Aborts the request, notifies the decode ranks that requested it, and drops the room.

        Extends the engine's, which drops it when it polls the request again, perhaps never.
        """
        if self.is_cleared:
            return
        super().abort()
        self.notify_failed()
        if self._notifies_decode():
            self.clear()
            self._drop_reason()

    def _check_bootstrap_timeout(self) -> KVPoll | None:
        """Checks for a time-out. Extends the engine's: notifies decode ranks that requested it."""
        status = super()._check_bootstrap_timeout()
        if status is not None:
            self.notify_failed()
        return status

    def get_max_transfer_tokens(self) -> int | None:
        """Returns how many tokens a chunk may have; None without a limit.

        Extends the engine's: an unregistered decode rank fails its room later, not here.
        """
        try:
            return super().get_max_transfer_tokens()
        except (KeyError, RuntimeError):  # the latter if another rank requests the room meanwhile
            return self.kv_mgr._dcp_pack_max_tokens

    def failure_exception(self):
        """Raises the failure.

        Replaces the engine's, which would take the reason of the room's next request, if that has
        failed meanwhile.
        """
        if not self._notifies_decode():
            return super().failure_exception()
        from sglang.srt.disaggregation.common.conn import KVTransferError  # it imports this module

        self.conclude_state = KVPoll.Failed
        self.clear()
        self._drop_reason()
        self.trace_ctx.trace_req_finish()
        reason = self.reason or FAILED_ELSEWHERE
        raise KVTransferError(self.bootstrap_room, reason, is_from_another_rank=self.reason is None)

    def _drop_reason(self) -> None:
        """Drops the room's reason, which nobody asks for any more, once the room is closed."""
        self.needs_no_reason = True
        if self.bootstrap_room not in self.kv_mgr.request_status:
            self.kv_mgr.drop_reason(self.bootstrap_room)

    def _notifies_decode(self) -> bool:
        """False over Mori, and if the engine notifies (allocation policy `prefill_complete`)."""
        return hasattr(self.kv_mgr, "failures") and self.kv_mgr.deferred_bootstrap is None

    def notify_failed(self) -> None:
        """Notifies decode of the failure, if decode keeps its pages until all writes are over.

        Skips ranks that have already been notified how the request ended, even of its success.
        """
        manager, room = self.kv_mgr, self.bootstrap_room
        if self._notifies_decode() and manager.is_release_safe(room):
            targets = [to for to in manager._room_notify_targets(room) if to not in self.notified]
            reason = manager.failure_records.get(room, "")
            manager.conclude_failure(bootstrap_room=room, failure_reason=reason, targets=targets)

    def clear(self) -> None:
        """Clears the room, once.

        Extends the engine's: if the room failed, notifies the decode ranks that have requested it,
        and those that still will.
        """
        if self.is_cleared:  # the room may be another request's
            return
        self.is_cleared = True
        if self.finalizer is not None:  # it could run later, when the room is another request's
            self.finalizer.detach()
        manager, room = self.kv_mgr, self.bootstrap_room
        if hasattr(manager, "failures") and manager.failures.senders.get(room, self) is self:
            if self.conclude_state == KVPoll.Failed:
                manager.transfer_log.dropped(room, "")  # maybe only another rank knows why
            else:
                manager.transfer_log.ended(room)
        if self.conclude_state == KVPoll.Failed and self._notifies_decode():
            self.reason = manager.failure_records.get(room)
            manager.failures.run_when_stored(room, self._clear_failed)
        else:
            self._drop_room()
            if hasattr(manager, "failures"):
                manager.failures.unregister_sender(room, self)

    def _clear_failed(self) -> None:
        manager, room = self.kv_mgr, self.bootstrap_room
        if manager.failures.senders.get(room, self) is not self:  # another request has the room
            return
        reason = self.reason or FAILED_ELSEWHERE
        manager.fail_room(room, reason, self.notified)
        self._drop_room()
        if self.needs_no_reason:
            manager.drop_reason(room)

    def _drop_room(self) -> None:
        """Drops the engine's entries for the room, and its pages for digests."""
        manager, room = self.kv_mgr, self.bootstrap_room
        with manager.status_lock:
            super().clear()
        if room not in manager.request_status:  # else another request has it
            manager.sent_pages.pop(room, None)
