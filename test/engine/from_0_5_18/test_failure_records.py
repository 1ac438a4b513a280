"""A failure reason is kept only while its room is open: the next request may reuse the room."""

import contextlib
from concurrent.futures import ThreadPoolExecutor, wait

import pytest
from engine_release import IS_0_5_18
from fake_managers import (
    ADDRESS,
    ENDPOINT,
    RECEIVERS,
    apply_failure,
    finish_failed,
    new_sender,
    send_metadata,
    sent_statuses,
)
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.pd.room_failures import abort_message

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("published")]

ROOM, REASON = 7, "no such page"
REPORTED = f"Prefill failed: {REASON}" if IS_0_5_18 else REASON  # by prefill to decode
ABORTED = "Aborted by AbortReq."
MAX_WAIT_SECONDS = 0.5


class RacingDict(dict):
    """Starts `meanwhile` once, between a thread's check that the room is open and its next step.

    It starts later if there is no such check.
    """

    def __init__(self, rooms: dict, scheduler, meanwhile):
        super().__init__(rooms)
        self.begin = lambda: scheduler.submit(meanwhile)

    def __contains__(self, room) -> bool:
        is_open = super().__contains__(room)
        self._begin_once()
        return is_open

    def _begin_once(self) -> None:
        if self.begin is not None:
            begin, self.begin = self.begin, None
            self.begun = begin()
            wait([self.begun], MAX_WAIT_SECONDS)  # `meanwhile` may wait for this thread

    def reason(self) -> str:
        """The failure reason that `meanwhile` returned."""
        self._begin_once()
        return self.begun.result()


@pytest.fixture
def scheduler():
    with ThreadPoolExecutor(1) as one:
        one.submit(int).result()  # starts its thread before the test does anything
        yield one


@pytest.fixture
def sender(prefill, decode):
    """The sender of a request whose room a decode rank has requested."""
    made = new_sender(prefill, ROOM)
    send_metadata(prefill, decode, ROOM)
    return made


@pytest.fixture
def receiver(backend, decode):
    return RECEIVERS[backend](decode, ADDRESS, ROOM)


def report_failure(decode, rank: int = 0) -> None:
    apply_failure(decode, ROOM, rank, REASON)


def has_no_room_entries(manager) -> bool:
    return not manager.request_status and not manager.failure_records


@contextlib.contextmanager
def racing(manager, scheduler, meanwhile):
    """Runs `meanwhile` in the scheduler during the block, after which no room is left."""
    rooms = manager.request_status = RacingDict(manager.request_status, scheduler, meanwhile)
    yield rooms
    rooms.reason()
    assert has_no_room_entries(manager)


def test_second_prefill_failure_racing_with_the_scheduler(decode, receiver, scheduler):
    """The scheduler finishes the request while the second prefill rank's failure is read."""
    report_failure(decode, 0)
    with racing(decode, scheduler, lambda: finish_failed(receiver)) as rooms:
        report_failure(decode, 1)
    assert rooms.reason() == REPORTED


def test_failure_after_success_is_not_recorded(decode, receiver):
    decode.update_status(ROOM, KVPoll.Success)
    receiver.conclude_state = KVPoll.Success
    report_failure(decode)
    receiver.clear()
    assert has_no_room_entries(decode)


def test_aborted_request_that_is_never_polled_leaves_no_record(decode, receiver):
    """When stages agree on rooms, the scheduler clears a request without reading its reason."""
    receiver.abort()
    receiver.clear()
    assert has_no_room_entries(decode)


def test_late_clear_does_not_affect_the_next_request_of_the_room(backend, decode, receiver):
    """The engine clears a failed request once more when it frees its pages."""
    receiver.abort()
    assert finish_failed(receiver) == ABORTED
    following = RECEIVERS[backend](decode, ADDRESS, ROOM)
    receiver.clear()
    assert following.poll() == KVPoll.Bootstrapping
    report_failure(decode)
    receiver.clear()
    assert finish_failed(following) == REPORTED
    assert has_no_room_entries(decode)


def test_failure_racing_with_a_dropped_room(prefill, scheduler):
    prefill.request_status[ROOM] = KVPoll.Bootstrapping  # a room without a request
    with racing(prefill, scheduler, lambda: prefill._drop_room(ROOM)):
        prefill.record_failure(ROOM, REASON)


def test_decode_abort_racing_with_prefill_failure(prefill, sender, scheduler):
    prefill.update_status(ROOM, KVPoll.Failed)
    prefill.record_failure(ROOM, REASON)
    with racing(prefill, scheduler, lambda: finish_failed(sender)) as rooms:
        prefill._handle_abort_notification(abort_message(ROOM, ENDPOINT))
    assert rooms.reason() == REASON


def test_worker_failure_racing_with_scheduler_abort(prefill, sender, scheduler):
    def abort() -> str:
        sender.abort()
        return finish_failed(sender)

    with racing(prefill, scheduler, abort) as rooms:
        prefill.conclude_failure(bootstrap_room=ROOM, failure_reason=REASON)
    assert rooms.reason() == ABORTED


def test_abort_after_success_does_not_notify_decode(prefill, sender):
    """Decode may have another client, whose request would be reported as failed."""
    prefill.conclude_transfer(bootstrap_room=ROOM, status=KVPoll.Success)
    assert sent_statuses(prefill) == [(ROOM, KVPoll.Success, None)]
    prefill.notified.clear()
    sender.abort()
    assert prefill.notified == []
    assert finish_failed(sender) == ABORTED
    assert has_no_room_entries(prefill)
