"""Rooms on a prefill rank and its decode ranks, whatever ends their requests, in any order.

decode rank   request, abort -> outbox -> prefill rank     in order; at once, later, twice, never
              <- success, failure, ABORT_ACK               at once
scheduler     calls senders; drops them without a call     also while a message is being stored
worker        sends one chunk at a time, or fails to       the scheduler may act as it concludes

`Rooms` predicts every notification. A decode rank whose request is stored when prefill's request
ends is notified once; nothing else is sent. If decode ranks interleave, success comes after the
names of all chunks. The machine keeps to two rules about reuse:

- A decode rank uses a room again once its own request there is over, its messages have arrived or
  are lost, and prefill has dropped the request that it notified or that was aborted.
- Prefill gets the next request of a room once it has dropped the last one, and nobody uses a room
  while a chunk for it is queued.
"""

import contextlib
import functools
import gc
import itertools
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import fake_managers
import numpy as np
import pytest
from fake_managers import EndOfMessages, backend_of, process_messages, queued_chunks
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
    run_state_machine_as_test,
)
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common import conn as common
from sglang.srt.disaggregation.kv_layout import decode_units
from sglang.srt.disaggregation.pd.unit_exchange import UNITS

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("published")]

SETTINGS = settings(
    stateful_step_count=35,
    derandomize=True,
    deadline=None,
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)
EXAMPLES, NIGHTLY_EXAMPLES = 50, 500
ROOMS = (1, 2)
UNUSED_ROOM = 9
PAGES = 4  # of a request; a chunk other than the last has two
UNITS_OF_ROOM = [(0, PAGES)], [(0, PAGES // 2), (PAGES // 2, PAGES)]
PATIENCE = 10.0  # seconds until the thread that reads messages counts as hung
REFUSED = "too long"

# The engine's names and texts

ADDRESS = "127.0.0.1:8998"
ENDED = (KVPoll.Success, KVPoll.Failed)
ABORTED = "Aborted by AbortReq."
DROPPED = "Aborted on prefill"  # without a call, while decode waits; ours
# What prefill records as the reason when decode aborts; None if it records nothing.
DECODE_ABORT = {"nixl": "Aborted by decode-side abort notification.", "mooncake": None}
WORKER_ARGUMENTS = {"nixl": (), "mooncake": (SimpleNamespace(_max_workers=1),)}

# Tables that have no entries once all requests are over.
FAILURE_TABLES = ("senders", "collected_rooms", "postponed")
DECODE_TABLES = (
    "request_status",
    "failure_records",
    "prefill_response_tracker",
    "required_prefill_response_num_table",
    "_deferred_abort_ack_tracker",
    "requested_ranks",
    "arrived_digests",
    "arrived_units",
)


class WatchedTable(dict):
    """A table of the prefill rank; calls `reached` before a lookup and after a write."""

    def __init__(self, reached: Callable[[str], None], lookup: str, write: str):
        super().__init__()
        self.reached, self.lookup, self.write = reached, lookup, write

    def __contains__(self, room) -> bool:
        self.reached(self.lookup)
        return super().__contains__(room)

    def __setitem__(self, room, value):
        super().__setitem__(room, value)
        self.reached(self.write)


class Reader:
    """The prefill rank's thread that reads messages. It can pause while it stores one.

    It pauses after our check of the message (`checked`), before the engine has stored anything of
    it; after the first entry for its room (`begun`); or before the engine opens a room that all
    decode ranks have requested (`stored`). A message that does not get that far is stored at once.
    """

    POINTS = ("checked", "begun", "stored")

    def __init__(self, prefill: Any):
        self.prefill = prefill
        prefill.transfer_infos = WatchedTable(self._reached, "checked", "begun")
        prefill.req_to_decode_prefix_len = WatchedTable(self._reached, "", "stored")
        self.is_paused = False
        self._point: str | None = None
        self._error: BaseException | None = None
        self._has_stopped, self._may_go_on = threading.Semaphore(0), threading.Semaphore(0)

    def read(self, frames: list[bytes], point: str | None = None) -> bool:
        """Reads a message; returns whether the thread has paused at `point`.

        Raises:
            Exception: Whatever would crash the thread.
        """
        if point is None:
            process_messages(self.prefill, frames)
            return False
        self._point, self._error = point, None
        threading.Thread(target=self._run, args=(frames,), daemon=True).start()
        return self._wait()

    def resume(self) -> None:
        """Lets the paused thread store its message; raises what would crash it."""
        self.is_paused = False
        self._may_go_on.release()
        self._wait()

    def _run(self, frames: list[bytes]) -> None:
        try:
            process_messages(self.prefill, frames)
        except BaseException as error:
            self._error = error
        self._point = None
        self._has_stopped.release()

    def _wait(self) -> bool:
        assert self._has_stopped.acquire(timeout=PATIENCE), "the thread that reads messages hangs"
        if self._error is not None:
            raise self._error
        return self.is_paused

    def _reached(self, point: str) -> None:
        if point == self._point:  # nobody else runs until the thread has stopped
            self._point, self.is_paused = None, True
            self._has_stopped.release()
            self._may_go_on.acquire()


class OneChunk:
    """A queue for a transfer worker, which stops after one chunk."""

    def __init__(self, queue: Any):
        self.queue, self.chunk = queue, None

    def get(self) -> Any:
        if self.chunk is not None:
            raise EndOfMessages
        self.chunk = self.queue.get()
        return self.chunk


class WriteFailure(NamedTuple):
    """A way in which a write fails.

    Attributes:
        method: The transfer library's method that fails.
        result: What it returns; None if it raises an exception.
        reason: Part of the reason of the failure; None for the exception's text.
    """

    method: str
    result: Any = None
    reason: str | None = None

    @property
    def is_unknown(self) -> bool:
        """Whether the write may still be running, as NIXL does not report its state."""
        return self.method == "check_xfer_state" and self.result is None


FAILURES = {
    "nixl": (
        WriteFailure("transfer"),
        WriteFailure("check_xfer_state", "ERR", "encountered ERR"),
        WriteFailure("check_xfer_state", None, "left a handle running"),
    ),
    "mooncake": (
        WriteFailure("batch_transfer_sync", -1, "Failed to send"),
        WriteFailure("batch_transfer_sync"),
    ),
}


@contextlib.contextmanager
def failing_write(
    prefill: Any, failure: WriteFailure | None, at: int, text: str
) -> Iterator[list[WriteFailure]]:
    """Lets writes fail within the block; yields a list of those that have failed.

    Args:
        failure: None if all succeed.
        at: Number of the write that fails; the states of all writes are reported as failed.
        text: The exception's text.
    """
    failed = []
    if failure is None:
        yield failed
        return
    library = prefill.agent if backend_of(prefill) == "nixl" else prefill.engine
    call, number = getattr(library, failure.method), itertools.count()

    def fail(*given):
        if failure.method != "check_xfer_state" and next(number) != at:
            return call(*given)
        failed.append(failure)
        if failure.result is None:
            raise OSError(text)
        return failure.result

    with mock.patch.object(library, failure.method, fail):
        yield failed


# What is expected


class Notification(NamedTuple):
    """What a decode rank is notified of.

    Attributes:
        reason: Part of the reason of a failure; None if any will do.
        is_certain: False if the notification may be missing.
    """

    status: int
    reason: str | None
    is_certain: bool = True


@dataclass(eq=False, repr=False)
class Request:
    """A request on prefill.

    Attributes:
        sender: None if it was dropped, or if the request was refused.
        status: A status in `ENDED`; None while the request is open.
        reason: Part of the reason that the scheduler gets; None if none was recorded.
        sent: Number of pages handed to the workers.
        is_over: Whether the scheduler has cleared it.
    """

    room: "PrefillRoom"
    status: int | None = None
    sender: Any = None
    reason: str | None = None
    sent: int = 0
    is_over: bool = False


@dataclass(eq=False, repr=False)
class Failure:
    """A failed request that prefill remembers.

    Attributes:
        informed: Decode ranks that know; from others, the next message is still for this request.
    """

    reason: str | None
    informed: set["DecodeRoom"]


@dataclass(eq=False, repr=False)
class PrefillRoom:
    """A room on the prefill rank.

    Attributes:
        request: The request that has the room until its sender is cleared, or dropped and noticed.
        reason: Part of the recorded reason of a failure.
        remembered: The failure of the last request, until the room is used again.
        has_abort: Whether a decode rank has aborted the room before its request has come.
        chunks: Number of chunks for the room in the queue, of this request or the last one.
        storing: The decode rank whose request is being stored; the thread that reads is paused.
        is_ending: Whether the room ends once that is stored.
    """

    number: int
    decode_rooms: list["DecodeRoom"] = field(default_factory=list)
    request: Request | None = None
    reason: str | None = None
    remembered: Failure | None = None
    has_abort: bool = False
    chunks: int = 0
    storing: "DecodeRoom | None" = None
    is_ending: bool = False

    def is_live(self) -> bool:
        """Returns whether the scheduler has a request here that it has not cleared."""
        request = self.request
        return request is not None and request.sender is not None and not request.is_over

    def is_open(self) -> bool:
        return self.is_live() and self.request.status is None

    def is_left(self) -> bool:
        """Returns whether the request's sender was dropped, which prefill has not noticed yet."""
        request = self.request
        return request is not None and request.sender is None and not self.is_ending

    def is_requested(self) -> bool:
        """Returns whether all decode ranks wait for the room."""
        return all(one.is_waiting for one in self.decode_rooms)

    def is_used(self) -> bool:
        """Returns whether prefill may have entries for the room."""
        is_waited_for = any(one.is_waiting for one in self.decode_rooms)
        return bool(self.request or self.has_abort or self.storing or is_waited_for)

    def may_open(self) -> bool:
        if self.is_ending or self.chunks:
            return False
        return self.request is None or (self.is_left() and self.storing is None)

    def may_time_out(self) -> bool:
        return self.is_open() and not self.is_requested()

    def may_send(self) -> bool:
        request = self.request
        if not self.is_live() or request.sent == PAGES:
            return False
        if request.sent:
            return True
        return request.status is None and self.is_requested() and self.storing is None

    def may_be_cleared(self) -> bool:
        return self.is_live() and self.request.status == KVPoll.Success


class DecodeRank:
    """A decode rank, and its messages that have not arrived.

    Attributes:
        named: Rooms whose chunks prefill has named since it last sent their status.
    """

    def __init__(self, backend: str, number: int, count: int, interleaves: bool):
        """Makes rank `number` of `count`, each of which requests all of the rooms' pages."""
        layout = fake_managers.gqa_layout((0, 1)) if interleaves else None
        decode = self.manager = fake_managers.decode_rank(backend, layout, number)
        job = SimpleNamespace(is_done=lambda: True, cancel=lambda: None)
        decode.interleaver = SimpleNamespace(start=lambda *given: job)  # without a thread
        info = decode.prefill_info_table[ADDRESS] = decode.placeholder_prefill_info()
        info.target_tp_rank, info.required_prefill_response_num = 0, 1
        info.attn_tp_size = 2 if interleaves else 1
        info.target_tp_ranks = info.target_cp_ranks = info.target_pp_ranks = [0]
        info.required_dst_info_num = count
        rank = {"rank_ip": "127.0.0.1", "rank_port": 7999, "pp_rank": 0, "is_dummy": False}
        decode.connection_pool[f"{ADDRESS}_0_0_0"] = [rank]
        self.backend, self.port = backend, str(decode.rank_port)
        self.outbox: deque[tuple[DecodeRoom, list[bytes]]] = deque()
        self.named: set[int] = set()


@dataclass(eq=False, repr=False)
class DecodeRoom:
    """A room on a decode rank; also the socket to prefill of its receivers.

    Attributes:
        receiver: The receiver of the request that the rank has in the room, or None.
        answer: What prefill has notified it of.
        in_flight: Number of its messages for this room that have not arrived.
        is_waiting: Whether prefill has stored its request, and has not notified it of the end.
        is_informed: Whether prefill counts it among those that know how its request ends.
    """

    rank: DecodeRank
    room: PrefillRoom
    receiver: Any = None
    answer: Notification | None = None
    in_flight: int = 0
    is_waiting: bool = False
    is_informed: bool = False

    def send_multipart(self, frames: list[bytes]) -> None:
        self.rank.outbox.append((self, frames))
        self.in_flight += 1

    def has_request(self) -> bool:
        return self.receiver is not None

    def is_answered(self) -> bool:
        return self.receiver is not None and self.answer is not None

    def has_messages(self) -> bool:
        return bool(self.rank.outbox)

    def may_request(self) -> bool:
        if self.receiver is not None or self.in_flight or self.room.chunks:
            return False
        return not (self.is_waiting or self.is_informed or self.room.storing is self)

    def open(self) -> None:
        """Makes the receiver of a new request, which knows its prefill rank at once."""
        make = fake_managers.RECEIVERS[self.rank.backend]
        self.receiver = make(self.rank.manager, ADDRESS, self.room.number)
        self.receiver._connect_to_bootstrap_server = lambda rank: (self, contextlib.nullcontext())
        self.receiver.init(0)
        self.answer = None

    def abort(self, copies: int = 1) -> None:
        """Aborts the request, as for its client; its ABORT is sent `copies` times."""
        self.receiver.abort()
        sender, frames = self.rank.outbox.pop()
        assert sender is self
        self.in_flight -= 1
        for _ in range(copies):
            self.send_multipart(list(frames))
        self.answer = Notification(KVPoll.Failed, ABORTED)
        self.finish()

    def finish(self) -> None:
        """Finishes the request as decode's scheduler does: it sends an ABORT after a failure."""
        (status, reason, _), manager = self.answer, self.rank.manager
        assert self.receiver.poll() == status
        if status == KVPoll.Success:
            self.receiver.clear()
        else:
            check_reason(self.receiver, reason or "")
            if manager.enable_deferred_decode_kv_release:
                self.receiver.ensure_abort_notified(force_arm=True)
        manager.clear_deferred_abort_state(self.room.number)
        self.receiver = self.answer = None


def check_reason(side: Any, reason: str | None) -> None:
    """Checks the failure that a sender or receiver raises.

    Args:
        reason: Part of its reason; None if none was recorded on this rank.
    """
    try:
        side.failure_exception()
    except common.KVTransferError as error:  # kept no longer than here: its traceback keeps `side`
        text, is_unknown = error.failure_reason, error.is_from_another_rank
    else:
        raise AssertionError("no failure was raised")
    if reason is None:
        assert is_unknown, f"the reason is another request's: {text}"
    else:
        assert reason in text


rooms, decode_rooms, finished = map(Bundle, ("rooms", "decode_rooms", "finished"))


def rule_about(
    name: str, bundle: Bundle, condition: Callable, needs_reader: bool = False, **options: Any
) -> Callable:
    """Returns a decorator for rules about a room that meets the condition.

    Args:
        name: `room` for one on prefill, `decode_room` for one on decode.
        bundle: All of these rooms.
        needs_reader: Whether prefill's thread that reads messages must not be paused.
    """

    def is_possible(machine: "Rooms") -> bool:
        if needs_reader and machine.reader.is_paused:
            return False
        return any(map(condition, getattr(machine, f"all_{name}s")))

    made = rule(**{name: bundle.filter(condition)}, **options)
    return lambda method: precondition(is_possible)(made(method))


room_rule = functools.partial(rule_about, "room", rooms)
decode_room_rule = functools.partial(rule_about, "decode_room", decode_rooms)


class Rooms(RuleBasedStateMachine):
    """One prefill rank and one or two decode ranks, which share a few rooms.

    Attributes:
        interleaves: Whether decode interleaves what prefill sends.
        chunks: Queued chunks in order: the room, and whether the chunk is the last one.
        due: Notifications of decode ranks that are not checked yet.
        requests: All requests on prefill.
        faults: Texts of failures, each of them another one.
    """

    backend = ""
    interleaves = False

    def __init__(self):
        freeze_heap()
        super().__init__()
        layout = fake_managers.gqa_layout((0, 2)) if self.interleaves else None
        self.prefill = fake_managers.prefill_rank(self.backend, layout)
        self.reader = Reader(self.prefill)
        self.all_rooms = [PrefillRoom(number) for number in ROOMS]
        self.all_decode_rooms: list[DecodeRoom] = []
        self.ranks: list[DecodeRank] = []
        self.chunks: deque[tuple[PrefillRoom, bool]] = deque()
        self.due: dict[DecodeRoom, Notification] = {}
        self.requests: list[Request] = []
        self.faults = map("fault {}".format, itertools.count(1))
        self.error_before = sys.exc_info()[1]

    @initialize(target=rooms)
    def number_rooms(self):
        return multiple(*self.all_rooms)

    @initialize(
        target=decode_rooms,
        count=st.integers(1, 2),
        is_deferred=st.sampled_from((True, True, False)),
    )
    def register_decode_ranks(self, count, is_deferred):
        """Registers the decode ranks; without deferred release, few failures are reported."""
        same = {"count": count, "interleaves": self.interleaves}
        self.ranks = [DecodeRank(self.backend, number, **same) for number in range(count)]
        for manager in (self.prefill, *(rank.manager for rank in self.ranks)):
            manager.enable_deferred_decode_kv_release = is_deferred
        for rank in self.ranks:
            fake_managers.register(self.prefill, rank.manager)
        for room in self.all_rooms:
            room.decode_rooms = [DecodeRoom(rank, room) for rank in self.ranks]
            self.all_decode_rooms += room.decode_rooms
        return multiple(*self.all_decode_rooms)

    # Prefill's scheduler

    @room_rule(PrefillRoom.may_open)
    def request_arrives(self, room):
        self.notice_left_rooms()
        room.remembered = None
        room.request = Request(room, KVPoll.Failed if room.has_abort else None)
        room.has_abort = False
        self.requests.append(room.request)
        make = fake_managers.SENDERS[self.backend]
        room.request.sender = make(self.prefill, ADDRESS, room.number)

    @room_rule(PrefillRoom.may_open)
    def request_is_refused(self, room):
        """The request never gets a sender."""
        self.notice_left_rooms()
        room.request = Request(room, KVPoll.Failed)
        room.reason = REFUSED
        self.prefill.refuse(room.number, REFUSED)
        self.end_when_stored(room)

    @room_rule(PrefillRoom.is_live)
    def scheduler_polls(self, room):
        status = room.request.sender.poll()
        if room.request.status is None:
            assert status not in ENDED
        else:
            assert status == room.request.status

    @room_rule(PrefillRoom.may_time_out)
    def request_times_out(self, room):
        room.reason, room.request.status = f"Request {room.number} timed out", KVPoll.Failed
        self.expect(room, KVPoll.Failed, room.reason, self.is_release_safe(room))
        with mock.patch.object(self.prefill, "bootstrap_timeout", -1):
            assert room.request.sender.poll() == KVPoll.Failed

    @room_rule(PrefillRoom.is_open)
    def request_fails_in_another_thread(self, room):
        """A decode rank falls silent, or pages of a chunk do not arrive."""
        text = next(self.faults)
        room.reason, room.request.status = text, KVPoll.Failed
        self.expect(room, KVPoll.Failed, text)
        self.prefill.conclude_failure(bootstrap_room=room.number, failure_reason=text)

    @room_rule(PrefillRoom.is_live, target=finished)
    def scheduler_takes_the_reason(self, room):
        """The request has failed here, or on another prefill rank."""
        return self.finish(room, self.take_reason)

    @room_rule(PrefillRoom.may_be_cleared, target=finished)
    def scheduler_clears_a_success(self, room):
        return self.finish(room, self.clear)

    @room_rule(PrefillRoom.is_live, target=finished)
    def prefill_client_aborts(self, room):
        return self.finish(room, self.abort)

    @room_rule(PrefillRoom.is_live)
    def sender_is_dropped(self, room):
        """The scheduler drops a request that it has not cleared."""
        self.collect(room.request)

    @rule(request=finished, call=st.sampled_from(("poll", "clear", "abort", "reason")))
    def scheduler_calls_a_cleared_sender(self, request, call):
        """Such a call affects no other request in the room."""
        if call == "poll":
            assert request.sender.poll() == request.status
        elif call != "reason":
            getattr(request.sender, call)()
        elif request.status == KVPoll.Failed:
            check_reason(request.sender, request.reason)

    @rule(request=consumes(finished))
    def cleared_sender_is_dropped(self, request):
        self.collect(request)

    # Chunks

    @room_rule(PrefillRoom.may_send, is_last=st.booleans())
    def scheduler_sends_a_chunk(self, room, is_last):
        request = room.request
        if not request.sent:
            request.sender.pop_decode_prefix_len()
            request.sender.init(PAGES, 0)
        start, request.sent = request.sent, PAGES if is_last or request.sent else PAGES // 2
        before = queued_chunks(self.prefill)
        request.sender.send(np.arange(start, request.sent, dtype=np.int32))
        for _ in range(queued_chunks(self.prefill) - before):
            self.chunks.append((room, request.sent == PAGES))
            room.chunks += 1

    @precondition(lambda machine: bool(machine.chunks))
    @rule(
        target=finished,
        failure=st.integers(0, 3),
        at=st.integers(0, 3),
        meanwhile=st.sampled_from((None, "abort", "finish", "reason")),
        is_before=st.booleans(),
    )
    def worker_sends_a_chunk(self, failure, at, meanwhile, is_before):
        """A worker takes a chunk; the scheduler may act just as it concludes the room.

        Args:
            failure: Selects how writes fail, if at all; the write with number `at` is the first.
            meanwhile: What the scheduler does, before or after the room's status is set.
        """
        failures = (None, *FAILURES[self.backend])
        request = self.run_worker(failures[failure % len(failures)], at, meanwhile, is_before)
        return self.kept(request)

    # Decode

    @decode_room_rule(DecodeRoom.may_request, arrives=st.booleans())
    def decode_requests(self, decode_room, arrives):
        """A decode rank sends its metadata."""
        decode_room.open()
        decode_room.receiver.send_metadata(np.arange(PAGES, dtype=np.int32), 0)
        self.let_messages_arrive(decode_room, arrives)

    @decode_room_rule(
        DecodeRoom.has_request, copies=st.sampled_from((1, 0, 2)), arrives=st.booleans()
    )
    def decode_client_aborts(self, decode_room, copies, arrives):
        """The rank may not know yet that it was notified; its ABORT may get lost, or come twice."""
        decode_room.abort(copies)
        self.let_messages_arrive(decode_room, arrives)

    @decode_room_rule(
        DecodeRoom.may_request, copies=st.sampled_from((1, 0, 2)), arrives=st.booleans()
    )
    def decode_aborts_what_it_never_requests(self, decode_room, copies, arrives):
        """The client leaves before the rank has allocated pages, or the servers do not match."""
        decode_room.open()
        decode_room.abort(copies)
        self.let_messages_arrive(decode_room, arrives)

    @decode_room_rule(DecodeRoom.is_answered, arrives=st.booleans())
    def decode_finishes(self, decode_room, arrives):
        """The rank's scheduler sees what prefill has notified it of; it answers a failure."""
        decode_room.finish()
        self.let_messages_arrive(decode_room, arrives)

    @decode_room_rule(
        DecodeRoom.has_messages, needs_reader=True, point=st.sampled_from((None, *Reader.POINTS))
    )
    def message_arrives(self, decode_room, point):
        """The rank's oldest message arrives; the thread that reads it may pause at `point`."""
        self.arrive(decode_room.rank, point)

    @precondition(lambda machine: machine.reader.is_paused)
    @rule()
    def message_is_stored(self):
        (room,) = (one for one in self.all_rooms if one.storing is not None)
        decode_room, room.storing = room.storing, None
        if not decode_room.is_informed:
            decode_room.is_waiting = True
        self.reader.resume()
        if room.is_ending:
            self.end(room)

    # What these steps lead to

    def let_messages_arrive(self, decode_room: DecodeRoom, arrives: bool) -> None:
        """Lets the rank's messages arrive, unless the thread that reads them is paused."""
        while arrives and decode_room.rank.outbox and not self.reader.is_paused:
            self.arrive(decode_room.rank)

    def arrive(self, rank: DecodeRank, point: str | None = None) -> None:
        decode_room, frames = rank.outbox.popleft()
        decode_room.in_flight -= 1
        room = decode_room.room
        self.notice_left_rooms()
        known = room.remembered
        if frames[0] == common.ABORT_TAG:
            self.note_abort(decode_room)
            self.reader.read(frames)
        elif known is not None and decode_room not in known.informed:
            known.informed.add(decode_room)
            self.due[decode_room] = Notification(KVPoll.Failed, known.reason)
            self.reader.read(frames)
        else:
            room.remembered = None
            is_paused = self.reader.read(frames, point)
            if is_paused:
                room.storing = decode_room
            decode_room.is_waiting = not is_paused or point == "stored"
        self.check_notifications()

    def note_abort(self, decode_room: DecodeRoom) -> None:
        """Notes that a decode rank's ABORT is about to be read."""
        room = decode_room.room
        reason = DECODE_ABORT[self.backend] or room.reason
        if room.request is not None:
            if room.request.status != KVPoll.Success:
                room.reason, room.request.status = reason, KVPoll.Failed
        elif room.remembered is not None:
            room.remembered.informed.add(decode_room)
            return
        elif room.has_abort or any(one.is_waiting for one in room.decode_rooms):
            if room.has_abort or room.is_requested():  # else it has no status to fail
                room.reason = reason
            room.has_abort = True
        else:
            return  # nothing is known of the room
        decode_room.is_waiting, decode_room.is_informed = False, True

    def finish(self, room: PrefillRoom, act: Callable[[PrefillRoom], None]) -> Any:
        """Ends a room's request by `act`; returns what its rule adds to `finished`."""
        request = room.request
        act(room)
        return self.kept(request)

    def take_reason(self, room: PrefillRoom) -> None:
        room.request.status = KVPoll.Failed
        check_reason(room.request.sender, room.reason)
        self.note_cleared(room)

    def clear(self, room: PrefillRoom) -> None:
        sender = room.request.sender
        assert sender.poll() == KVPoll.Success
        sender.clear()
        self.note_cleared(room)

    def abort(self, room: PrefillRoom) -> None:
        room.reason, room.request.status = ABORTED, KVPoll.Failed
        self.expect(room, KVPoll.Failed, ABORTED, self.is_release_safe(room))
        room.request.sender.abort()
        self.note_cleared(room)

    def note_cleared(self, room: PrefillRoom) -> None:
        room.request.reason, room.request.is_over = room.reason, True
        self.end_when_stored(room)

    def collect(self, request: Request) -> None:
        """Drops a request's sender."""
        gone = weakref.ref(request.sender)
        request.sender = None
        gc.collect()
        # Until its room ends, what ends the room keeps it.
        assert gone() is None or request.room.is_ending, "something else keeps the sender"

    def kept(self, request: Request | None) -> Any:
        """Returns what a rule adds to `finished`: a request that is over and has its sender."""
        is_kept = request is not None and request.is_over and request.sender is not None
        return multiple(request) if is_kept else multiple()

    def notice_left_rooms(self) -> None:
        """Ends the rooms whose senders were dropped: prefill notices them before anything else."""
        for room in self.all_rooms:
            if room.is_left():
                self.end_when_stored(room)

    def end_when_stored(self, room: PrefillRoom) -> None:
        if room.storing is None:
            self.end(room)
        else:
            room.is_ending = True

    def end(self, room: PrefillRoom) -> None:
        """Ends a room: those that wait are notified of a failure, which is remembered.

        A request has failed, too, if the scheduler drops it once all decode ranks wait for it.
        """
        room.remembered = None
        if room.request.status is None and room.is_requested():
            room.reason, room.request.status = DROPPED, KVPoll.Failed
        if room.request.status == KVPoll.Failed:
            self.expect(room, KVPoll.Failed, room.reason, self.is_release_safe(room))
            informed = {one for one in room.decode_rooms if one.is_informed}
            room.remembered = Failure(room.reason, informed)
        for decode_room in room.decode_rooms:
            decode_room.is_waiting = decode_room.is_informed = False
        room.request, room.reason, room.has_abort, room.is_ending = None, None, False, False

    def is_release_safe(self, room: PrefillRoom) -> bool:
        """Returns whether decode may be notified of a failure that the scheduler sees."""
        prefill = self.prefill
        is_poisoned = room.number in prefill._deferred_ack_poisoned_rooms
        return prefill.enable_deferred_decode_kv_release and not is_poisoned

    def expect(
        self, room: PrefillRoom, status: int, reason: str | None, is_notified: bool | None = True
    ) -> None:
        """Expects notifications for all who wait for a room, who then count as informed.

        Args:
            is_notified: False if they are not notified after all, None if either is right.
        """
        for decode_room in room.decode_rooms:
            if decode_room.is_waiting:
                decode_room.is_waiting, decode_room.is_informed = False, True
                if is_notified is not False:
                    self.due[decode_room] = Notification(status, reason, is_notified is True)

    @invariant()
    def check_notifications(self) -> None:
        """Checks what prefill has sent since the last call, and delivers it to decode."""
        by_port = {rank.port: rank for rank in self.ranks}
        for endpoint, frames in self.prefill.notified:
            rank = by_port[endpoint.rsplit(":", 1)[1]]
            if frames[0] == UNITS:
                assert self.interleaves and decode_units(frames[4]) in UNITS_OF_ROOM
                rank.named.add(int(frames[1]))
            elif frames[0] != common.ABORT_ACK_TAG:
                number, status, _, reason = self.prefill.parse_kv_status_message(frames)
                self.check_notification(rank, number, status, reason)
                assert status == KVPoll.Failed or (number in rank.named) == self.interleaves
                rank.named.discard(number)
            process_messages(rank.manager, frames)
        self.prefill.notified.clear()
        missing = [one for one, expected in self.due.items() if expected.is_certain]
        self.due.clear()
        assert not missing, [
            f"decode rank {one.rank.port} is not notified of the end of room {one.room.number}"
            for one in missing
        ]

    def check_notification(
        self, rank: DecodeRank, number: int, status: int, reason: str | None
    ) -> None:
        (decode_room,) = (
            one for one in self.all_decode_rooms if one.rank is rank and one.room.number == number
        )
        expected = self.due.pop(decode_room, None)
        assert expected is not None, (
            f"decode rank {rank.port} is notified of status {status} of room {number} ({reason}): "
            "it has no request there that ended, or is notified again"
        )
        assert status == expected.status
        assert expected.reason is None or expected.reason in (reason or "")
        if decode_room.receiver is not None:
            decode_room.answer = Notification(status, reason)

    # A worker

    def run_worker(
        self,
        failure: WriteFailure | None = None,
        at: int = 0,
        meanwhile: str | None = None,
        is_before: bool = False,
    ) -> Request | None:
        """Lets a worker send the oldest chunk; returns its request if that was open."""
        room, is_last = self.chunks.popleft()
        room.chunks -= 1
        request = room.request
        if request is not None and request.status is not None:
            request = None
        update, concluded, text = self.prefill.update_status, [], next(self.faults)
        reason = (failure and failure.reason) or text
        is_unknown = failure is not None and failure.is_unknown

        def update_once_interrupted(bootstrap_room, status):
            if status not in ENDED or concluded:
                return update(bootstrap_room, status)
            concluded.append(status)
            self.note_concluded(room, status, reason, is_unknown, meanwhile)
            if is_before:
                self.interrupt(room, meanwhile)
            update(bootstrap_room, status)
            if not is_before:
                self.interrupt(room, meanwhile)

        (queue,) = set(self.prefill.transfer_queues)
        one = OneChunk(queue)
        with (
            failing_write(self.prefill, failure, at, text) as failed,
            mock.patch.object(self.prefill, "update_status", update_once_interrupted),
            contextlib.suppress(EndOfMessages),
        ):
            self.prefill.transfer_worker(one, *WORKER_ARGUMENTS[self.backend])
        if self.backend == "mooncake":
            self.prefill.failed_sessions.clear()  # else its next writes fail for some time
        assert one.chunk.room == room.number
        is_sent = request is not None
        assert bool(concluded) == (is_sent and (is_last or bool(failed)))
        assert not concluded or (concluded[0] == KVPoll.Failed) == bool(failed)
        return request

    def note_concluded(
        self, room: PrefillRoom, status: int, reason: str, is_unknown: bool, meanwhile: str | None
    ) -> None:
        """Notes that a worker is about to set a room's final status.

        Args:
            reason: Part of the reason, if the room fails.
            is_unknown: Whether writes may still be running: decode is notified only if the
                scheduler sees the failure before prefill knows that.
        """
        room.request.status = status
        if status == KVPoll.Failed:
            room.reason = room.reason or reason
        if not is_unknown:
            self.expect(room, status, reason if status == KVPoll.Failed else None)
        else:
            self.expect(room, status, None, None if meanwhile else False)

    def interrupt(self, room: PrefillRoom, action: str | None) -> None:
        """Lets the scheduler act on a room that a worker is concluding."""
        if action is None or not room.is_live():
            return
        if action == "abort":
            self.abort(room)
        elif action == "reason":
            self.take_reason(room)
        else:
            status = room.request.sender.poll()
            if status == KVPoll.Success:
                self.clear(room)
            elif status == KVPoll.Failed:
                self.take_reason(room)

    # Invariants

    @invariant()
    def open_requests_have_all_metadata_that_arrived(self):
        for room in self.all_rooms:
            if room.is_open() and room.storing is None:
                status = self.prefill.request_status[room.number]
                if room.is_requested():
                    assert status in (KVPoll.WaitingForInput, KVPoll.Transferring)
                else:
                    assert status == KVPoll.Bootstrapping

    @invariant()
    def rooms_that_are_over_are_dropped(self):
        prefill = self.prefill
        used = {room.number for room in self.all_rooms if room.is_used()}
        assert set(prefill.request_status) <= used
        assert set(prefill.transfer_infos) <= used
        assert set(prefill.req_to_decode_prefix_len) <= used
        assert set(prefill.failure_records) <= used
        assert set(prefill.sent_pages) <= used

    def teardown(self):
        if sys.exc_info()[1] is not self.error_before:  # a step failed, or this run is given up
            if self.reader.is_paused:
                self.reader.resume()
            return
        self.finish_all()
        self.check_tables()

    def finish_all(self) -> None:
        """Ends all requests, and delivers all messages."""
        if self.reader.is_paused:
            self.message_is_stored()
            self.check_notifications()
        self.deliver_all()
        while self.chunks:
            self.run_worker()
            self.check_notifications()
        for room in self.all_rooms:
            if room.is_live():
                ends = {None: self.abort, KVPoll.Success: self.clear}
                ends.get(room.request.status, self.take_reason)(room)
                self.check_notifications()
        for request in self.requests:
            request.sender = None
        gc.collect()
        self.notice_left_rooms()
        self.reader.read([common.ABORT_TAG, b"%d" % UNUSED_ROOM])
        self.check_notifications()
        for decode_room in self.all_decode_rooms:
            if decode_room.is_answered():
                decode_room.finish()
            elif decode_room.has_request():
                decode_room.abort()
            elif decode_room.is_waiting:  # its ABORT was lost; a rank that is gone is noticed
                decode = decode_room.rank.manager
                number = decode_room.room.number
                abort = common.AbortNotification(number, decode.local_ip, decode.rank_port)
                decode_room.send_multipart(abort.to_zmq())
        self.deliver_all()

    def deliver_all(self) -> None:
        for rank in self.ranks:
            while rank.outbox:
                self.arrive(rank)

    def check_tables(self) -> None:
        """Checks that what is kept of rooms without a request is bounded, and nothing else is."""
        prefill, failures = self.prefill, self.prefill.failures
        aborted = {room.number for room in self.all_rooms if room.has_abort}
        assert set(failures.rooms_without_sender) == aborted
        tables = ("request_status", "transfer_infos", "req_to_decode_prefix_len", "failure_records")
        for name in tables:
            assert set(getattr(prefill, name)) <= aborted, name
        failed = {room.number for room in self.all_rooms if room.remembered is not None}
        assert set(failures.failed_rooms) == failed
        # Without deferred release, NIXL's worker leaves a count of 0 if its room is cleared
        # before it has counted its chunk as sent.
        is_deferred = prefill.enable_deferred_decode_kv_release
        counts = prefill._staging_outstanding.items()
        counted = {room for room, count in counts if count or is_deferred}
        assert counted <= prefill._deferred_ack_poisoned_rooms
        assert not prefill._deferred_ack_targets and not queued_chunks(prefill)
        for name in FAILURE_TABLES:
            assert not getattr(failures, name), name
        for decode in (rank.manager for rank in self.ranks):
            for name in DECODE_TABLES:
                assert not getattr(decode, name), name
            assert not any(decode.addr_to_rooms_tracker.values())


def freeze_heap() -> None:
    """Keeps what exists now out of later garbage collections, of which an example has several."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def frozen_heap():
    """Freezes the imported engine; each example freezes what Hypothesis keeps of the last one."""
    freeze_heap()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("frozen_heap")
@pytest.mark.parametrize("interleaves", [False, True])
@pytest.mark.parametrize(
    "examples", [EXAMPLES, pytest.param(NIGHTLY_EXAMPLES, marks=pytest.mark.nightly)]
)
def test_rooms_survive_events_in_any_order(examples, interleaves, backend):
    machine = type("Rooms", (Rooms,), {"backend": backend, "interleaves": interleaves})
    run_state_machine_as_test(machine, settings=settings(SETTINGS, max_examples=examples))
