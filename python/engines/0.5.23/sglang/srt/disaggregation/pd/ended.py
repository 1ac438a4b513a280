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
MAX_ENDED = 4096
ABORTED = "Aborted on prefill"
# Decode ranks that are remembered for having heard of one room, or given it up; a fleet has fewer.
MAX_TOLD = 1024
# Rooms that are remembered for having been written to without a known end; a rank has fewer open.
MAX_POISONED = 1 << 16
ABORT = b"ABORT"
# How long one waits for the thread that reads messages while it keeps what decode asks for; and
# where that is the room that ends: dropped half way, it would be kept for ever or end that thread.
MAX_ASK_SECONDS = 0.1
SAME_ROOM_SECONDS = 2.0

Endpoint = Tuple[str, int]


@dataclass
class EndedRoom:
    """Why a request failed here, and the decode ranks that know."""

    reason: str
    told: Set[Endpoint]


class Ended:
    """A prefill rank's KV manager, over the engine's. Decode's never fills it."""

    def __new__(cls, *args, **kwargs):
        self = super().__new__(cls)
        # Of the scheduler, the thread that reads messages, and those that write.
        self.ended_lock = threading.RLock()
        # Held while the engine keeps what decode asks for; no request is noted as ended meanwhile.
        self.ask_lock = threading.Lock()
        self.is_asked = False
        self.asked_room: Optional[int] = None
        self.ask_patience = MAX_ASK_SECONDS
        # Rooms of senders that were collected, which may be at any time and within any lock.
        self.left: Deque[Tuple[int, Set[Endpoint]]] = deque()
        self.requested: WeakValueDictionary[int, Any] = WeakValueDictionary()
        self.ended: OrderedDict[int, EndedRoom] = OrderedDict()
        # Rooms without a request, and the decode ranks that gave each of them up.
        self.unrequested: OrderedDict[int, Set[Endpoint]] = OrderedDict()
        self.poisoned: OrderedDict[int, None] = OrderedDict()
        return self

    def note_requested(self, room: int, sender: Any) -> None:
        """A request has come; what is known of its room was another's."""
        self.drop_left()
        sender.told = set()
        sender.left = weakref.finalize(sender, self.left.append, (room, sender.told))
        sender.left.atexit = False
        with self.ended_lock:
            self.requested[room] = sender
            self.ended.pop(room, None)
            sender.told.update(self.unrequested.pop(room, ()))

    def note_ended(self, room: int, reason: str, told: Set[Endpoint]) -> None:
        """A request has failed; these decode ranks know, or are being told."""
        with self._between_asks(room), self.ended_lock:
            self._note_ended(room, reason, told)

    def _note_ended(self, room: int, reason: str, told: Set[Endpoint]) -> None:
        self.requested.pop(room, None)
        self.ended[room] = EndedRoom(reason, told)
        if len(self.ended) > MAX_ENDED:
            self.ended.popitem(last=False)

    def refuse(self, room: int, reason: str) -> None:
        """A request has failed that never had a sender: decode ranks are told, or when they ask."""
        self.drop_left()
        with self._between_asks(room), self.ended_lock:
            if room in self.requested:  # another of that number
                return
            self._note_ended(room, reason, set())
            self.tell_who_has_asked(room)
            self.unrequested.pop(room, None)
            self._drop_room(room)

    def tell_who_has_asked(self, room: int) -> None:
        """Decode ranks that asked for an ended request in time, and do not know that it has."""
        with self.ended_lock:
            known = self.ended.get(room)
            if known is None:
                return
            targets = [to for to in self._room_notify_targets(room) if to not in known.told]
            known.told.update(targets)
        if self.may_free(room):
            self._tell_ended(room, targets, known.reason)

    def may_free(self, room: int) -> bool:
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
        with self.ended_lock:
            self.poisoned[room] = None
            self.poisoned.move_to_end(room)
            if len(self.poisoned) > MAX_POISONED:
                oldest, _ = self.poisoned.popitem(last=False)
                self._deferred_ack_poisoned_rooms.discard(oldest)
                self._staging_outstanding.pop(oldest, None)
        if room not in self.request_status:
            self.drop_reason(room)

    def drop_left(self) -> None:
        """Rooms of requests that are gone, and that nobody has cleared.

        Before anything else is noted: what comes of such a room is another request's.
        """
        while self.left:
            try:
                room, told = self.left.popleft()
            except IndexError:  # another thread was quicker
                return
            self._drop_left(room, told)

    def _drop_left(self, room: int, told: Set[Endpoint]) -> None:
        with self._between_asks(room), self.ended_lock:
            if room in self.requested:  # another of that number
                return
            if self.request_status.get(room) == KVPoll.Failed:
                self._note_ended(room, self.failure_records.get(room, ABORTED), told)
                self.tell_who_has_asked(room)
            self._drop_room(room)
            self._drop_count(room)

    def _drop_count(self, room: int) -> None:
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
        with self.ended_lock:
            sender = self.requested.get(bootstrap_room)
            if targets is None:
                targets = self._room_notify_targets(bootstrap_room)
            if sender is not None:
                sender.told.update(targets)
        concluded = super().conclude_transfer(
            bootstrap_room=bootstrap_room, status=status, targets=targets, **more
        )
        if bootstrap_room not in self.request_status:  # the scheduler is done with it just now
            self.drop_reason(bootstrap_room)
        return concluded

    def _tell_ended(self, room: int, targets: List[Endpoint], reason: str) -> None:
        self.send_kv_status_message(
            targets=targets, bootstrap_room=room, status=KVPoll.Failed, failure_reason=reason
        )

    @contextlib.contextmanager
    def _between_asks(self, room: int) -> Iterator[None]:
        """Not in the midst of one; for a thread that does not come back is waited once."""
        has_lock = self.ask_lock.acquire(timeout=self.ask_patience)
        if not has_lock and self.asked_room == room:
            has_lock = self.ask_lock.acquire(timeout=SAME_ROOM_SECONDS)
        self.ask_patience = MAX_ASK_SECONDS if has_lock else 0
        try:
            yield
        finally:
            if has_lock:
                self.ask_lock.release()

    def end_ask(self) -> None:
        """The thread that reads messages has kept what the last one asked for."""
        if self.is_asked:
            self.is_asked = False
            self.ask_lock.release()

    def tells_ended(self, info: Any) -> bool:
        """Whether the room that a decode rank asks for has failed here; it is told then.

        One that asks again after it was told so has a new request of that number. If the engine is
        to keep it, `end_ask` must follow: the room cannot end meanwhile.
        """
        self.drop_left()
        self.asked_room = info.room  # before it is waited for
        self.is_asked = self.ask_lock.acquire()
        if info.is_dummy:
            return False
        endpoint = (info.endpoint, info.dst_port)
        with self.ended_lock:
            known = self.ended.get(info.room)
            if known is None or endpoint in known.told:
                self.ended.pop(info.room, None)
                return False
            _add(known.told, endpoint)
        self.end_ask()
        self._tell_ended(info.room, [endpoint], known.reason)
        return True

    def _prefetch_staging_reqs(self, room: int) -> None:
        """As the engine's, once all decode ranks of the room, which it goes through, have asked."""
        if self.request_status.get(room, KVPoll.Failed) > KVPoll.Bootstrapping:
            super()._prefetch_staging_reqs(room)

    def _handle_abort_notification(self, msg: List[bytes]) -> bool:
        """As the engine's; who gives a room up knows that it fails, and is not told so."""
        self.drop_left()
        room, endpoint = _given_up(msg)
        with self.ended_lock:
            known = self.requested.get(room) or self.ended.get(room)
            if known is not None and endpoint is not None:
                _add(known.told, endpoint)
        is_taken = super()._handle_abort_notification(msg)
        if room in self.transfer_infos and room not in self.request_status:
            # Not all its decode ranks have asked: the engine would forget the abort, and the
            # request that is to come wait for them.
            self.request_status[room] = KVPoll.Failed
        self.note_unrequested(room, endpoint)
        return is_taken

    def _maybe_ack_drained_abort(self, room: int) -> None:
        """As the engine's; what counts a room's chunks goes with the last one."""
        super()._maybe_ack_drained_abort(room)
        self._drop_count(room)

    def note_unrequested(self, room: Optional[int], given_up: Optional[Endpoint] = None) -> None:
        """Of rooms without a request is kept what the engine needs, for the last ones.

        given_up: The decode rank that gives the room up, and is not told that it fails.
        """
        with self.ended_lock:
            is_kept = room in self.request_status or room in self.transfer_infos
            if is_kept and room not in self.requested:
                known = self.unrequested.setdefault(room, set())
                if given_up is not None:
                    _add(known, given_up)
                if len(self.unrequested) > MAX_ENDED:
                    oldest, _ = self.unrequested.popitem(last=False)
                    self._drop_room(oldest)


def _add(told: Set[Endpoint], endpoint: Endpoint) -> None:
    """So many at most: a peer may say that it is at any port."""
    if len(told) < MAX_TOLD:
        told.add(endpoint)


def _given_up(msg: List[bytes]) -> Tuple[Optional[int], Optional[Endpoint]]:
    """Room and decode rank of an ABORT; None where it does not say them, as the engine logs."""
    room = endpoint = None
    if msg and msg[0] == ABORT:
        with contextlib.suppress(IndexError, ValueError):
            room = int(msg[1])
            endpoint = (msg[2].decode("ascii"), int(msg[3]))
    return room, endpoint


class EndingSender:
    """A prefill rank's KV sender, over the engine's."""

    is_cleared = False
    reason: Optional[str] = None  # why it was aborted
    left: Optional[weakref.finalize] = None  # what is done when it is gone and was not cleared
    told: Set[Endpoint]  # decode ranks that know how it ended

    def __init__(self, mgr: Any, bootstrap_addr: str, bootstrap_room: int, *more, **options):
        if hasattr(mgr, "note_requested"):  # Mori's has not
            mgr.note_requested(bootstrap_room, self)
        super().__init__(mgr, bootstrap_addr, bootstrap_room, *more, **options)

    def abort(self):
        """As the engine's; decode ranks that have asked are told, and the room is dropped.

        The engine drops it where it polls the request again, which it may never do.
        """
        if self.is_cleared:
            return
        super().abort()
        self._tell_failed()
        if self._tells_decode():
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
            self._tell_failed()
        return status

    def _tells_decode(self) -> bool:
        """Not over Mori; and of an allocation policy `prefill_complete` the engine does it."""
        return hasattr(self.kv_mgr, "note_ended") and self.kv_mgr.deferred_bootstrap is None

    def _tell_failed(self) -> None:
        """Decode keeps its pages until we say that nothing is written any more; not before that.

        Who has heard already how the request ended, also that it has all, does not hear it anew.
        """
        manager, room = self.kv_mgr, self.bootstrap_room
        if self._tells_decode() and manager.may_free(room):
            targets = [to for to in manager._room_notify_targets(room) if to not in self.told]
            reason = manager.failure_records.get(room, "")
            manager.conclude_failure(bootstrap_room=room, failure_reason=reason, targets=targets)

    def clear(self) -> None:
        """As the engine's, once; decode ranks that ask for a room that failed are told then."""
        if self.is_cleared:  # the room may be another request's
            return
        self.is_cleared = True
        if self.left is not None:  # it may be gone much later, when the room is another request's
            self.left.detach()
        manager, room = self.kv_mgr, self.bootstrap_room
        if self.conclude_state == KVPoll.Failed and self._tells_decode():
            reason = manager.failure_records.get(room, "another prefill rank failed")
            manager.note_ended(room, reason, self.told)
            manager.tell_who_has_asked(room)
        with manager.status_lock:
            super().clear()
