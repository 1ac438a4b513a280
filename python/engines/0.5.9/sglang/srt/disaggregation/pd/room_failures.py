"""Each request's status on one rank, why it failed, and which decode ranks were notified.

    Bootstrapping -> WaitingForInput -> (Transferring) -> Success
          any of these               -> Failed

A room never moves back. Threads set the status here; schedulers act on it where all ranks poll
together (`rank_consensus`).
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakSet, WeakValueDictionary

from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.pd.environment import seconds_of
from sglang.srt.disaggregation.pd.per_instance import PerInstance
from sglang.srt.disaggregation.utils import DisaggregationMode

if TYPE_CHECKING:
    from sglang.srt.disaggregation.pd.sender import Sender

# First frame (after a backend's guard) of the message by which decode aborts a room: ABORT, room,
# reason, decode's name if it has requested the room, and decode's name. Decode sends it to servers
# that announce `takes_aborts`.
ABORT = b"ABORT"
# Failed rooms that prefill remembers, for decode ranks that request them late.
MAX_FAILED_ROOMS = 4096
# How long a failed room waits on decode for the other senders: a page must not be freed while it is
# written. Later releases have the same variable.
RELEASE_VARIABLE = "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT"
RELEASE_SECONDS = 30.0
# How long copies of a write may still arrive after the transfer engine returned an error for it.
UNSETTLED_SECONDS = 30.0
ENDED = (KVPoll.Success, KVPoll.Failed)
FAILED_ELSEWHERE = "another prefill rank failed"
DUPLICATE_ROOM = "bootstrap_room is already in use; use a unique one for each request"


@dataclass
class FailedRoom:
    """A room that this prefill rank has failed, and the decode ranks that need no notice."""

    reason: str
    notified: set[str]


def read_release_seconds() -> float:
    """Returns how long decode keeps the pages of a failed room that may still be written to.

    Raises:
        ValueError: The variable is not a number of at least 0.
    """
    return seconds_of(RELEASE_VARIABLE, RELEASE_SECONDS, 0.0)


class RoomTable:
    """Tracks a KV manager's rooms.

    The manager is `NotedTransfers`, too. A backend provides `conclude_failure(room, reason)`, which
    notifies the room's decode ranks of the failure once no write to them runs, and
    `_drop_backend_state(room)`, which drops the backend's own entries for a room.
    """

    # How long a write may go on after its failure was reported.
    unsettled_seconds = 0.0

    # The scheduler and the threads that read messages share the rooms.
    rooms_lock = PerInstance(threading.RLock)
    release_seconds = PerInstance(read_release_seconds)
    failure_records: dict[int, str] = PerInstance(dict)
    # Prefill's senders by room, and those whose room a later request has taken.
    senders: WeakValueDictionary[int, Sender] = PerInstance(WeakValueDictionary)
    replaced_senders: WeakSet[Sender] = PerInstance(WeakSet)
    # Why rooms failed; and why some were aborted, refused or lost decode before their request came.
    failed_rooms: OrderedDict[int, FailedRoom] = PerInstance(OrderedDict)
    aborted_before_request: OrderedDict[int, str] = PerInstance(OrderedDict)

    @property
    def sender_rank(self) -> int:
        """This prefill rank's number, unique over the TP and PP ranks that serve a decode rank."""
        return self.attn_tp_rank * self.pp_size + self.pp_rank

    def check_status(self, bootstrap_room: int) -> KVPoll:
        """Returns the room's status; Failed for a room that was dropped."""
        return self.request_status.get(bootstrap_room, KVPoll.Failed)

    def update_status(self, bootstrap_room: int, status: KVPoll) -> None:
        """Updates a room's status, one thread at a time; never back, and Failed is final."""
        with self.rooms_lock:
            current = self.request_status.get(bootstrap_room, status)
            failed = KVPoll.Failed in (current, status)
            self.request_status[bootstrap_room] = KVPoll.Failed if failed else max(current, status)
            self.note_status(bootstrap_room, self.request_status[bootstrap_room])

    def record_failure(self, bootstrap_room: int, failure_reason: str) -> None:
        """Records the first reason why a room failed, for the client."""
        self.failure_records.setdefault(bootstrap_room, failure_reason)
        self.transfer_log.failed(bootstrap_room, failure_reason)

    def fail(self, room: int, reason: str) -> None:
        """Marks a room as failed; its request fails where all ranks poll together."""
        with self.rooms_lock:
            if room in self.request_status:  # otherwise it has concluded
                self.record_failure(room, reason)
                self.update_status(room, KVPoll.Failed)

    def drop_room(self, room: int) -> str | None:
        """Drops all entries for a concluded room; returns why it failed, if it did."""
        with self.rooms_lock:
            self.request_status.pop(room, None)
            self._drop_backend_state(room)
            self.drop_digests(room)
            if self.disaggregation_mode == DisaggregationMode.PREFILL:
                self.transfer_log.ended(room)
            return self.failure_records.pop(room, None)

    # Prefill

    def register_sender(self, room: int, sender: Sender) -> None:
        """Registers a request's sender; the room fails if decode has already aborted it.

        Two concurrent requests with the same room both fail: decode's messages fit either.
        """
        with self.rooms_lock:
            other = self.senders.get(room)
            if other is not None:
                self.replaced_senders.add(other)
            others = [one for one in self.replaced_senders if one.bootstrap_room == room]
            self.senders[room] = sender
            self.failed_rooms.pop(room, None)  # an earlier request's
            reason = self.aborted_before_request.pop(room, None)
            if not all(one.is_closed for one in others):
                reason = DUPLICATE_ROOM
            self.update_status(room, KVPoll.Bootstrapping)
            if reason is not None:
                self.fail(room, reason)

    def record_failed_room(self, room: int, reason: str, notified: Iterable[str]) -> None:
        """Records why a room failed, for later requests of decode ranks not in `notified`."""
        known = self.failed_rooms.pop(room, None)
        self.failed_rooms[room] = FailedRoom(
            reason, {*notified, *(known.notified if known else ())}
        )
        if len(self.failed_rooms) > MAX_FAILED_ROOMS:
            self.failed_rooms.popitem(last=False)

    def abort_room(self, room: int, reason: str) -> None:
        """Fails a room, even before its request arrives, and notifies decode of the reason."""
        sender = self.senders.get(room)
        if sender is not None and sender.conclude_state is not None:
            return  # it has concluded
        if sender is not None:
            self.fail(room, reason)
        else:
            self.request_status.pop(room, None)
            self.aborted_before_request[room] = reason
            if len(self.aborted_before_request) > MAX_FAILED_ROOMS:
                self.aborted_before_request.popitem(last=False)
        self.conclude_failure(room, reason)

    def refuse(self, room: int, reason: str) -> None:
        """Fails a request that never had a sender; notifies decode, now or when it requests it."""
        with self.rooms_lock:
            sender = self.senders.get(room)
            if sender is not None and not sender.is_closed:  # another request with this room
                return
            self.transfer_log.rejected(room, reason)
            self.record_failure(room, reason)
        self.close_failed_room(room)

    def fail_room_of_silent_peer(self, room: int, reason: str) -> None:
        """Fails an open room that has a silent decode rank (`peer_silence`)."""
        with self.rooms_lock:
            if self.request_status.get(room) not in ENDED:
                self.abort_room(room, reason)

    def handle_abort(
        self, room: bytes, reason: bytes, session: bytes = b"", name: bytes = b""
    ) -> None:
        """Fails the room that decode aborts, even before its request arrives.

        Args:
            session: Decode's name if it has requested the room, which may then have concluded.
            name: Decode's name. A rank that has not requested the room needs no notice; if it
                requests the room later, that is a new request.
        """
        number, peer = int(room), session.decode("ascii")
        knows = {name.decode("ascii")} if name and not peer else set()
        why = f"Decode aborted the request: {reason.decode('utf-8', 'replace')}"
        with self.rooms_lock:
            if number in self.failed_rooms:
                self.failed_rooms[number].notified |= knows
            elif not peer or peer in self.transfer_infos.get(number, ()):
                self.abort_room(number, why)
                if knows and number not in self.aborted_before_request:
                    self.record_failed_room(number, why, knows)
