"""Prefill: notifies decode of requests that ended here, even if decode requests them only later.

decode requests, prefill's client leaves    the engine notifies nobody: we notify decode
prefill's client leaves, decode requests    nobody would answer: we notify decode when it requests
                                            the room, or once the scheduler sees the client leave
decode requests and aborts, no request      the room stays in the engine's tables: we keep the last
                                            4096; also if decode is silent and cannot abort
a request is aborted before it is sent      the room stays there forever: we drop it with the abort
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Deque, List, Optional, Set, Tuple
from weakref import WeakValueDictionary

from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.pd.per_instance import PerInstance

# How many rooms to remember of requests that failed here, and how many without a request.
MAX_FAILED_ROOMS = 4096
ABORTED = "Aborted on prefill"
FAILED_ELSEWHERE = "another prefill rank failed"
# How many decode ranks to remember per room as notified, or as having aborted; a fleet has fewer.
MAX_NOTIFIED_RANKS = 1024
# How many rooms to remember that may still be written to; a rank has fewer open.
MAX_POISONED_ROOMS = 1 << 16
ABORT = b"ABORT"

Endpoint = Tuple[str, int]


@dataclass
class FailedRoom:
    """Why a request failed here, and the decode ranks that know or are being notified."""

    reason: str
    notified: Set[Endpoint]


class RoomFailures:
    """Mixin for a prefill rank's KV manager, over the engine's. On decode it stays empty."""

    # Shared by the scheduler, the thread that reads messages, and the transfer workers.
    rooms_lock = PerInstance(threading.RLock)
    # The room that a decode rank requests, while the engine stores the request, and what to do
    # once it is stored: a room dropped halfway would be kept forever, or crash that thread.
    message_room: Optional[int] = None
    postponed: List[Callable[[], None]] = PerInstance(list)
    # Rooms of garbage-collected senders; collection may happen any time, under any lock.
    collected_rooms: Deque[Tuple[int, Set[Endpoint]]] = PerInstance(deque)
    senders: WeakValueDictionary[int, Any] = PerInstance(WeakValueDictionary)
    failed_rooms: OrderedDict[int, FailedRoom] = PerInstance(OrderedDict)
    # Rooms without a request, and the decode ranks that aborted each of them.
    rooms_without_sender: OrderedDict[int, Set[Endpoint]] = PerInstance(OrderedDict)
    poisoned_rooms: OrderedDict[int, None] = PerInstance(OrderedDict)

    def register_sender(self, room: int, sender: Any) -> None:
        """Registers a request's sender, and forgets the failure of an earlier one in its room."""
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

    def unregister_sender(self, room: int, sender: Any) -> None:
        """Unregisters a sender that is cleared; it may live on, while stages wait for a batch."""
        with self.rooms_lock:
            if self.senders.get(room) is sender:
                del self.senders[room]

    def record_failed_room(self, room: int, reason: str, notified: Set[Endpoint]) -> None:
        """Records that a request failed; `notified` decode ranks know or are being notified."""
        with self.rooms_lock:
            self.senders.pop(room, None)
            self.failed_rooms[room] = FailedRoom(reason, notified)
            if len(self.failed_rooms) > MAX_FAILED_ROOMS:
                self.failed_rooms.popitem(last=False)

    def run_when_stored(self, room: int, act: Callable[[], None]) -> None:
        """Runs `act` under `rooms_lock`: now, or once the message being stored for `room` is."""
        with self.rooms_lock:
            if self.message_room == room:
                self.postponed.append(act)
            else:
                act()

    def end_message(self) -> None:
        """Runs what was postponed until the engine had stored the last message."""
        with self.rooms_lock:
            self.message_room, (acts, self.postponed) = None, (self.postponed, [])
            for act in acts:
                act()

    def refuse(self, room: int, reason: str) -> None:
        """Fails a request without a sender; notifies decode ranks now, or when they request it."""
        self.drop_collected_rooms()

        def fail() -> None:
            if room in self.senders:  # another request has the room
                return
            aborted_by = self.rooms_without_sender.pop(room, set())
            self.record_failed_room(room, reason, aborted_by)
            self.notify_waiting_decode_ranks(room)
            self._drop_room(room)

        self.run_when_stored(room, fail)

    def notify_waiting_decode_ranks(self, room: int) -> None:
        """Notifies decode ranks that requested a failed room and have not been notified."""
        with self.rooms_lock:
            known = self.failed_rooms.get(room)
            if known is None:
                return
            targets = [to for to in self._room_notify_targets(room) if to not in known.notified]
            known.notified.update(targets)
        if self.is_release_safe(room):
            self._send_failed_status(room, targets, known.reason)

    def is_release_safe(self, room: int) -> bool:
        """Returns whether decode may be notified that a room failed, and so free its pages.

        Without deferred release, decode would not wait until writes to them are over; in a poisoned
        room, nobody knows whether they are.
        """
        return (
            self.enable_deferred_decode_kv_release and room not in self._deferred_ack_poisoned_rooms
        )

    def poison_deferred_ack_room(self, room: int) -> None:
        """Marks a room that may still be written to. Extends the engine's: keeps the last 65536.

        The engine forgets a room only when it is reused.
        """
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
        """Drops rooms whose senders were garbage-collected without being cleared.

        Call it before anything else: what arrives for such a room concerns another request.
        """
        while self.collected_rooms:
            try:
                room, notified = self.collected_rooms.popleft()
            except IndexError:  # another thread was faster
                return
            drop = functools.partial(self._drop_collected_room, room, notified)
            self.run_when_stored(room, drop)

    def _drop_collected_room(self, room: int, notified: Set[Endpoint]) -> None:
        if room in self.senders:  # another request has the room
            return
        if self.request_status.get(room) == KVPoll.Failed:
            self.record_failed_room(room, self.failure_records.get(room, ABORTED), notified)
            self.notify_waiting_decode_ranks(room)
        self._drop_room(room)
        self._drop_chunk_count(room)

    def _drop_chunk_count(self, room: int) -> None:
        """Drops the chunk count of a room that has ended, once no chunk is left."""
        if room not in self.request_status and self._staging_outstanding.get(room, 1) <= 0:
            self._staging_outstanding.pop(room, None)

    def _drop_room(self, room: int) -> None:
        with self.status_lock:
            for table in (self.request_status, self.transfer_infos, self.req_to_decode_prefix_len):
                table.pop(room, None)
        self.drop_reason(room)  # last: with a status, another thread could record it again

    def conclude_transfer(
        self,
        *,
        bootstrap_room: int,
        status: KVPoll,
        targets: Optional[List[Endpoint]] = None,
        **more,
    ) -> Optional[KVPoll]:
        """Concludes a room. Extends the engine's: first notes which decode ranks are notified.

        The engine sets the room's status before it notifies them, and the scheduler may be done
        with the room in between.

        Args:
            targets: Decode ranks to notify; None for all that requested the room.
        """
        self.drop_collected_rooms()  # which may notify them
        with self.rooms_lock:
            sender = self.senders.get(bootstrap_room)
            if targets is None:
                targets = self._room_notify_targets(bootstrap_room)
            if sender is not None:
                sender.notified.update(targets)
        concluded = super().conclude_transfer(
            bootstrap_room=bootstrap_room, status=status, targets=targets, **more
        )
        if bootstrap_room not in self.request_status:  # the scheduler has just cleared it
            self.drop_reason(bootstrap_room)
        return concluded

    def _send_failed_status(self, room: int, targets: List[Endpoint], reason: str) -> None:
        self.send_kv_status_message(
            targets=targets, bootstrap_room=room, status=KVPoll.Failed, failure_reason=reason
        )

    def reject_failed_room(self, info: Any) -> bool:
        """Returns whether the room that a decode rank requests has failed; notifies it if so.

        A rank that requests the room again after being notified has a new request in it. On False,
        the engine stores the request, and what ends the room waits for that: call `end_message`
        afterwards.
        """
        self.drop_collected_rooms()
        endpoint = (info.endpoint, info.dst_port)
        with self.rooms_lock:
            known = None if info.is_dummy else self.failed_rooms.get(info.room)
            if known is None or endpoint in known.notified:
                if not info.is_dummy:
                    self.failed_rooms.pop(info.room, None)
                self.message_room = info.room
                return False
            _add(known.notified, endpoint)
        self._send_failed_status(info.room, [endpoint], known.reason)
        return True

    def _prefetch_staging_reqs(self, room: int) -> None:
        """Prefetches staging buffers, once all of the room's decode ranks have requested it.

        Extends the engine's, which iterates over those ranks: none may be added meanwhile.
        """
        if self.request_status.get(room, KVPoll.Failed) > KVPoll.Bootstrapping:
            super()._prefetch_staging_reqs(room)

    def _handle_abort_notification(self, msg: List[bytes]) -> bool:
        """Handles an abort. Extends the engine's: the aborting rank is not notified of it."""
        self.drop_collected_rooms()
        room, endpoint = _parse_abort(msg)
        with self.rooms_lock:
            known = self.senders.get(room) or self.failed_rooms.get(room)
            if known is not None and endpoint is not None:
                _add(known.notified, endpoint)
        is_taken = super()._handle_abort_notification(msg)
        if room in self.transfer_infos and room not in self.request_status:
            # Not all of its decode ranks have requested it: the engine would forget the abort, and
            # the request that is still to come would wait for them.
            self.request_status[room] = KVPoll.Failed
        self.track_room_without_sender(room, endpoint)
        return is_taken

    def _maybe_ack_drained_abort(self, room: int) -> None:
        """Acknowledges a drained abort. Extends the engine's: drops the room's chunk count."""
        super()._maybe_ack_drained_abort(room)
        self._drop_chunk_count(room)

    def track_room_without_sender(
        self, room: Optional[int], aborted_by: Optional[Endpoint] = None
    ) -> None:
        """Keeps the engine's entries for the most recent rooms without a request.

        Args:
            aborted_by: The decode rank that aborts the room, and is not notified that it fails.
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
    """Adds a decode rank, up to `MAX_NOTIFIED_RANKS`: a peer may claim any port."""
    if len(notified) < MAX_NOTIFIED_RANKS:
        notified.add(endpoint)


def _parse_abort(msg: List[bytes]) -> Tuple[Optional[int], Optional[Endpoint]]:
    """Returns an ABORT's room and decode rank; None for what it lacks, which the engine logs."""
    room = endpoint = None
    if msg and msg[0] == ABORT:
        with contextlib.suppress(IndexError, ValueError):
            room = int(msg[1])
            endpoint = (msg[2].decode("ascii"), int(msg[3]))
    return room, endpoint


class NotifyingSender:
    """Mixin for a prefill rank's KV sender, over the engine's: notifies decode of failures."""

    is_cleared = False
    reason: Optional[str] = None  # why it failed
    is_reason_raised = False  # nobody asks for the reason any more
    finalizer: Optional[weakref.finalize] = None  # runs if it is collected without being cleared
    notified: Set[Endpoint]  # decode ranks that know how it ended

    def __init__(self, mgr: Any, bootstrap_addr: str, bootstrap_room: int, *more, **options):
        if hasattr(mgr, "register_sender"):  # Mori's manager does not
            mgr.register_sender(bootstrap_room, self)
        super().__init__(mgr, bootstrap_addr, bootstrap_room, *more, **options)

    def abort(self):
        """Aborts the request, notifies the decode ranks that requested it, and drops the room.

        Extends the engine's, which drops it when it polls the request again, perhaps never.
        """
        if self.is_cleared:
            return
        super().abort()
        self._notify_failed()
        if self._notifies_decode():
            self.clear()
            self._drop_reason()

    def get_max_transfer_tokens(self) -> Optional[int]:
        """Returns how many tokens a chunk may have; None without a limit.

        Extends the engine's: an unregistered decode rank fails its room later, not here.
        """
        try:
            return super().get_max_transfer_tokens()
        except (KeyError, RuntimeError):  # the latter if another rank requests the room meanwhile
            return self.kv_mgr._dcp_pack_max_tokens

    def failure_exception(self):
        """Raises the failure.

        Replaces the engine's, which takes the reason of the room's next request, if that has failed
        meanwhile, too.
        """
        if not self._notifies_decode():
            super().failure_exception()
        from sglang.srt.disaggregation.common.conn import KVTransferError  # it imports this module

        self.conclude_state = KVPoll.Failed
        self.clear()
        self._drop_reason()
        self.trace_ctx.trace_req_finish()
        reason = self.reason or FAILED_ELSEWHERE
        raise KVTransferError(self.bootstrap_room, reason, is_from_another_rank=self.reason is None)

    def _drop_reason(self) -> None:
        """Drops the room's reason, which nobody asks for any more, once the room is closed."""
        self.is_reason_raised = True
        if self.bootstrap_room not in self.kv_mgr.request_status:
            self.kv_mgr.drop_reason(self.bootstrap_room)

    def _check_bootstrap_timeout(self) -> Optional[KVPoll]:
        """Checks for a time-out. Extends the engine's: notifies decode ranks that requested it."""
        status = super()._check_bootstrap_timeout()
        if status is not None:
            self._notify_failed()
        return status

    def _notifies_decode(self) -> bool:
        """False over Mori, and if the engine notifies (allocation policy `prefill_complete`)."""
        return hasattr(self.kv_mgr, "record_failed_room") and self.kv_mgr.deferred_bootstrap is None

    def _notify_failed(self) -> None:
        """Notifies decode of the failure, if it then keeps its pages until writes are over.

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
        if self.conclude_state == KVPoll.Failed and self._notifies_decode():
            self.reason = manager.failure_records.get(room)
            manager.run_when_stored(room, self._clear_failed)
        else:
            with manager.status_lock:
                super().clear()
            if hasattr(manager, "unregister_sender"):
                manager.unregister_sender(room, self)

    def _clear_failed(self) -> None:
        manager, room = self.kv_mgr, self.bootstrap_room
        if manager.senders.get(room, self) is not self:  # another request has the room
            return
        reason = self.reason or FAILED_ELSEWHERE
        manager.record_failed_room(room, reason, self.notified)
        manager.notify_waiting_decode_ranks(room)
        with manager.status_lock:
            super().clear()
        if self.is_reason_raised:
            manager.drop_reason(room)
