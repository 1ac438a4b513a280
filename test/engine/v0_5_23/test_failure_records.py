"""Why a request failed is kept while its room is open: the next one may have that number."""

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
    """Once, between a thread that finds the room open and what it does then, `meanwhile` begins."""

    def __init__(self, rooms: dict, scheduler, meanwhile):
        super().__init__(rooms)
        self.began = []
        self.begin = lambda: self.began.append(scheduler.submit(meanwhile))

    def __contains__(self, room) -> bool:
        is_open = super().__contains__(room)
        if not self.began:
            self.begin()
            wait(self.began, MAX_WAIT_SECONDS)  # it may itself wait for this thread
        return is_open

    def reason(self) -> str:
        """Which the scheduler had."""
        (begun,) = self.began
        return begun.result()


@pytest.fixture
def scheduler():
    with ThreadPoolExecutor(1) as one:
        one.submit(int).result()  # later on no thread is started
        yield one


def receiver_of(decode):
    """Of a request that decode opens."""
    return RECEIVERS[fake_managers.backend_of(decode)](decode, ADDRESS, ROOM)


def decode_rank(backend):
    return fake_managers.make_manager(backend, fake_managers.mla_layout(), DECODE)


def prefill_rank(backend):
    """Of this rank a decode rank has asked for the room of a request."""
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
    """Of a request that has failed, as the scheduler finds out."""
    assert ended.poll() == KVPoll.Failed
    with pytest.raises(KVTransferError) as raised:
        ended.failure_exception()
    return raised.value.failure_reason


def has_no_room_entries(manager) -> bool:
    return not manager.request_status and not manager.failure_records


@backends
def test_second_prefill_failure_racing_with_the_scheduler(backend, scheduler):
    """The scheduler is done with the first one's failure just as the second one's is read."""
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
    """Between stages that agree on rooms the scheduler clears it without asking why it failed."""
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
    prefill.request_status[ROOM] = KVPoll.Bootstrapping  # of which no request has come
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
    """Its client may be another's; of the request it would be said that it failed."""
    prefill, sender = prefill_rank(backend)
    prefill.conclude_transfer(bootstrap_room=ROOM, status=KVPoll.Success)
    assert fake_managers.sent_statuses(prefill) == [(ROOM, KVPoll.Success, None)]
    prefill.notified.clear()
    sender.abort()
    assert prefill.notified == []
    assert reason_of(sender) == ABORTED
    assert has_no_room_entries(prefill)
