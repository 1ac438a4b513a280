"""The state of each request on one rank, why it failed, and which decode ranks know.

    Bootstrapping -> WaitingForInput -> (Transferring) -> Success
          any of these               -> Failed

A room never moves back. Threads leave marks here; schedulers look at them where all ranks do
(`agreement`).
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Dict, Optional, Set
from weakref import WeakSet, WeakValueDictionary

from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.pd.environment import seconds_of

if TYPE_CHECKING:
    from sglang.srt.disaggregation.pd.sender import Sender

# First frame (after a backend's guard) by which decode aborts a room: ABORT, room, reason, decode's
# name if it has opened the room, and decode's name. Sent to servers that announce `takes_aborts`.
ABORT = b"ABORT"
# Failed rooms that prefill remembers, for ranks to which they come late.
MAX_FAILED_ROOMS = 4096
# How long a failed room waits on decode for the other senders: pages are not freed under a write.
# The variable is that of later releases.
RELEASE_VARIABLE = "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT"
RELEASE_SECONDS = 30.0
# How long the copies of a write may arrive after the transfer engine returned an error for it.
UNSETTLED_SECONDS = 30.0
ENDED = (KVPoll.Success, KVPoll.Failed)
DUPLICATE_ROOM = "another request has this bootstrap_room; choose another number for each"


@dataclass
class FailedRoom:
    """A room that this prefill rank has failed, and the decode ranks that know."""

    reason: str
    notified: Set[str]


class RoomTable:
    """A KV manager's rooms.

    A backend has `conclude_failure(room, reason)`, which tells the room's decode ranks that it
    failed as soon as nothing of it is being written, and `_drop_room(room)`, which forgets what it
    keeps of a room.
    """

    # For how long a write may go on after its failure was told.
    unsettled_seconds = 0.0

    def __new__(cls, *args, **kwargs):
        self = super().__new__(cls)
        # Rooms are touched by the scheduler and by threads that read messages.
        self.rooms_lock = threading.RLock()
        self.release_seconds = seconds_of(RELEASE_VARIABLE, RELEASE_SECONDS, 0.0)
        self.failure_records: Dict[int, str] = {}
        # Prefill's requests, by room, and those of which another one has taken the number.
        self.senders: WeakValueDictionary[int, Sender] = WeakValueDictionary()
        self.replaced_senders: WeakSet[Sender] = WeakSet()
        # Why prefill failed a room; why decode aborted one whose request has not come to prefill.
        self.failed_rooms: OrderedDict[int, FailedRoom] = OrderedDict()
        self.aborted_before_request: OrderedDict[int, str] = OrderedDict()
        return self

    @property
    def sender_rank(self) -> int:
        """This prefill rank's number among all that may serve a decode rank, over TP and PP."""
        return self.attn_tp_rank * self.pp_size + self.pp_rank

    def check_status(self, bootstrap_room: int) -> KVPoll:
        """The room's state; one that is forgotten has failed."""
        return self.request_status.get(bootstrap_room, KVPoll.Failed)

    def update_status(self, bootstrap_room: int, status: KVPoll) -> None:
        """Move a room on. It never moves back, and a failed room stays failed."""
        with self.rooms_lock:
            current = self.request_status.get(bootstrap_room, status)
            failed = KVPoll.Failed in (current, status)
            self.request_status[bootstrap_room] = KVPoll.Failed if failed else max(current, status)

    def record_failure(self, bootstrap_room: int, failure_reason: str) -> None:
        """Keep the first reason why a room failed, for the client."""
        self.failure_records.setdefault(bootstrap_room, failure_reason)

    def fail(self, room: int, reason: str) -> None:
        """Mark a room as failed; its request is failed where the ranks look at it together."""
        with self.rooms_lock:
            if room in self.request_status:  # else it is over
                self.record_failure(room, reason)
                self.update_status(room, KVPoll.Failed)

    def drop_room(self, room: int) -> Optional[str]:
        """Drop all that is kept of a finished room; returns why it failed, if it did."""
        with self.rooms_lock:
            self.request_status.pop(room, None)
            self._drop_backend_state(room)
            self.drop_digests(room)
            return self.failure_records.pop(room, None)

    # Prefill

    def register_sender(self, room: int, sender: Sender) -> None:
        """A request has come; one that decode has aborted before has failed.

        So have two of one number at a time, for nobody can tell which of them decode asks for.
        """
        with self.rooms_lock:
            other = self.senders.get(room)
            if other is not None:
                self.replaced_senders.add(other)
            others = [one for one in self.replaced_senders if one.bootstrap_room == room]
            self.senders[room] = sender
            self.failed_rooms.pop(room, None)  # was another request of that number
            reason = self.aborted_before_request.pop(room, None)
            if not all(one.is_closed for one in others):
                reason = DUPLICATE_ROOM
            self.update_status(room, KVPoll.Bootstrapping)
            if reason is not None:
                self.fail(room, reason)

    def record_failed_room(self, room: int, reason: str, notified: Iterable[str]) -> None:
        """Keep why a room was failed, for decode ranks that ask for it only now."""
        known = self.failed_rooms.pop(room, None)
        self.failed_rooms[room] = FailedRoom(
            reason, {*notified, *(known.notified if known else ())}
        )
        if len(self.failed_rooms) > MAX_FAILED_ROOMS:
            self.failed_rooms.popitem(last=False)

    def abort_room(self, room: int, reason: str) -> None:
        """Fail a room, also if its request has yet to come; decode is told why."""
        sender = self.senders.get(room)
        if sender is not None and sender.conclude_state is not None:
            return  # it is over
        if sender is not None:
            self.fail(room, reason)
        else:
            self.request_status.pop(room, None)
            self.aborted_before_request[room] = reason
            if len(self.aborted_before_request) > MAX_FAILED_ROOMS:
                self.aborted_before_request.popitem(last=False)
        self.conclude_failure(room, reason)

    def refuse(self, room: int, reason: str) -> None:
        """A request has failed that never had a sender: decode ranks are told, or when they ask."""
        with self.rooms_lock:
            sender = self.senders.get(room)
            if sender is not None and not sender.is_closed:  # another of that number
                return
            self.record_failure(room, reason)
        self.close_failed_room(room)

    def fail_room_of_silent_peer(self, room: int, reason: str) -> None:
        """Fail an open room, of which a decode rank is silent (`silence`)."""
        with self.rooms_lock:
            if self.request_status.get(room) not in ENDED:
                self.abort_room(room, reason)

    def handle_abort(
        self, room: bytes, reason: bytes, session: bytes = b"", name: bytes = b""
    ) -> None:
        """Fail the room that decode aborts, also if its request has yet to come.

        `session` is decode's name if it has opened the room: then it may be over. A decode rank
        that has not needs no telling; when it asks for the room, that is another request.
        """
        number, peer = int(room), session.decode("ascii")
        knows = {name.decode("ascii")} if name and not peer else set()
        why = f"Decode gave up this request: {reason.decode('utf-8', 'replace')}"
        with self.rooms_lock:
            if number in self.failed_rooms:
                self.failed_rooms[number].notified |= knows
            elif not peer or peer in self.transfer_infos.get(number, ()):
                self.abort_room(number, why)
                if knows and number not in self.aborted_before_request:
                    self.record_failed_room(number, why, knows)
