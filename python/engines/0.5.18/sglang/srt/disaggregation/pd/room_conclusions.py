"""Prefill: how rooms end, and when decode may free their pages. Later engines do this themselves.

a worker ends a room      waits for its writes, then sets the status and notifies the decode ranks
decode aborts a room      fails it; acknowledged once no worker has a chunk of it
writes may still go on    the room is poisoned: aborts of it are not acknowledged, and decode keeps
                          its pages until a time-out
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from typing import Any

from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.pd.forward_events import ForwardEvents
from sglang.srt.disaggregation.pd.held_pages import ack_message
from sglang.srt.disaggregation.pd.peer_sockets import PeerSocket
from sglang.srt.disaggregation.pd.peers import is_dummy
from sglang.srt.disaggregation.pd.per_instance import PerInstance
from sglang.srt.disaggregation.pd.prefill_manager import PrefillManager
from sglang.srt.disaggregation.pd.room_failures import (
    ABORT,
    ABORTED_BY_DECODE,
    Endpoint,
    parse_abort,
)
from sglang.srt.disaggregation.pd.status_messages import ENDED, status_message

logger = logging.getLogger(__name__)

# How many decode ranks to remember that read `pd.status_messages`, besides those registered now.
MAX_STATUS_READERS = 4096


class RoomConclusions:
    """Base of a prefill rank's KV manager, after `PrefillManager` and before the engine's.

    A backend provides `notify_stock(endpoint, room, status)`, which tells a stock decode rank how a
    room ended, if stock does.
    """

    enable_deferred_decode_kv_release = True
    # Decode ranks that read `pd.status_messages`.
    status_readers: set[Endpoint] = PerInstance(set)
    drain_lock = PerInstance(threading.RLock)
    # How many workers have a chunk of a room.
    writing: Counter[int] = PerInstance(Counter)
    # By room and decode rank: the number of the abort to acknowledge.
    ack_targets: dict[int, dict[Endpoint, int]] = PerInstance(dict)
    # Stock decode ranks to notify once nothing of a failed room is being written: they free its
    # pages at once.
    late_notices: dict[int, set[Endpoint]] = PerInstance(dict)
    # Rooms that may still be written to, though no worker has a chunk of them.
    _deferred_ack_poisoned_rooms: set[int] = PerInstance(set)

    def _prefill_unique_rank(self) -> int:
        """Returns this rank's number, unique in its server's DP rank."""
        stages = self.pp_size * self.attn_cp_size
        return self.attn_tp_rank * stages + self.pp_rank * self.attn_cp_size + self.attn_cp_rank

    def _room_notify_targets(self, room: int) -> list[Endpoint]:
        """Returns the decode ranks to notify of how a room ends."""
        infos = list(self.transfer_infos.get(room, {}).values())
        return [(info.endpoint, info.dst_port) for info in infos if not is_dummy(info)]

    def conclude_transfer(
        self,
        *,
        bootstrap_room: int,
        status: KVPoll,
        targets: list[Endpoint] | None = None,
        failure_reason: str | None = None,
    ) -> KVPoll | None:
        """Ends a room and notifies decode ranks; returns the status, None for a room that is over.

        A room that has failed stays so, with its first reason.

        Args:
            targets: Decode ranks to notify; None for all that requested the room.
        """
        room = bootstrap_room
        with self.status_lock:
            if room not in self.request_status:
                return None
            if self.request_status[room] == KVPoll.Failed or room in self.failure_records:
                status = KVPoll.Failed
            if status == KVPoll.Failed and room not in self.failure_records:
                self.record_failure(room, failure_reason or "Failed to send KV or metadata")
            failure_reason = self.failure_records.get(room)
            super().update_status(room, status)
        if targets is None:
            targets = self._room_notify_targets(room)
        self.send_kv_status_message(
            targets=targets, bootstrap_room=room, status=status, failure_reason=failure_reason
        )
        return status

    def conclude_failure(
        self, *, bootstrap_room: int, failure_reason: str, targets: list[Endpoint] | None = None
    ) -> KVPoll | None:
        """Fails a room and notifies decode ranks; arguments as for `conclude_transfer`."""
        return self.conclude_transfer(
            bootstrap_room=bootstrap_room,
            status=KVPoll.Failed,
            targets=targets,
            failure_reason=failure_reason,
        )

    def send_kv_status_message(
        self,
        *,
        targets: list[Endpoint],
        bootstrap_room: int,
        status: KVPoll,
        failure_reason: str | None = None,
    ) -> None:
        """Tells decode ranks how a room ended on this rank."""
        reason = failure_reason or ""
        frames = status_message(bootstrap_room, status, self._prefill_unique_rank(), reason)
        for endpoint in targets:
            try:
                if endpoint in self.status_readers:
                    socket = PeerSocket.to(*endpoint)
                    self._send_multipart_locked(socket.endpoint, frames, is_ipv6=socket.is_ipv6)
                elif not self._is_postponed(endpoint, bootstrap_room, status):
                    self.notify_stock(endpoint, bootstrap_room, status)
            except Exception as error:
                place = "{}:{}".format(*endpoint)
                logger.warning(f"Room {bootstrap_room}: could not notify decode {place}: {error}")

    def _is_postponed(self, endpoint: Endpoint, room: int, status: KVPoll) -> bool:
        """Whether a stock decode rank is notified later, because a worker has a chunk of the room.

        The worker that ends the room has waited for its own writes, as far as it can; then stock
        frees its pages, as always.
        """
        with self.drain_lock:
            if status != KVPoll.Failed or not self.writing[room] or self.sending.room == room:
                return False
            self.late_notices.setdefault(room, set()).add(endpoint)
            return True

    def _handle_abort_notification(self, msg: list[bytes]) -> bool:
        """Fails a room that decode aborts, and acknowledges that once nothing of it is written."""
        if not msg or msg[0] != ABORT:
            return False
        room, decode, generation = parse_abort(msg)
        if room is None:
            return True
        if self.request_status.get(room, KVPoll.Success) not in ENDED:
            self.record_failure(room, ABORTED_BY_DECODE)
            self.update_status(room, KVPoll.Failed)
        if generation is not None:
            with self.drain_lock:
                self.ack_targets.setdefault(room, {})[decode] = generation
            self._maybe_ack_drained_abort(room)
        return True

    def _maybe_ack_drained_abort(self, room: int) -> None:
        """Acknowledges aborts of a room of which no worker has a chunk, and sends late notices."""
        with self.drain_lock:
            if self.writing[room]:
                return
            targets, late = self.ack_targets.pop(room, {}), self.late_notices.pop(room, ())
        if room in self._deferred_ack_poisoned_rooms:
            return
        for endpoint, generation in targets.items():
            socket = PeerSocket.to(*endpoint)
            frames = ack_message(room, self._prefill_unique_rank(), generation)
            try:
                self._send_multipart_locked(socket.endpoint, frames, is_ipv6=socket.is_ipv6)
            except Exception as error:
                logger.warning(f"Room {room}: could not acknowledge its abort: {error}")
        self.send_kv_status_message(targets=list(late), bootstrap_room=room, status=KVPoll.Failed)

    def poison_deferred_ack_room(self, room: int) -> None:
        """Notes that a room may still be written to, by transfers whose end nobody sees."""
        with self.drain_lock:
            self._deferred_ack_poisoned_rooms.add(room)
            self.ack_targets.pop(room, None)
            self.late_notices.pop(room, None)


class SendingState(threading.local):
    """The room whose chunk a worker has, and what it notes while it sends that chunk.

    Attributes:
        handles: NIXL's transfers of the chunk.
        notices: NIXL's notifications to send when the chunk is written, by decode rank.
    """

    room: int | None = None

    def __init__(self):
        self.handles: list[Any] = []
        self.notices: list[tuple[str, str]] = []

    def start(self, room: int | None) -> None:
        """Starts to note for this room."""
        self.room, self.handles, self.notices = room, [], []


class WorkerRooms(ForwardEvents, PrefillManager, RoomConclusions):
    """Base of a prefill rank's KV manager, before the engine's: ends rooms for its workers.

    The engine's workers only set a room's status. A backend provides `settle_writes()`, called by
    a worker whose room has failed: returns whether none of its writes goes on.
    """

    sending = PerInstance(SendingState)

    def forward_event(self, chunk: Any) -> Any:
        """Takes the event from the request's sender, where the scheduler leaves it."""
        sender = self.failures.senders.get(chunk.room)
        event = getattr(sender, "_early_send_wait_event", None)
        if event is not None:
            sender._early_send_wait_event = None
        return event

    def _note_taken(self, chunk: Any) -> None:
        with self.drain_lock:
            self.writing[chunk.room] += 1
        self.sending.start(chunk.room)
        super()._note_taken(chunk)

    def _note_done(self, chunk: Any) -> None:
        self.sending.start(None)
        with self.drain_lock:
            self.writing[chunk.room] -= 1
            if not self.writing[chunk.room]:
                del self.writing[chunk.room]
        self._maybe_ack_drained_abort(chunk.room)
        super()._note_done(chunk)

    def update_status(self, bootstrap_room: int, status: KVPoll) -> None:
        """Updates a room's status. Extends the engine's: a worker also notifies decode."""
        room = bootstrap_room
        if status not in ENDED or self.sending.room != room:
            if status == KVPoll.Bootstrapping and room not in self.request_status:  # a new request
                self._deferred_ack_poisoned_rooms.discard(room)
            return super().update_status(room, status)
        if status == KVPoll.Failed:
            self.fail_chunk(room, "", self.settle_writes())
        else:
            self.conclude_transfer(bootstrap_room=room, status=status)

    def fail_chunk(self, room: int, reason: str, is_settled: bool) -> None:
        """Fails the room of this worker's chunk.

        Args:
            reason: Used if the room has none yet.
            is_settled: Whether none of the chunk's writes goes on.
        """
        if not is_settled:
            self.poison_deferred_ack_room(room)
        self._staging_outstanding.pop(room, None)  # the engine would count the chunk forever
        self.conclude_failure(bootstrap_room=room, failure_reason=reason)

    def note_reader(self, info: Any) -> None:
        """Notes whether a decode rank that registers reads `pd.status_messages`."""
        endpoint = (info.endpoint, info.dst_port)
        (self.status_readers.add if info.reads_status else self.status_readers.discard)(endpoint)
        if len(self.status_readers) > MAX_STATUS_READERS:
            known = list(self.decode_kv_args_table.values())
            self.status_readers &= {(one.endpoint, one.dst_port) for one in known}

    def reads_status(self, room: int) -> bool:
        """Whether all decode ranks of a room read `pd.status_messages`."""
        return set(self._room_notify_targets(room)) <= self.status_readers
