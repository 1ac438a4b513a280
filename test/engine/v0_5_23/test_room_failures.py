"""Prefill notifies decode of requests that failed, even if decode requests them only later."""

import gc
from concurrent.futures import ThreadPoolExecutor
from weakref import WeakValueDictionary

import fake_managers
import pytest
from fake_managers import BACKENDS, DECODE, PATCHED, SENDERS
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common import conn as common
from sglang.srt.disaggregation.pd import peer_silence, peer_sockets, room_failures

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("published")]

backends = pytest.mark.parametrize("backend", BACKENDS)
ROOM, ABORTED = 7, "Aborted by AbortReq."


class StockSender(common.EngineCommonKVSender):
    def send(self, *_):
        raise NotImplementedError


def prefill_rank(backend, kinds=PATCHED, **more):
    return fake_managers.make_manager(backend, fake_managers.mla_layout(), kinds=kinds, **more)


def decode_rank(backend, number: int = 0):
    decode = fake_managers.make_manager(backend, fake_managers.mla_layout(), DECODE)
    decode.rank_port += number
    return decode


def send_metadata(prefill, decode, room: int = ROOM) -> None:
    fake_managers.process_messages(prefill, fake_managers.metadata_message(decode, room, range(4)))


def abort_by_decode(prefill, room: int) -> None:
    fake_managers.process_messages(prefill, [common.ABORT_TAG, b"%d" % room])


def new_sender(prefill, room: int = ROOM):
    return SENDERS[fake_managers.backend_of(prefill)](prefill, "127.0.0.1:8998", room)


def finish_request(sender) -> str:
    """Finishes a failed request as the scheduler does; returns the reason its client gets."""
    assert sender.poll() == KVPoll.Failed
    with pytest.raises(common.KVTransferError) as raised:
        sender.failure_exception()
    return raised.value.failure_reason


def sent_statuses(prefill) -> list[tuple[str, int, int, str]]:
    """Returns what was sent since the last call: port, room, status and reason of each."""
    ports = [endpoint.rsplit(":", 1)[1] for endpoint, _ in prefill.notified]
    found = [(port, *said) for port, said in zip(ports, fake_managers.sent_statuses(prefill))]
    prefill.notified.clear()
    return found


FAILED = ("5555", ROOM, KVPoll.Failed, ABORTED)
ABORT_MESSAGE = [common.ABORT_TAG, b"%d" % ROOM, b"127.0.0.1", b"5555"]  # from that decode rank


@backends
def test_abort_notifies_waiting_decode(backend):
    prefill = prefill_rank(backend)
    sender = new_sender(prefill)
    send_metadata(prefill, decode_rank(backend))
    sender.abort()
    assert sent_statuses(prefill) == [FAILED]
    assert finish_request(sender) == ABORTED
    assert sent_statuses(prefill) == []
    assert not prefill.request_status and not prefill.failure_records


@backends
def test_metadata_during_a_failure_is_answered(backend):
    """While stages or TP ranks agree, it may take a whole round until the scheduler polls."""
    prefill = prefill_rank(backend)
    sender = new_sender(prefill)
    prefill.conclude_failure(bootstrap_room=ROOM, failure_reason=ABORTED)
    send_metadata(prefill, decode_rank(backend))
    assert sent_statuses(prefill) == []
    assert finish_request(sender) == ABORTED
    assert sent_statuses(prefill) == [FAILED]
    send_metadata(prefill, decode_rank(backend, 1))
    assert [port for port, *_ in sent_statuses(prefill)] == ["5556"]


@backends
@pytest.mark.parametrize("first", [True, False], ids=["before", "after"])
def test_metadata_racing_with_a_failure_is_answered(backend, first, monkeypatch):
    prefill, decode = prefill_rank(backend), decode_rank(backend)
    sender, note = new_sender(prefill), prefill.failures.record_failed_room

    def noted(*room_failures):
        if first:
            send_metadata(prefill, decode)
        note(*room_failures)
        if not first:
            send_metadata(prefill, decode)

    monkeypatch.setattr(prefill.failures, "record_failed_room", noted)
    sender.abort()
    assert sent_statuses(prefill) == [FAILED]


class PausingDict(dict):
    """Calls `meanwhile` between the engine's first and second write for a metadata message."""

    def __setitem__(self, room, infos):
        super().__setitem__(room, infos)
        self.meanwhile()


@backends
def test_abort_while_metadata_is_stored_notifies_decode(backend):
    """Stock's thread that reads messages may crash there. The scheduler does not wait for it."""
    prefill, decode = prefill_rank(backend), decode_rank(backend)
    sender = new_sender(prefill)
    prefill.transfer_infos = PausingDict()
    with ThreadPoolExecutor(1) as scheduler:
        scheduler.submit(int).result()  # while messages are read, no thread is started
        prefill.transfer_infos.meanwhile = lambda: scheduler.submit(sender.abort).result(5)
        send_metadata(prefill, decode)
    assert sent_statuses(prefill) == [FAILED]
    assert not prefill.request_status and not prefill.transfer_infos
    assert not prefill.failure_records


@backends
def test_staging_is_prefetched_after_metadata_of_all_decode_ranks(backend, monkeypatch):
    """Otherwise the scheduler iterates over a room's ranks while one is added, and may crash."""
    prefetched = []
    engine = fake_managers.ENGINES[backend]
    monkeypatch.setattr(engine, "_prefetch_staging_reqs", lambda _, room: prefetched.append(room))
    prefill, decode = prefill_rank(backend), decode_rank(backend)
    sender = new_sender(prefill)
    for ranks, expected in ((2, []), (1, [ROOM])):
        asked = fake_managers.metadata_message(decode, ROOM, range(4), required_dst_info_num=ranks)
        fake_managers.process_messages(prefill, asked)
        prefill._prefetch_staging_reqs(ROOM)
        assert prefetched == expected
    assert sender.poll() == KVPoll.WaitingForInput


@backends
def test_blocked_reader_does_not_block_the_scheduler(backend):
    """It postpones the end of the room whose message is being stored, and of no other."""
    prefill = prefill_rank(backend)
    senders = {room: new_sender(prefill, room) for room in (ROOM, ROOM + 1)}
    prefill.failures.message_room = ROOM
    for sender in senders.values():
        sender.abort()
        assert finish_request(sender) == ABORTED
    assert prefill.request_status == {ROOM: KVPoll.Failed}
    prefill.failures.end_message()
    assert not prefill.request_status and not prefill.failure_records
    assert set(prefill.failures.failed_rooms) == set(senders)


@backends
def test_postponed_end_of_a_room_spares_a_new_request_in_it(backend):
    prefill = prefill_rank(backend)
    sender = new_sender(prefill)
    prefill.failures.message_room = ROOM
    sender.abort()
    new = new_sender(prefill)
    prefill.failures.end_message()
    assert prefill.failures.senders[ROOM] is new and ROOM in prefill.request_status


@backends
@pytest.mark.parametrize("has_failed", [False, True])
def test_at_most_max_aborting_ranks_are_remembered(backend, has_failed, monkeypatch):
    monkeypatch.setattr(room_failures, "MAX_NOTIFIED_RANKS", 3)
    prefill = prefill_rank(backend)
    sender = new_sender(prefill)
    if has_failed:
        sender.abort()
    for port in range(5555, 5565):
        fake_managers.process_messages(prefill, [*ABORT_MESSAGE[:3], b"%d" % port])
    assert len(sender.notified) == 3


@backends
def test_at_most_max_notified_ranks_are_remembered(backend, monkeypatch):
    monkeypatch.setattr(room_failures, "MAX_NOTIFIED_RANKS", 3)
    prefill, decode = prefill_rank(backend), decode_rank(backend)
    sender = new_sender(prefill)
    sender.abort()
    for port in range(5555, 5565):
        decode.rank_port = port
        send_metadata(prefill, decode)
    assert [to for to, *_ in sent_statuses(prefill)] == [str(port) for port in range(5555, 5565)]
    assert len(sender.notified) == 3


@backends
def test_aborting_decode_is_not_notified_while_its_abort_is_read(backend):
    """Otherwise the next request of the room may get the notification."""
    prefill = prefill_rank(backend)
    sender = new_sender(prefill)
    send_metadata(prefill, decode_rank(backend))
    update = prefill.update_status

    def ended_at_once(room, status):
        update(room, status)
        finish_request(sender)
        sender.clear()

    prefill.update_status = ended_at_once
    fake_managers.process_messages(prefill, ABORT_MESSAGE)
    prefill.update_status = update
    assert sent_statuses(prefill) == []
    new_sender(prefill)
    send_metadata(prefill, decode_rank(backend))
    assert sent_statuses(prefill) == []


@backends
def test_abort_by_decode_racing_with_a_failure_is_not_notified(backend, monkeypatch):
    prefill = prefill_rank(backend)
    sender, note = new_sender(prefill), prefill.failures.record_failed_room
    send_metadata(prefill, decode_rank(backend))

    def noted(*room_failures):
        note(*room_failures)
        fake_managers.process_messages(prefill, ABORT_MESSAGE)

    monkeypatch.setattr(prefill.failures, "record_failed_room", noted)
    prefill.update_status(ROOM, KVPoll.Failed)
    finish_request(sender)
    assert sent_statuses(prefill) == []


@backends
def test_abort_before_metadata_of_all_decode_ranks_fails_the_request(backend):
    """The engine forgets the abort, and the request that comes then waits for the other rank."""
    prefill, decode = prefill_rank(backend), decode_rank(backend)
    asked = fake_managers.metadata_message(decode, ROOM, range(4), required_dst_info_num=2)
    fake_managers.process_messages(prefill, asked, ABORT_MESSAGE)
    sender = new_sender(prefill)
    finish_request(sender)
    assert sent_statuses(prefill) == []
    assert not prefill.request_status and not prefill.transfer_infos


@backends
def test_abort_racing_with_a_new_request_is_remembered(backend):
    prefill = prefill_rank(backend)

    class Requested(WeakValueDictionary):
        def __setitem__(self, room, sender):
            super().__setitem__(room, sender)
            fake_managers.process_messages(
                prefill, [common.ABORT_TAG, b"%d" % room, b"127.0.0.1", b"5555"]
            )

    prefill.failures.senders = Requested()
    assert new_sender(prefill).notified == {("127.0.0.1", 5555)}


@backends
def test_failure_notifies_decode_once(backend):
    prefill = prefill_rank(backend)
    sender = new_sender(prefill)
    send_metadata(prefill, decode_rank(backend))
    prefill.conclude_failure(bootstrap_room=ROOM, failure_reason=ABORTED)
    assert sent_statuses(prefill) == [FAILED]
    assert finish_request(sender) == ABORTED
    assert sent_statuses(prefill) == []


@backends
@pytest.mark.parametrize("status", [KVPoll.Failed, KVPoll.Success])
def test_single_notification_when_cleared_before_the_send(backend, status):
    """The engine sets a room's status before it notifies decode, which may reuse the room then."""
    prefill = prefill_rank(backend)
    sender = new_sender(prefill)
    send_metadata(prefill, decode_rank(backend))
    prefill.record_failure(ROOM, ABORTED)
    update = prefill.update_status

    def ended_at_once(room, status):
        update(room, status)
        finish_request(sender)

    prefill.update_status = ended_at_once
    prefill.conclude_transfer(bootstrap_room=ROOM, status=status)
    assert sent_statuses(prefill) == [FAILED]


@backends
def test_no_notification_without_deferred_release(backend):
    """Without deferred release, decode would free its pages at once."""
    prefill = prefill_rank(backend, enable_deferred_decode_kv_release=False)
    sender = new_sender(prefill)
    send_metadata(prefill, decode_rank(backend))
    sender.abort()
    assert sent_statuses(prefill) == []


@backends
@pytest.mark.parametrize("is_aborted", [True, False])
def test_no_notification_for_a_poisoned_room(backend, is_aborted):
    prefill = prefill_rank(backend)
    sender = new_sender(prefill)
    send_metadata(prefill, decode_rank(backend))
    prefill.update_status(ROOM, KVPoll.Failed)
    prefill.poison_deferred_ack_room(ROOM)
    if is_aborted:
        sender.abort()
    else:
        finish_request(sender)
    assert sent_statuses(prefill) == []


@backends
def test_stock_does_not_notify_decode_of_an_abort(backend):
    prefill = prefill_rank(backend, fake_managers.ENGINES)
    sender = StockSender(prefill, "127.0.0.1:8998", ROOM)
    send_metadata(prefill, decode_rank(backend))
    sender.abort()
    assert sent_statuses(prefill) == []


@backends
def test_timeout_notifies_waiting_decode(backend):
    """Only one of two decode ranks has requested the room."""
    prefill = prefill_rank(backend, bootstrap_timeout=0)
    sender = new_sender(prefill)
    request = fake_managers.metadata_message(
        decode_rank(backend), ROOM, range(4), required_dst_info_num=2
    )
    fake_managers.process_messages(prefill, request)
    assert sender.poll() == KVPoll.Failed
    ((port, room, status, reason),) = sent_statuses(prefill)
    assert (port, room, status) == ("5555", ROOM, KVPoll.Failed)
    assert "timed out" in reason


@backends
def test_metadata_after_a_failure_is_answered_once(backend):
    prefill, decode = prefill_rank(backend), decode_rank(backend)
    sender = new_sender(prefill)
    sender.abort()
    finish_request(sender)
    assert sent_statuses(prefill) == []
    send_metadata(prefill, decode)
    assert sent_statuses(prefill) == [FAILED]
    assert ROOM not in prefill.transfer_infos
    # The second metadata message is for a new request, which has not reached prefill yet.
    send_metadata(prefill, decode)
    assert sent_statuses(prefill) == []
    assert list(prefill.transfer_infos[ROOM]) == [fake_managers.PEER[backend]]
    assert new_sender(prefill).poll() in (KVPoll.Bootstrapping, KVPoll.WaitingForInput)


@backends
def test_each_decode_rank_is_notified(backend):
    prefill = prefill_rank(backend)
    sender = new_sender(prefill)
    send_metadata(prefill, decode_rank(backend))
    sender.abort()
    finish_request(sender)
    assert [port for port, *_ in sent_statuses(prefill)] == ["5555"]
    send_metadata(prefill, decode_rank(backend, 1))
    assert [port for port, *_ in sent_statuses(prefill)] == ["5556"]


@backends
def test_stock_does_not_answer_metadata_after_a_failure(backend):
    """The room waits for a prefill request that will not come."""
    prefill = prefill_rank(backend, fake_managers.ENGINES)
    sender = StockSender(prefill, "127.0.0.1:8998", ROOM)
    sender.abort()
    finish_request(sender)
    send_metadata(prefill, decode_rank(backend))
    assert sent_statuses(prefill) == []
    assert ROOM in prefill.transfer_infos


@backends
def test_second_metadata_opens_a_new_request(backend):
    prefill, decode = prefill_rank(backend), decode_rank(backend)
    sender = new_sender(prefill)
    send_metadata(prefill, decode)
    sender.abort()
    finish_request(sender)
    sent_statuses(prefill)
    send_metadata(prefill, decode)
    assert sent_statuses(prefill) == []
    assert ROOM in prefill.transfer_infos


@backends
def test_new_request_clears_the_failed_room(backend):
    prefill, decode = prefill_rank(backend), decode_rank(backend)
    sender = new_sender(prefill)
    sender.abort()
    finish_request(sender)
    sender = new_sender(prefill)
    send_metadata(prefill, decode)
    assert sent_statuses(prefill) == []
    assert sender.poll() == KVPoll.WaitingForInput


@backends
def test_succeeded_request_is_not_remembered(backend):
    prefill, decode = prefill_rank(backend), decode_rank(backend)
    succeeded_sender(prefill, decode)
    send_metadata(prefill, decode)
    assert sent_statuses(prefill) == []
    assert ROOM in prefill.transfer_infos


@backends
@pytest.mark.parametrize("how", ["success", "abort"])
def test_reopened_room_outlives_its_previous_sender(backend, how):
    """Pipeline stages keep a finished request until another batch takes its place."""
    prefill, decode = prefill_rank(backend), decode_rank(backend)
    sender = new_sender(prefill)
    send_metadata(prefill, decode)
    if how == "success":
        prefill.request_status[ROOM] = KVPoll.Success
        assert sender.poll() == KVPoll.Success
        sender.clear()
    else:
        sender.abort()
    send_metadata(prefill, decode)
    assert prefill.request_status[ROOM] == KVPoll.WaitingForInput
    del sender
    gc.collect()
    assert len(prefill.transfer_infos[ROOM]) == 1
    assert new_sender(prefill).poll() == KVPoll.WaitingForInput


@backends
def test_chunk_count_of_a_failed_room_is_dropped(backend):
    """The engine keeps the count if a chunk other than the last ends after the room has failed."""
    prefill = prefill_rank(backend)
    sender = new_sender(prefill)
    send_metadata(prefill, decode_rank(backend))
    prefill._staging_outstanding[ROOM] = 0
    sender.abort()
    finish_request(sender)
    assert ROOM not in prefill._staging_outstanding


@backends
def test_at_most_max_failed_rooms_are_remembered(backend, monkeypatch):
    monkeypatch.setattr(room_failures, "MAX_FAILED_ROOMS", 3)
    prefill, decode = prefill_rank(backend), decode_rank(backend)
    for room in range(5):
        sender = new_sender(prefill, room)
        sender.abort()
        finish_request(sender)
    for room in range(5):
        send_metadata(prefill, decode, room)
    assert [room for _, room, *_ in sent_statuses(prefill)] == [2, 3, 4]


def room_tables(prefill) -> list[set[int]]:
    tables = ("request_status", "transfer_infos", "req_to_decode_prefix_len")
    return [set(getattr(prefill, name)) for name in tables]


@backends
def test_rooms_aborted_before_their_request_are_kept_up_to_a_maximum(backend, monkeypatch):
    """A request may reach prefill after its abort, and must find it."""
    monkeypatch.setattr(room_failures, "MAX_FAILED_ROOMS", 3)
    prefill, decode = prefill_rank(backend), decode_rank(backend)
    requested = new_sender(prefill, 0)
    for room in range(6):
        send_metadata(prefill, decode, room)
        abort_by_decode(prefill, room)
    assert room_tables(prefill) == [{0, 3, 4, 5}] * 3
    assert prefill.failure_records.keys() <= {0, 3, 4, 5}
    assert requested.poll() == KVPoll.Failed
    late = new_sender(prefill, 4)
    assert late.poll() == KVPoll.Failed


@backends
def test_aborted_room_with_a_request_is_remembered(backend, monkeypatch):
    monkeypatch.setattr(room_failures, "MAX_FAILED_ROOMS", 2)
    prefill, decode = prefill_rank(backend), decode_rank(backend)
    for room in range(2):
        send_metadata(prefill, decode, room)
        abort_by_decode(prefill, room)
    came = new_sender(prefill, 0)
    for room in range(2, 6):
        send_metadata(prefill, decode, room)
        abort_by_decode(prefill, room)
    assert room_tables(prefill) == [{0, 4, 5}] * 3
    assert came.poll() == KVPoll.Failed


@backends
def test_aborted_room_of_a_collected_sender_may_be_dropped(backend, monkeypatch):
    """A sender that was collected without being cleared does not keep its room."""
    monkeypatch.setattr(room_failures, "MAX_FAILED_ROOMS", 2)
    prefill, decode = prefill_rank(backend), decode_rank(backend)
    new_sender(prefill, 0)
    gc.collect()
    for room in range(4):
        send_metadata(prefill, decode, room)
        abort_by_decode(prefill, room)
    assert room_tables(prefill) == [{2, 3}] * 3


@backends
def test_sender_can_be_collected_while_another_thread_holds_the_lock(backend):
    """Any allocation may trigger the collection, whatever lock is held then."""
    prefill, decode = prefill_rank(backend), decode_rank(backend)
    senders = [new_sender(prefill)]
    prefill.update_status(ROOM, KVPoll.Failed)
    with ThreadPoolExecutor(1) as other, prefill.failures.lock:
        other.submit(senders.clear).result(timeout=5)
    send_metadata(prefill, decode)
    assert [status for _, _, status, _ in sent_statuses(prefill)] == [KVPoll.Failed]
    assert not prefill.failures.collected_rooms and ROOM not in prefill.request_status


@backends
def test_collected_failed_sender_notifies_decode(backend):
    """The scheduler never polls the sender."""
    prefill, decode = prefill_rank(backend), decode_rank(backend)
    sender = new_sender(prefill)
    prefill.conclude_failure(bootstrap_room=ROOM, failure_reason=ABORTED)
    send_metadata(prefill, decode)
    assert sent_statuses(prefill) == []
    del sender
    gc.collect()
    new_sender(prefill, ROOM + 1)
    assert sent_statuses(prefill) == [FAILED]


@backends
def test_collected_failed_sender_notifies_decode_once(backend):
    """A transfer worker may fail the room before anything has dropped it."""
    prefill, decode = prefill_rank(backend), decode_rank(backend)
    sender = new_sender(prefill)
    send_metadata(prefill, decode)
    prefill.update_status(ROOM, KVPoll.Failed)
    del sender
    gc.collect()
    prefill.conclude_failure(bootstrap_room=ROOM, failure_reason=ABORTED)
    new_sender(prefill, ROOM + 1)
    assert [port for port, *_ in sent_statuses(prefill)] == ["5555"]


@backends
@pytest.mark.parametrize("ranks", [1, 2], ids=["all ranks", "one of two ranks"])
def test_lost_decode_rank_is_not_kept_for_rooms_without_a_sender(backend, ranks, monkeypatch):
    """A lost decode rank cannot abort them."""
    monkeypatch.setattr(peer_silence, "MAX_RELEASED_PEERS", 0)
    monkeypatch.setattr(room_failures, "MAX_FAILED_ROOMS", 2)
    monkeypatch.setattr(
        peer_sockets.PeerSocket, "silent_for", lambda self: peer_silence.RELEASE_AFTER_SECONDS
    )
    prefill, decode = prefill_rank(backend), decode_rank(backend)
    asks = [
        fake_managers.metadata_message(decode, room, range(4), required_dst_info_num=ranks)
        for room in range(3)
    ]
    fake_managers.process_messages(prefill, fake_managers.registration_message(decode), *asks)
    prefill.watched_peers[fake_managers.PEER[backend]] = fake_managers.registered_peer(prefill)
    requested = new_sender(prefill, 0)
    prefill.check_peers()
    assert requested.poll() == KVPoll.Failed
    assert prefill.decode_kv_args_table  # a request still has a room with it
    requested.clear()
    prefill.check_peers()
    assert not prefill.decode_kv_args_table
    assert list(prefill.failures.rooms_without_sender) == [1, 2]
    send_metadata(prefill, decode, 3)
    abort_by_decode(prefill, 3)
    assert set(prefill.transfer_infos) == {2, 3}


@backends
def test_stock_keeps_all_aborted_rooms(backend):
    prefill, decode = prefill_rank(backend, fake_managers.ENGINES), decode_rank(backend)
    for room in range(6):
        send_metadata(prefill, decode, room)
        abort_by_decode(prefill, room)
    assert set(prefill.transfer_infos) == set(range(6))


@backends
def test_aborts_of_unknown_rooms_are_not_kept(backend):
    prefill = prefill_rank(backend)
    for room in (b"8", b"-1", b"x", b"\xff", b"99999999999999999999"):
        fake_managers.process_messages(prefill, [common.ABORT_TAG, room])
    assert not prefill.failures.rooms_without_sender and not prefill.request_status


@backends
def test_aborting_decode_rank_is_not_notified(backend):
    """Not even if it aborts before it sends metadata: its next metadata is another request's."""
    prefill, decode = prefill_rank(backend), decode_rank(backend)
    sender = new_sender(prefill)
    fake_managers.process_messages(prefill, ABORT_MESSAGE)
    finish_request(sender)
    send_metadata(prefill, decode)
    assert sent_statuses(prefill) == []
    assert ROOM in prefill.transfer_infos
    assert new_sender(prefill).poll() == KVPoll.WaitingForInput


@backends
@pytest.mark.parametrize("frames", [[b"9" * 5000], [b"7", b"\xff", b"x"], [b"7", b"127.0.0.1"]])
def test_malformed_abort_does_not_stop_the_reader_thread(backend, frames):
    prefill = prefill_rank(backend)
    sender = new_sender(prefill)
    fake_managers.process_messages(prefill, [common.ABORT_TAG, *frames])
    assert not prefill.failures.rooms_without_sender
    del sender


REFUSED = ("5555", ROOM, KVPoll.Failed, "too long")


@backends
@pytest.mark.parametrize("metadata_first", [True, False])
def test_request_refused_before_it_has_a_sender_notifies_decode(backend, metadata_first):
    prefill, decode = prefill_rank(backend), decode_rank(backend)
    fake_managers.process_messages(prefill, fake_managers.registration_message(decode))
    if metadata_first:
        send_metadata(prefill, decode)
    prefill.refuse(ROOM, "too long")
    if not metadata_first:
        send_metadata(prefill, decode)
    assert sent_statuses(prefill) == [REFUSED]
    assert not prefill.request_status and not prefill.transfer_infos
    assert not prefill.failures.rooms_without_sender and not prefill.failures.senders
    send_metadata(prefill, decode)  # another request of the room, as decode was notified
    assert sent_statuses(prefill) == []
    assert prefill.request_status[ROOM] == KVPoll.WaitingForInput


@backends
def test_refused_request_does_not_notify_a_decode_rank_that_aborted_it(backend):
    """Decode may have started another request in that room."""
    prefill, decode = prefill_rank(backend), decode_rank(backend)
    fake_managers.process_messages(prefill, fake_managers.registration_message(decode))
    send_metadata(prefill, decode)
    fake_managers.process_messages(prefill, ABORT_MESSAGE)
    prefill.refuse(ROOM, "too long")
    assert sent_statuses(prefill) == []
    assert not prefill.request_status and not prefill.transfer_infos


def succeeded_sender(prefill, decode):
    """Returns the cleared sender of a request that succeeded; a pipeline stage may keep it."""
    sender = new_sender(prefill)
    fake_managers.process_messages(prefill, fake_managers.registration_message(decode))
    send_metadata(prefill, decode)
    prefill.update_status(ROOM, KVPoll.Success)
    assert sender.poll() == KVPoll.Success
    sender.clear()
    return sender


@backends
def test_refused_request_notifies_decode_while_the_last_sender_of_its_room_lives(backend):
    prefill, decode = prefill_rank(backend), decode_rank(backend)
    last = succeeded_sender(prefill, decode)
    send_metadata(prefill, decode)
    prefill.refuse(ROOM, "too long")
    assert sent_statuses(prefill) == [REFUSED]
    assert not prefill.request_status and not prefill.transfer_infos
    last.clear()


@backends
def test_aborted_room_is_tracked_while_the_last_sender_of_its_room_lives(backend):
    prefill, decode = prefill_rank(backend), decode_rank(backend)
    last = succeeded_sender(prefill, decode)
    send_metadata(prefill, decode)
    abort_by_decode(prefill, ROOM)
    assert list(prefill.failures.rooms_without_sender) == [ROOM]
    last.clear()


@backends
def test_failure_of_a_request_leaves_the_reason_of_the_next_in_its_room(backend):
    """A pipeline stage takes the reason of an aborted request only in a later batch."""
    prefill = prefill_rank(backend)
    sender = new_sender(prefill)
    sender.abort()
    new = new_sender(prefill)
    prefill.conclude_failure(bootstrap_room=ROOM, failure_reason="no route to decode")
    assert finish_request(sender) == ABORTED
    assert finish_request(new) == "no route to decode"
    assert not prefill.failure_records


@backends
def test_refusal_does_not_affect_an_open_request_of_that_room(backend):
    prefill, decode = prefill_rank(backend), decode_rank(backend)
    fake_managers.process_messages(prefill, fake_managers.registration_message(decode))
    sender = new_sender(prefill)
    send_metadata(prefill, decode)
    prefill.refuse(ROOM, "too long")
    assert sent_statuses(prefill) == []
    assert sender.poll() == KVPoll.WaitingForInput


@backends
def test_at_most_max_poisoned_rooms_are_remembered(backend, monkeypatch):
    """The engine remembers each room until it is reused, which may never happen."""
    monkeypatch.setattr(room_failures, "MAX_POISONED_ROOMS", 3)
    prefill = prefill_rank(backend)
    for room in (1, 2, 3, 2, 4, 5):
        prefill._staging_outstanding[room] += 1
        prefill.poison_deferred_ack_room(room)
    assert prefill._deferred_ack_poisoned_rooms == {2, 4, 5} == set(prefill._staging_outstanding)


@backends
def test_failure_reason_of_a_cleared_room_is_not_kept(backend):
    """NIXL's worker records a reason for each write that may still be running."""
    prefill = prefill_rank(backend)
    sender = new_sender(prefill)
    for _ in range(2):
        prefill.record_failure(ROOM, "left a handle running")
        prefill.poison_deferred_ack_room(ROOM)
        assert len(prefill.failure_records) == (not sender.is_cleared)
        sender.clear()
