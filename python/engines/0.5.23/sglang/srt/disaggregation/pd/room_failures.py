"""Prefill: decode hears of requests that have ended here, also if it asks for them only then.

decode asks, prefill's client leaves     the engine tells nobody: decode is told
prefill's client leaves, decode asks     nobody would answer: decode is told when it asks, or, if
                                         that was before the scheduler looked, then
decode asks and gives up, no request     its room stays in the engine's tables: so many at most;
                                         also where decode is silent, and cannot give it up
a request is aborted before it is sent   the same, for ever: it is dropped with the abort
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Deque, List, Optional, Set, Tuple
from weakref import WeakValueDictionary

from sglang.srt.disaggregation.base.conn import KVPoll

# Rooms that are remembered: of requests that failed here, and given up before a request came.
MAX_FAILED_ROOMS = 4096
ABORTED = "Aborted on prefill"
# Decode ranks that are remembered for having heard of one room, or given it up; a fleet has fewer.
MAX_NOTIFIED_RANKS = 1024
# Rooms that are remembered for having been written to without a known end; a rank has fewer open.
MAX_POISONED_ROOMS = 1 << 16
ABORT = b"ABORT"
# How long one waits for the thread that reads messages while it keeps what decode asks for; and
# where that is the room that ends: dropped half way, it would be kept for ever or end that thread.
MESSAGE_LOCK_SECONDS = 0.1
SAME_ROOM_LOCK_SECONDS = 2.0

Endpoint = Tuple[str, int]


@dataclass
class FailedRoom:
    """Why a request failed here, and the decode ranks that know."""

    reason: str
    notified: Set[Endpoint]


class RoomFailures:
    """A prefill rank's KV manager, over the engine's. Decode's never fills it."""

    def __new__(cls, *args, **kwargs):
        self = super().__new__(cls)
        # Of the scheduler, the thread that reads messages, and those that write.
        self.rooms_lock = threading.RLock()
        # Held while the engine keeps what decode asks for; no request is noted as ended meanwhile.
        self.message_lock = threading.Lock()
        self.holds_message_lock = False
        self.message_room: Optional[int] = None
        self.message_lock_timeout = MESSAGE_LOCK_SECONDS
        # Rooms of senders that were collected, which may be at any time and within any lock.
        self.collected_rooms: Deque[Tuple[int, Set[Endpoint]]] = deque()
        self.senders: WeakValueDictionary[int, Any] = WeakValueDictionary()
        self.failed_rooms: OrderedDict[int, FailedRoom] = OrderedDict()
        # Rooms without a request, and the decode ranks that gave each of them up.
        self.rooms_without_sender: OrderedDict[int, Set[Endpoint]] = OrderedDict()
        self.poisoned_rooms: OrderedDict[int, None] = OrderedDict()
        return self

    def register_sender(self, room: int, sender: Any) -> None:
        """A request has come; what is known of its room was another's."""
        self.drop_collected_rooms()
        sender.notified = set()
        sender.finalizer = weakref.finalize(
            sender, self.collected_rooms.append, (room, sender.notified)
        )
        sender.finalizer.atexit = False
        with self.rooms_lock:
            self.senders[room] = sender
            self.failed_rooms.pop(room, None)
            sender.notified.update(self.rooms_without_sender.pop(room, ()))

    def record_failed_room(self, room: int, reason: str, notified: Set[Endpoint]) -> None:
        """A request has failed; these decode ranks know, or are being told."""
        with self._between_messages(room), self.rooms_lock:
            self._record_failed_room(room, reason, notified)

    def _record_failed_room(self, room: int, reason: str, notified: Set[Endpoint]) -> None:
        self.senders.pop(room, None)
        self.failed_rooms[room] = FailedRoom(reason, notified)
        if len(self.failed_rooms) > MAX_FAILED_ROOMS:
            self.failed_rooms.popitem(last=False)

    def refuse(self, room: int, reason: str) -> None:
        """A request has failed that never had a sender: decode ranks are told, or when they ask."""
        self.drop_collected_rooms()
        with self._between_messages(room), self.rooms_lock:
            if room in self.senders:  # another of that number
                return
            self._record_failed_room(room, reason, set())
            self.notify_waiting_decode_ranks(room)
            self.rooms_without_sender.pop(room, None)
            self._drop_room(room)

    def notify_waiting_decode_ranks(self, room: int) -> None:
        """Decode ranks that asked for an ended request in time, and do not know that it has."""
        with self.rooms_lock:
            known = self.failed_rooms.get(room)
            if known is None:
                return
            targets = [to for to in self._room_notify_targets(room) if to not in known.notified]
            known.notified.update(targets)
        if self.is_release_safe(room):
            self._send_failed_status(room, targets, known.reason)

    def is_release_safe(self, room: int) -> bool:
        """Whether decode may hear that a room failed: it frees pages that nothing writes to.

        Without deferred release it would not wait for that, and of a write that did not settle
        nobody knows.
        """
        return (
            self.enable_deferred_decode_kv_release and room not in self._deferred_ack_poisoned_rooms
        )

    def poison_deferred_ack_room(self, room: int) -> None:
        """As the engine's, which forgets a room only when its number comes again."""
        super().poison_deferred_ack_room(room)
        with self.rooms_lock:
            self.poisoned_rooms[room] = None
            self.poisoned_rooms.move_to_end(room)
            if len(self.poisoned_rooms) > MAX_POISONED_ROOMS:
                oldest, _ = self.poisoned_rooms.popitem(last=False)
                self._deferred_ack_poisoned_rooms.discard(oldest)
                self._staging_outstanding.pop(oldest, None)
        if room not in self.request_status:
            self.drop_reason(room)

    def drop_collected_rooms(self) -> None:
        """Rooms of requests that are gone, and that nobody has cleared.

        Before anything else is noted: what comes of such a room is another request's.
        """
        while self.collected_rooms:
            try:
                room, notified = self.collected_rooms.popleft()
            except IndexError:  # another thread was quicker
                return
            self._drop_collected_room(room, notified)

    def _drop_collected_room(self, room: int, notified: Set[Endpoint]) -> None:
        with self._between_messages(room), self.rooms_lock:
            if room in self.senders:  # another of that number
                return
            if self.request_status.get(room) == KVPoll.Failed:
                self._record_failed_room(room, self.failure_records.get(room, ABORTED), notified)
                self.notify_waiting_decode_ranks(room)
            self._drop_room(room)
            self._drop_chunk_count(room)

    def _drop_chunk_count(self, room: int) -> None:
        """Of chunks of a room that is over, once none is left."""
        if room not in self.request_status and self._staging_outstanding.get(room, 1) <= 0:
            self._staging_outstanding.pop(room, None)

    def _drop_room(self, room: int) -> None:
        with self.status_lock:
            for table in (self.request_status, self.transfer_infos, self.req_to_decode_prefix_len):
                table.pop(room, None)
        self.drop_reason(room)  # after its state, with which another thread could record it

    def conclude_transfer(
        self,
        *,
        bootstrap_room: int,
        status: KVPoll,
        targets: Optional[List[Endpoint]] = None,
        **more,
    ) -> Optional[KVPoll]:
        """As the engine's; who hears how a request ended is noted.

        Before that: the engine marks the room first, and the scheduler may be done with it sooner.
        """
        with self.rooms_lock:
            sender = self.senders.get(bootstrap_room)
            if targets is None:
                targets = self._room_notify_targets(bootstrap_room)
            if sender is not None:
                sender.notified.update(targets)
        concluded = super().conclude_transfer(
            bootstrap_room=bootstrap_room, status=status, targets=targets, **more
        )
        if bootstrap_room not in self.request_status:  # the scheduler is done with it just now
            self.drop_reason(bootstrap_room)
        return concluded

    def _send_failed_status(self, room: int, targets: List[Endpoint], reason: str) -> None:
        self.send_kv_status_message(
            targets=targets, bootstrap_room=room, status=KVPoll.Failed, failure_reason=reason
        )

    @contextlib.contextmanager
    def _between_messages(self, room: int) -> Iterator[None]:
        """Not in the midst of one; for a thread that does not come back is waited once."""
        has_lock = self.message_lock.acquire(timeout=self.message_lock_timeout)
        if not has_lock and self.message_room == room:
            has_lock = self.message_lock.acquire(timeout=SAME_ROOM_LOCK_SECONDS)
        self.message_lock_timeout = MESSAGE_LOCK_SECONDS if has_lock else 0
        try:
            yield
        finally:
            if has_lock:
                self.message_lock.release()

    def release_message_lock(self) -> None:
        """The thread that reads messages has kept what the last one asked for."""
        if self.holds_message_lock:
            self.holds_message_lock = False
            self.message_lock.release()

    def reject_failed_room(self, info: Any) -> bool:
        """Whether the room that a decode rank asks for has failed here; it is told then.

        One that asks again after it was told so has a new request of that number. If the engine is
        to keep it, `release_message_lock` must follow: the room cannot end meanwhile.
        """
        self.drop_collected_rooms()
        self.message_room = info.room  # before it is waited for
        self.holds_message_lock = self.message_lock.acquire()
        if info.is_dummy:
            return False
        endpoint = (info.endpoint, info.dst_port)
        with self.rooms_lock:
            known = self.failed_rooms.get(info.room)
            if known is None or endpoint in known.notified:
                self.failed_rooms.pop(info.room, None)
                return False
            _add(known.notified, endpoint)
        self.release_message_lock()
        self._send_failed_status(info.room, [endpoint], known.reason)
        return True

    def _prefetch_staging_reqs(self, room: int) -> None:
        """As the engine's, once all decode ranks of the room, which it goes through, have asked."""
        if self.request_status.get(room, KVPoll.Failed) > KVPoll.Bootstrapping:
            super()._prefetch_staging_reqs(room)

    def _handle_abort_notification(self, msg: List[bytes]) -> bool:
        """As the engine's; who gives a room up knows that it fails, and is not told so."""
        self.drop_collected_rooms()
        room, endpoint = _parse_abort(msg)
        with self.rooms_lock:
            known = self.senders.get(room) or self.failed_rooms.get(room)
            if known is not None and endpoint is not None:
                _add(known.notified, endpoint)
        is_taken = super()._handle_abort_notification(msg)
        if room in self.transfer_infos and room not in self.request_status:
            # Not all its decode ranks have asked: the engine would forget the abort, and the
            # request that is to come wait for them.
            self.request_status[room] = KVPoll.Failed
        self.track_room_without_sender(room, endpoint)
        return is_taken

    def _maybe_ack_drained_abort(self, room: int) -> None:
        """As the engine's; what counts a room's chunks goes with the last one."""
        super()._maybe_ack_drained_abort(room)
        self._drop_chunk_count(room)

    def track_room_without_sender(
        self, room: Optional[int], aborted_by: Optional[Endpoint] = None
    ) -> None:
        """Of rooms without a request is kept what the engine needs, for the last ones.

        given_up: The decode rank that gives the room up, and is not told that it fails.
        """
        with self.rooms_lock:
            is_kept = room in self.request_status or room in self.transfer_infos
            if is_kept and room not in self.senders:
                known = self.rooms_without_sender.setdefault(room, set())
                if aborted_by is not None:
                    _add(known, aborted_by)
                if len(self.rooms_without_sender) > MAX_FAILED_ROOMS:
                    oldest, _ = self.rooms_without_sender.popitem(last=False)
                    self._drop_room(oldest)


def _add(notified: Set[Endpoint], endpoint: Endpoint) -> None:
    """So many at most: a peer may say that it is at any port."""
    if len(notified) < MAX_NOTIFIED_RANKS:
        notified.add(endpoint)


def _parse_abort(msg: List[bytes]) -> Tuple[Optional[int], Optional[Endpoint]]:
    """Room and decode rank of an ABORT; None where it does not say them, as the engine logs."""
    room = endpoint = None
    if msg and msg[0] == ABORT:
        with contextlib.suppress(IndexError, ValueError):
            room = int(msg[1])
            endpoint = (msg[2].decode("ascii"), int(msg[3]))
    return room, endpoint


class NotifyingSender:
    """A prefill rank's KV sender, over the engine's."""

    is_cleared = False
    reason: Optional[str] = None  # why it was aborted
    finalizer: Optional[weakref.finalize] = None  # what is done when it is gone and was not cleared
    notified: Set[Endpoint]  # decode ranks that know how it ended

    def __init__(self, mgr: Any, bootstrap_addr: str, bootstrap_room: int, *more, **options):
        if hasattr(mgr, "register_sender"):  # Mori's has not
            mgr.register_sender(bootstrap_room, self)
        super().__init__(mgr, bootstrap_addr, bootstrap_room, *more, **options)

    def abort(self):
        """As the engine's; decode ranks that have asked are told, and the room is dropped.

        The engine drops it where it polls the request again, which it may never do.
        """
        if self.is_cleared:
            return
        super().abort()
        self._notify_failed()
        if self._notifies_decode():
            self.reason = self.kv_mgr.failure_records.get(self.bootstrap_room)
            self.clear()
            self.kv_mgr.drop_reason(self.bootstrap_room)

    def get_max_transfer_tokens(self) -> Optional[int]:
        """As the engine's; a chunk to a decode rank that is not registered fails its room later."""
        try:
            return super().get_max_transfer_tokens()
        except (KeyError, RuntimeError):  # or another one asks just now
            return self.kv_mgr._dcp_pack_max_tokens

    def failure_exception(self):
        """As the engine's, with the reason that is kept here."""
        if self.reason is not None:
            with self.kv_mgr.failure_lock:  # not `record_failure`: the room is closed
                self.kv_mgr.failure_records[self.bootstrap_room] = self.reason
        super().failure_exception()

    def _check_bootstrap_timeout(self) -> Optional[KVPoll]:
        """As the engine's; decode ranks that have asked are told."""
        status = super()._check_bootstrap_timeout()
        if status is not None:
            self._notify_failed()
        return status

    def _notifies_decode(self) -> bool:
        """Not over Mori; and of an allocation policy `prefill_complete` the engine does it."""
        return hasattr(self.kv_mgr, "record_failed_room") and self.kv_mgr.deferred_bootstrap is None

    def _notify_failed(self) -> None:
        """Decode keeps its pages until we say that nothing is written any more; not before that.

        Who has heard already how the request ended, also that it has all, does not hear it anew.
        """
        manager, room = self.kv_mgr, self.bootstrap_room
        if self._notifies_decode() and manager.is_release_safe(room):
            targets = [to for to in manager._room_notify_targets(room) if to not in self.notified]
            reason = manager.failure_records.get(room, "")
            manager.conclude_failure(bootstrap_room=room, failure_reason=reason, targets=targets)

    def clear(self) -> None:
        """As the engine's, once; decode ranks that ask for a room that failed are told then."""
        if self.is_cleared:  # the room may be another request's
            return
        self.is_cleared = True
        if (
            self.finalizer is not None
        ):  # it may be gone much later, when the room is another request's
            self.finalizer.detach()
        manager, room = self.kv_mgr, self.bootstrap_room
        if self.conclude_state == KVPoll.Failed and self._notifies_decode():
            reason = manager.failure_records.get(room, "another prefill rank failed")
            manager.record_failed_room(room, reason, self.notified)
            manager.notify_waiting_decode_ranks(room)
        with manager.status_lock:
            super().clear()
