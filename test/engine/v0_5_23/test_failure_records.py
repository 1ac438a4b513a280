"""A failure reason is kept only while its room is open: the next request may reuse the room."""

from concurrent.futures import ThreadPoolExecutor, wait

import fake_managers
import pytest
from fake_managers import BACKENDS, DECODE, RECEIVERS, SENDERS
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import ABORT_TAG, KVTransferError

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("published")]

backends = pytest.mark.parametrize("backend", BACKENDS)
ROOM, REASON, ADDRESS = 7, "no such page", "127.0.0.1:8998"
ABORTED = "Aborted by AbortReq."
MAX_WAIT_SECONDS = 0.5


class RacingDict(dict):
    """Starts `meanwhile` once, between a thread's check that the room is open and its next step."""

    def __init__(self, rooms: dict, scheduler, meanwhile):
        super().__init__(rooms)
        self.began = []
        self.begin = lambda: self.began.append(scheduler.submit(meanwhile))

    def __contains__(self, room) -> bool:
        is_open = super().__contains__(room)
        if not self.began:
            self.begin()
            wait(self.began, MAX_WAIT_SECONDS)  # `meanwhile` may wait for this thread
        return is_open

    def reason(self) -> str:
        """The failure reason that `meanwhile` returned."""
        (begun,) = self.began
        return begun.result()


@pytest.fixture
def scheduler():
    with ThreadPoolExecutor(1) as one:
        one.submit(int).result()  # starts its thread before the test does anything
        yield one


def receiver_of(decode):
    """The receiver of a request that decode opens."""
    return RECEIVERS[fake_managers.backend_of(decode)](decode, ADDRESS, ROOM)


def decode_rank(backend):
    return fake_managers.make_manager(backend, fake_managers.mla_layout(), DECODE)


def prefill_rank(backend):
    """A prefill rank with a request whose room a decode rank has requested; also its sender."""
    prefill = fake_managers.make_manager(backend, fake_managers.mla_layout())
    sender = SENDERS[backend](prefill, ADDRESS, ROOM)
    fake_managers.process_messages(
        prefill, fake_managers.metadata_message(decode_rank(backend), ROOM, range(4))
    )
    return prefill, sender


def report_failure(decode, rank: int = 0) -> None:
    decode.apply_prefill_status(
        bootstrap_room=ROOM, status=KVPoll.Failed, prefill_rank=rank, failure_reason=REASON
    )


def reason_of(ended) -> str:
    """Finishes a failed request as the scheduler does; returns the failure reason."""
    assert ended.poll() == KVPoll.Failed
    with pytest.raises(KVTransferError) as raised:
        ended.failure_exception()
    return raised.value.failure_reason


def has_no_room_entries(manager) -> bool:
    return not manager.request_status and not manager.failure_records


@backends
def test_second_prefill_failure_racing_with_the_scheduler(backend, scheduler):
    """The scheduler finishes the request while the second prefill rank's failure is read."""
    decode = decode_rank(backend)
    receiver = receiver_of(decode)
    report_failure(decode, 0)
    rooms = RacingDict(decode.request_status, scheduler, lambda: reason_of(receiver))
    decode.request_status = rooms
    report_failure(decode, 1)
    assert rooms.reason() == REASON
    assert has_no_room_entries(decode)


@backends
def test_failure_after_success_is_not_recorded(backend):
    decode = decode_rank(backend)
    receiver = receiver_of(decode)
    decode.update_status(ROOM, KVPoll.Success)
    receiver.conclude_state = KVPoll.Success
    report_failure(decode)
    receiver.clear()
    assert has_no_room_entries(decode)


@backends
def test_aborted_request_that_is_never_polled_leaves_no_record(backend):
    """When stages agree on rooms, the scheduler clears a request without reading its reason."""
    decode = decode_rank(backend)
    receiver = receiver_of(decode)
    receiver.abort()
    receiver.clear()
    assert has_no_room_entries(decode)


@backends
def test_late_clear_does_not_affect_the_next_request_of_the_room(backend):
    """The engine clears a failed request once more when it frees its pages."""
    decode = decode_rank(backend)
    receiver = receiver_of(decode)
    receiver.abort()
    assert reason_of(receiver) == ABORTED
    following = receiver_of(decode)
    receiver.clear()
    assert following.poll() == KVPoll.Bootstrapping
    report_failure(decode)
    receiver.clear()
    assert reason_of(following) == REASON
    assert has_no_room_entries(decode)


@backends
def test_failure_racing_with_a_dropped_room(backend, scheduler):
    prefill = fake_managers.make_manager(backend, fake_managers.mla_layout())
    prefill.request_status[ROOM] = KVPoll.Bootstrapping  # a room without a request
    rooms = RacingDict(prefill.request_status, scheduler, lambda: prefill._drop_room(ROOM))
    prefill.request_status = rooms
    prefill.record_failure(ROOM, REASON)
    rooms.reason()
    assert has_no_room_entries(prefill)


@backends
def test_decode_abort_racing_with_prefill_failure(backend, scheduler):
    prefill, sender = prefill_rank(backend)
    prefill.update_status(ROOM, KVPoll.Failed)
    prefill.record_failure(ROOM, REASON)
    rooms = RacingDict(prefill.request_status, scheduler, lambda: reason_of(sender))
    prefill.request_status = rooms
    prefill._handle_abort_notification([ABORT_TAG, b"%d" % ROOM, b"127.0.0.1", b"5555"])
    assert rooms.reason() == REASON
    assert has_no_room_entries(prefill)


@backends
def test_worker_failure_racing_with_scheduler_abort(backend, scheduler):
    prefill, sender = prefill_rank(backend)

    def abort() -> str:
        sender.abort()
        return reason_of(sender)

    rooms = RacingDict(prefill.request_status, scheduler, abort)
    prefill.request_status = rooms
    prefill.conclude_failure(bootstrap_room=ROOM, failure_reason=REASON)
    assert rooms.reason() == ABORTED
    assert has_no_room_entries(prefill)


@backends
def test_abort_after_success_does_not_notify_decode(backend):
    """Decode may have another client, whose request would be reported as failed."""
    prefill, sender = prefill_rank(backend)
    prefill.conclude_transfer(bootstrap_room=ROOM, status=KVPoll.Success)
    assert fake_managers.sent_statuses(prefill) == [(ROOM, KVPoll.Success, None)]
    prefill.notified.clear()
    sender.abort()
    assert prefill.notified == []
    assert reason_of(sender) == ABORTED
    assert has_no_room_entries(prefill)
