"""Prefill notifies decode of requests that failed, even if decode requests them only later."""

import gc
from collections import deque
from concurrent.futures import ThreadPoolExecutor, wait
from weakref import WeakValueDictionary

import fake_managers
import pytest
from fake_managers import (
    ENDPOINT,
    PEER,
    backend_of,
    finish_failed,
    new_sender,
    process_messages,
    register,
    send_metadata,
)
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common import conn as common
from sglang.srt.disaggregation.pd import peer_silence, peer_sockets, room_failures
from sglang.srt.disaggregation.pd.room_failures import ABORT, abort_message
from sglang.srt.disaggregation.transfer_log.failures import failure_kind

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("published")]

ROOM = 7
ABORTED, REFUSED = "Aborted by AbortReq.", "too long"
FAILED = ("5555", ROOM, KVPoll.Failed, ABORTED)
ABORT_MESSAGE = abort_message(ROOM, ENDPOINT)  # from that decode rank


class StockSender(common.EngineCommonKVSender):
    def send(self, *_):
        raise NotImplementedError


def abort_by_decode(prefill, room: int) -> None:
    process_messages(prefill, abort_message(room, ENDPOINT))


def sent_statuses(prefill) -> list[tuple[str, int, int, str]]:
    """Returns what was sent since the last call: port, room, status and reason of each."""
    ports = [endpoint.rsplit(":", 1)[1] for endpoint, _ in prefill.notified]
    found = [(port, *said) for port, said in zip(ports, fake_managers.sent_statuses(prefill))]
    prefill.notified.clear()
    return found


def room_tables(prefill) -> list[set[int]]:
    tables = ("request_status", "transfer_infos", "req_to_decode_prefix_len")
    return [set(getattr(prefill, name)) for name in tables]


# Event by event


class Room:
    """A room on a prefill rank; its methods are the events and checks in `NOTIFICATIONS`."""

    def __init__(self, prefill, decode):
        self.prefill, self.decode = prefill, decode
        self.sender = self.reason = None
        register(prefill, decode)

    def new_sender(self):
        self.sender = new_sender(self.prefill, ROOM)

    def new_sender_of_another_room(self):
        new_sender(self.prefill, ROOM + 1)

    def drop_sender(self):
        self.sender = None
        gc.collect()

    def metadata(self):
        send_metadata(self.prefill, self.decode, ROOM)

    def metadata_of_one_of_two_ranks(self):
        send_metadata(self.prefill, self.decode, ROOM, required_dst_info_num=2)

    def metadata_of_another_rank(self):
        another = fake_managers.decode_rank(backend_of(self.prefill), number=1)
        send_metadata(self.prefill, another, ROOM)

    def abort(self):
        self.reason = ABORTED
        self.sender.abort()

    def abort_by_decode(self):
        process_messages(self.prefill, ABORT_MESSAGE)

    def refuse(self):
        self.reason = REFUSED
        self.prefill.refuse(ROOM, REFUSED)

    def fail(self):
        self.reason = ABORTED
        self.prefill.conclude_failure(bootstrap_room=ROOM, failure_reason=ABORTED)

    def fail_without_reason(self):
        self.prefill.update_status(ROOM, KVPoll.Failed)

    def poison(self):
        self.prefill.poison_deferred_ack_room(ROOM)

    def succeed(self):
        self.prefill.update_status(ROOM, KVPoll.Success)
        assert self.sender.poll() == KVPoll.Success
        self.sender.clear()

    def finish(self):
        assert self.reason in (None, finish_failed(self.sender))

    def disable_deferred_release(self):
        self.prefill.enable_deferred_decode_kv_release = False

    def is_open(self):
        assert self.sender.poll() == KVPoll.WaitingForInput

    def is_stored(self):
        assert list(self.prefill.transfer_infos[ROOM]) == [PEER[backend_of(self.prefill)]]
        assert self.prefill.request_status[ROOM] == KVPoll.WaitingForInput

    def is_dropped(self):
        failures = self.prefill.failures
        assert room_tables(self.prefill) == [set()] * 3
        assert not self.prefill.failure_records
        assert not failures.rooms_without_sender and not failures.senders

    def is_kept_without_sender(self):
        assert list(self.prefill.failures.rooms_without_sender) == [ROOM]


# What happens to a room; after `->` is the port of the decode rank that is notified then.
NOTIFICATIONS = {
    "abort after metadata": "new_sender metadata abort->5555 finish is_dropped",
    "failure after metadata": "new_sender metadata fail->5555 finish",
    # While stages or TP ranks agree, it may take a whole round until the scheduler polls.
    "metadata during a failure": (
        "new_sender fail metadata finish->5555 metadata_of_another_rank->5556"
    ),
    # The second metadata message is for a new request, which has not reached prefill yet.
    "metadata after an abort": (
        "new_sender abort finish metadata->5555 is_dropped metadata is_stored new_sender is_open"
    ),
    "metadata after a notification": "new_sender metadata abort->5555 finish metadata is_stored",
    "two decode ranks": "new_sender metadata abort->5555 finish metadata_of_another_rank->5556",
    "new request after an abort": "new_sender abort finish new_sender metadata is_open",
    "success": "new_sender metadata succeed drop_sender metadata is_stored",
    # Decode would free its pages at once.
    "no deferred release": "disable_deferred_release new_sender metadata abort",
    "poisoned, then aborted": "new_sender metadata fail_without_reason poison abort",
    "poisoned, then finished": "new_sender metadata fail_without_reason poison finish",
    # The scheduler never polls the sender.
    "failed sender is collected": (
        "new_sender fail metadata drop_sender new_sender_of_another_room->5555"
    ),
    # A transfer worker may fail the room before anything has dropped it.
    "failed sender is collected before it notifies": (
        "new_sender metadata fail_without_reason drop_sender fail->5555 new_sender_of_another_room"
    ),
    # The rank's next metadata belongs to another request.
    "abort by decode before metadata": (
        "new_sender abort_by_decode finish metadata is_stored new_sender is_open"
    ),
    # The engine forgets the abort, and the request that comes then waits for the other rank.
    "abort by decode before metadata of the other rank": (
        "metadata_of_one_of_two_ranks abort_by_decode new_sender finish is_dropped"
    ),
    # A pipeline stage may keep the cleared sender.
    "abort by decode, last sender lives": (
        "new_sender metadata succeed metadata abort_by_decode is_kept_without_sender"
    ),
    "refused after metadata": "metadata refuse->5555 is_dropped metadata is_stored",
    "refused before metadata": "refuse metadata->5555 is_dropped metadata is_stored",
    # Decode may have started another request in the room.
    "refused after an abort by decode": "metadata abort_by_decode refuse is_dropped",
    "refused, last sender lives": "new_sender metadata succeed metadata refuse->5555 is_dropped",
    "another request of an open room is refused": "new_sender metadata refuse is_open",
}


@pytest.mark.parametrize("steps", NOTIFICATIONS.values(), ids=NOTIFICATIONS)
def test_each_decode_rank_is_notified_at_most_once(steps, prefill, decode):
    room = Room(prefill, decode)
    for step in steps.split():
        event, _, port = step.partition("->")
        getattr(room, event)()
        expected = [(port, ROOM, KVPoll.Failed, room.reason)] if port else []
        assert sent_statuses(prefill) == expected, step


@pytest.mark.parametrize("metadata_first", [True, False])
def test_stock_does_not_notify_decode_of_an_abort(metadata_first, backend, decode):
    """In the second case the room waits for a prefill request that will not come."""
    prefill = fake_managers.prefill_rank(backend, kinds=fake_managers.ENGINES)
    sender = new_sender(prefill, ROOM, StockSender)
    if metadata_first:
        send_metadata(prefill, decode, ROOM)
    sender.abort()
    if not metadata_first:
        sender.clear()
        send_metadata(prefill, decode, ROOM)
        assert ROOM in prefill.transfer_infos
    assert sent_statuses(prefill) == []


def test_timeout_notifies_waiting_decode(prefill, decode):
    """Only one of two decode ranks has requested the room."""
    prefill.bootstrap_timeout = 0
    sender = new_sender(prefill, ROOM)
    send_metadata(prefill, decode, ROOM, required_dst_info_num=2)
    assert sender.poll() == KVPoll.Failed
    ((port, room, status, reason),) = sent_statuses(prefill)
    assert (port, room, status) == ("5555", ROOM, KVPoll.Failed)
    assert "timed out" in reason


# Races


@pytest.mark.parametrize("first", [True, False], ids=["before", "after"])
def test_metadata_racing_with_a_failure_is_answered(first, prefill, decode, monkeypatch):
    sender, note = new_sender(prefill, ROOM), prefill.failures.record_failed_room

    def noted(*failure):
        if first:
            send_metadata(prefill, decode, ROOM)
        note(*failure)
        if not first:
            send_metadata(prefill, decode, ROOM)

    monkeypatch.setattr(prefill.failures, "record_failed_room", noted)
    sender.abort()
    assert sent_statuses(prefill) == [FAILED]


class PausingDict(dict):
    """Calls `meanwhile` between the engine's first and second write for a metadata message."""

    def __setitem__(self, room, infos):
        super().__setitem__(room, infos)
        self.meanwhile()


def test_abort_while_metadata_is_stored_notifies_decode(prefill, decode):
    """Stock's thread that reads messages may crash there. The scheduler does not wait for it."""
    sender = new_sender(prefill, ROOM)
    prefill.transfer_infos = PausingDict()
    with ThreadPoolExecutor(1) as scheduler:
        scheduler.submit(int).result()  # while messages are read, no thread is started
        prefill.transfer_infos.meanwhile = lambda: scheduler.submit(sender.abort).result(5)
        send_metadata(prefill, decode, ROOM)
    assert sent_statuses(prefill) == [FAILED]
    assert not prefill.request_status and not prefill.transfer_infos
    assert not prefill.failure_records


class PausingPop(dict):
    """Calls `meanwhile` before an entry is removed."""

    def pop(self, *key):
        self.meanwhile()
        return super().pop(*key)


def test_abort_while_a_sender_is_cleared_leaves_no_room(prefill, decode):
    """The client leaves decode just then; the next request in this room would fail."""
    sender = new_sender(prefill, ROOM)
    send_metadata(prefill, decode, ROOM)
    prefill.update_status(ROOM, KVPoll.Success)
    assert sender.poll() == KVPoll.Success
    prefill.transfer_infos = PausingPop(prefill.transfer_infos)
    with ThreadPoolExecutor(1) as reader:
        prefill.transfer_infos.meanwhile = lambda: wait(
            [reader.submit(prefill._handle_abort_notification, ABORT_MESSAGE)], 0.2
        )
        sender.clear()
    assert not prefill.request_status and not prefill.transfer_infos


def test_failing_act_does_not_stop_the_thread_that_reads_messages(prefill):
    acts, ran = [lambda: 1 / 0, lambda: ran.append("second")], []
    prefill.failures.begin_message(ROOM, None)
    for act in acts:
        prefill.failures.run_when_stored(ROOM, act)
    prefill.failures.end_message()
    assert ran == ["second"]


def test_reason_that_cannot_be_encoded_is_sent(prefill, decode):
    """A client's text may have half of a surrogate pair."""
    register(prefill, decode)
    send_metadata(prefill, decode, ROOM)
    prefill.refuse(ROOM, "no \ud800")
    assert sent_statuses(prefill) == [("5555", ROOM, KVPoll.Failed, "no ?")]
    send_metadata(prefill, decode, ROOM + 1)
    prefill.conclude_failure(bootstrap_room=ROOM + 1, failure_reason="no \udfff")
    assert sent_statuses(prefill) == [("5555", ROOM + 1, KVPoll.Failed, "no ?")]


def test_oldest_room_is_not_dropped_while_it_is_stored(prefill, decode, monkeypatch):
    """Stock's thread that reads messages would crash."""
    monkeypatch.setattr(room_failures, "MAX_FAILED_ROOMS", 1)
    request_and_abort(prefill, decode, 0)
    prefill.failures.begin_message(0, None)
    prefill.request_status[1] = KVPoll.Failed
    prefill.track_room_without_sender(1)
    assert 0 in prefill.transfer_infos
    prefill.failures.end_message()
    assert not prefill.transfer_infos


def test_oldest_room_is_kept_if_a_request_comes_while_it_is_stored(prefill, decode, monkeypatch):
    monkeypatch.setattr(room_failures, "MAX_FAILED_ROOMS", 1)
    request_and_abort(prefill, decode, 0)
    prefill.failures.begin_message(0, None)
    prefill.request_status[1] = KVPoll.Failed
    prefill.track_room_without_sender(1)
    sender = new_sender(prefill, 0)
    prefill.failures.end_message()
    assert 0 in prefill.request_status and 0 in prefill.transfer_infos
    assert sender.poll() == KVPoll.Failed


def test_staging_is_prefetched_after_metadata_of_all_decode_ranks(prefill, decode, monkeypatch):
    """Otherwise the scheduler iterates over a room's ranks while one is added, and may crash."""
    prefetched = []
    engine = fake_managers.ENGINES[backend_of(prefill)]
    monkeypatch.setattr(engine, "_prefetch_staging_reqs", lambda _, room: prefetched.append(room))
    sender = new_sender(prefill, ROOM)
    for ranks, expected in ((2, []), (1, [ROOM])):
        send_metadata(prefill, decode, ROOM, required_dst_info_num=ranks)
        prefill._prefetch_staging_reqs(ROOM)
        assert prefetched == expected
    assert sender.poll() == KVPoll.WaitingForInput


def test_blocked_reader_does_not_block_the_scheduler(prefill):
    """It postpones the end of the room whose message is being stored, and of no other."""
    senders = {room: new_sender(prefill, room) for room in (ROOM, ROOM + 1)}
    prefill.failures.message_room = ROOM
    for sender in senders.values():
        sender.abort()
        assert finish_failed(sender) == ABORTED
    assert prefill.request_status == {ROOM: KVPoll.Failed}
    prefill.failures.end_message()
    assert not prefill.request_status and not prefill.failure_records
    assert set(prefill.failures.failed_rooms) == set(senders)


def test_postponed_end_of_a_room_spares_a_new_request_in_it(prefill):
    sender = new_sender(prefill, ROOM)
    prefill.failures.message_room = ROOM
    sender.abort()
    new = new_sender(prefill, ROOM)
    prefill.failures.end_message()
    assert prefill.failures.senders[ROOM] is new and ROOM in prefill.request_status


def abort_and_end_at_once(prefill, decode) -> None:
    """Aborts a room by decode; the scheduler ends the request as soon as its status is Failed."""
    sender = new_sender(prefill, ROOM)
    send_metadata(prefill, decode, ROOM)
    update = prefill.update_status

    def ended_at_once(room, status):
        update(room, status)
        finish_failed(sender)
        sender.clear()

    prefill.update_status = ended_at_once
    process_messages(prefill, ABORT_MESSAGE)
    prefill.update_status = update


def test_aborting_decode_is_not_notified_while_its_abort_is_read(prefill, decode):
    """Otherwise the next request of the room may get the notification."""
    abort_and_end_at_once(prefill, decode)
    assert sent_statuses(prefill) == []
    new_sender(prefill, ROOM)
    send_metadata(prefill, decode, ROOM)
    assert sent_statuses(prefill) == []


def test_abort_by_decode_is_noted_before_the_scheduler_may_close_the_room(prefill, decode):
    """A failure without a reason is taken for another rank's, and is not counted."""
    events = prefill.transfer_log._events = deque()
    abort_and_end_at_once(prefill, decode)
    noted = [(happened.__name__, facts) for happened, _, facts in events]
    names = [name for name, _ in noted]
    reasons = [reason for name, (_, reason) in noted[: names.index("dropped")] if name == "failed"]
    assert "aborted_by_peer" in map(failure_kind, reasons), noted


def test_abort_by_decode_racing_with_a_failure_is_not_notified(prefill, decode, monkeypatch):
    sender, note = new_sender(prefill, ROOM), prefill.failures.record_failed_room
    send_metadata(prefill, decode, ROOM)

    def noted(*failure):
        note(*failure)
        process_messages(prefill, ABORT_MESSAGE)

    monkeypatch.setattr(prefill.failures, "record_failed_room", noted)
    prefill.update_status(ROOM, KVPoll.Failed)
    finish_failed(sender)
    assert sent_statuses(prefill) == []


def test_abort_racing_with_a_new_request_is_remembered(prefill):
    class Requested(WeakValueDictionary):
        def __setitem__(self, room, sender):
            super().__setitem__(room, sender)
            process_messages(prefill, ABORT_MESSAGE)

    prefill.failures.senders = Requested()
    assert new_sender(prefill, ROOM).notified == {("127.0.0.1", 5555)}


@pytest.mark.parametrize("status", [KVPoll.Failed, KVPoll.Success])
def test_single_notification_when_cleared_before_the_send(status, prefill, decode):
    """The engine sets a room's status before it notifies decode, which may reuse the room then."""
    sender = new_sender(prefill, ROOM)
    send_metadata(prefill, decode, ROOM)
    prefill.record_failure(ROOM, ABORTED)
    update = prefill.update_status

    def ended_at_once(room, status):
        update(room, status)
        finish_failed(sender)

    prefill.update_status = ended_at_once
    prefill.conclude_transfer(bootstrap_room=ROOM, status=status)
    assert sent_statuses(prefill) == [FAILED]


@pytest.mark.parametrize("how", ["success", "abort"])
def test_reopened_room_outlives_its_previous_sender(how, prefill, decode):
    """Pipeline stages keep a finished request until another batch takes its place."""
    sender = new_sender(prefill, ROOM)
    send_metadata(prefill, decode, ROOM)
    if how == "success":
        prefill.request_status[ROOM] = KVPoll.Success
        assert sender.poll() == KVPoll.Success
        sender.clear()
    else:
        sender.abort()
    send_metadata(prefill, decode, ROOM)
    assert prefill.request_status[ROOM] == KVPoll.WaitingForInput
    del sender
    gc.collect()
    assert len(prefill.transfer_infos[ROOM]) == 1
    assert new_sender(prefill, ROOM).poll() == KVPoll.WaitingForInput


def test_failure_of_a_request_leaves_the_reason_of_the_next_in_its_room(prefill):
    """A pipeline stage takes the reason of an aborted request only in a later batch."""
    sender = new_sender(prefill, ROOM)
    sender.abort()
    new = new_sender(prefill, ROOM)
    prefill.conclude_failure(bootstrap_room=ROOM, failure_reason="no route to decode")
    assert finish_failed(sender) == ABORTED
    assert finish_failed(new) == "no route to decode"
    assert not prefill.failure_records


def test_sender_can_be_collected_while_another_thread_holds_the_lock(prefill, decode):
    """Any allocation may trigger the collection, whatever lock is held then."""
    senders = [new_sender(prefill, ROOM)]
    prefill.update_status(ROOM, KVPoll.Failed)
    with ThreadPoolExecutor(1) as other, prefill.failures.lock:
        other.submit(senders.clear).result(timeout=5)
    send_metadata(prefill, decode, ROOM)
    assert [status for _, _, status, _ in sent_statuses(prefill)] == [KVPoll.Failed]
    assert not prefill.failures.collected_rooms and ROOM not in prefill.request_status


# What is kept, and how much of it


@pytest.mark.parametrize("has_failed", [False, True])
def test_at_most_max_aborting_ranks_are_remembered(has_failed, prefill, monkeypatch):
    monkeypatch.setattr(room_failures, "MAX_NOTIFIED_RANKS", 3)
    sender = new_sender(prefill, ROOM)
    if has_failed:
        sender.abort()
    for port in range(5555, 5565):
        process_messages(prefill, [*ABORT_MESSAGE[:3], b"%d" % port])
    assert len(sender.notified) == 3


def test_at_most_max_notified_ranks_are_remembered(prefill, decode, monkeypatch):
    monkeypatch.setattr(room_failures, "MAX_NOTIFIED_RANKS", 3)
    sender = new_sender(prefill, ROOM)
    sender.abort()
    for port in range(5555, 5565):
        decode.rank_port = port
        send_metadata(prefill, decode, ROOM)
    assert [to for to, *_ in sent_statuses(prefill)] == [str(port) for port in range(5555, 5565)]
    assert len(sender.notified) == 3


def test_at_most_max_failed_rooms_are_remembered(prefill, decode, monkeypatch):
    monkeypatch.setattr(room_failures, "MAX_FAILED_ROOMS", 3)
    for room in range(5):
        sender = new_sender(prefill, room)
        sender.abort()
        finish_failed(sender)
    for room in range(5):
        send_metadata(prefill, decode, room)
    assert [room for _, room, *_ in sent_statuses(prefill)] == [2, 3, 4]


def request_and_abort(prefill, decode, *rooms: int) -> None:
    for room in rooms:
        send_metadata(prefill, decode, room)
        abort_by_decode(prefill, room)


def test_rooms_aborted_before_their_request_are_kept_up_to_a_maximum(prefill, decode, monkeypatch):
    """A request may reach prefill after its abort, and must find it."""
    monkeypatch.setattr(room_failures, "MAX_FAILED_ROOMS", 3)
    requested = new_sender(prefill, 0)
    request_and_abort(prefill, decode, *range(6))
    assert room_tables(prefill) == [{0, 3, 4, 5}] * 3
    assert prefill.failure_records.keys() <= {0, 3, 4, 5}
    assert requested.poll() == KVPoll.Failed
    late = new_sender(prefill, 4)
    assert late.poll() == KVPoll.Failed


def test_aborted_room_with_a_request_is_remembered(prefill, decode, monkeypatch):
    monkeypatch.setattr(room_failures, "MAX_FAILED_ROOMS", 2)
    request_and_abort(prefill, decode, 0, 1)
    came = new_sender(prefill, 0)
    request_and_abort(prefill, decode, *range(2, 6))
    assert room_tables(prefill) == [{0, 4, 5}] * 3
    assert came.poll() == KVPoll.Failed


def test_aborted_room_of_a_collected_sender_may_be_dropped(prefill, decode, monkeypatch):
    """A sender that was collected without being cleared does not keep its room."""
    monkeypatch.setattr(room_failures, "MAX_FAILED_ROOMS", 2)
    new_sender(prefill, 0)
    gc.collect()
    request_and_abort(prefill, decode, *range(4))
    assert room_tables(prefill) == [{2, 3}] * 3


def test_stock_keeps_all_aborted_rooms(backend, decode):
    prefill = fake_managers.prefill_rank(backend, kinds=fake_managers.ENGINES)
    request_and_abort(prefill, decode, *range(6))
    assert set(prefill.transfer_infos) == set(range(6))


@pytest.mark.parametrize("ranks", [1, 2], ids=["all ranks", "one of two ranks"])
def test_lost_decode_rank_is_not_kept_for_rooms_without_a_sender(
    ranks, prefill, decode, monkeypatch
):
    """A lost decode rank cannot abort them."""
    monkeypatch.setattr(peer_silence, "MAX_RELEASED_PEERS", 0)
    monkeypatch.setattr(room_failures, "MAX_FAILED_ROOMS", 2)
    monkeypatch.setattr(
        peer_sockets.PeerSocket, "silent_for", lambda self: peer_silence.RELEASE_AFTER_SECONDS
    )
    register(prefill, decode)
    for room in range(3):
        send_metadata(prefill, decode, room, required_dst_info_num=ranks)
    prefill.watched_peers[PEER[backend_of(prefill)]] = fake_managers.registered_peer(prefill)
    requested = new_sender(prefill, 0)
    prefill.check_peers()
    assert requested.poll() == KVPoll.Failed
    assert prefill.decode_kv_args_table  # a request still has a room with it
    requested.clear()
    prefill.check_peers()
    assert not prefill.decode_kv_args_table
    assert list(prefill.failures.rooms_without_sender) == [1, 2]
    request_and_abort(prefill, decode, 3)
    assert set(prefill.transfer_infos) == {2, 3}


def test_aborts_of_unknown_rooms_are_not_kept(prefill):
    for room in (b"8", b"-1", b"x", b"\xff", b"99999999999999999999"):
        process_messages(prefill, [ABORT, room])
    assert not prefill.failures.rooms_without_sender and not prefill.request_status


@pytest.mark.parametrize("frames", [[b"9" * 5000], [b"7", b"\xff", b"x"], [b"7", b"127.0.0.1"]])
def test_malformed_abort_does_not_stop_the_reader_thread(frames, prefill):
    sender = new_sender(prefill, ROOM)
    process_messages(prefill, [ABORT, *frames])
    assert not prefill.failures.rooms_without_sender
    del sender


def test_chunk_count_of_a_failed_room_is_dropped(prefill, decode):
    """The engine keeps the count if a chunk other than the last ends after the room has failed."""
    sender = new_sender(prefill, ROOM)
    send_metadata(prefill, decode, ROOM)
    prefill._staging_outstanding[ROOM] = 0
    sender.abort()
    finish_failed(sender)
    assert ROOM not in prefill._staging_outstanding


def test_at_most_max_poisoned_rooms_are_remembered(prefill, monkeypatch):
    """The engine remembers each room until it is reused, which may never happen."""
    monkeypatch.setattr(room_failures, "MAX_POISONED_ROOMS", 3)
    for room in (1, 2, 3, 2, 4, 5):
        prefill._staging_outstanding[room] += 1
        prefill.poison_deferred_ack_room(room)
    assert prefill._deferred_ack_poisoned_rooms == {2, 4, 5} == set(prefill._staging_outstanding)


def test_failure_reason_of_a_cleared_room_is_not_kept(prefill):
    """NIXL's worker records a reason for each write that may still be running."""
    sender = new_sender(prefill, ROOM)
    for _ in range(2):
        prefill.record_failure(ROOM, "left a handle running")
        prefill.poison_deferred_ack_room(ROOM)
        assert len(prefill.failure_records) == (not sender.is_cleared)
        sender.clear()
