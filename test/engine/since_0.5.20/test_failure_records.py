"""Why a request failed is kept while its room is open: the next one may have that number."""

from concurrent.futures import ThreadPoolExecutor, wait

import managers
import pytest
from managers import BACKENDS, DECODE, RECEIVERS, SENDERS
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import ABORT_TAG, KVTransferError

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("published")]

backends = pytest.mark.parametrize("backend", BACKENDS)
ROOM, REASON, ADDRESS = 7, "no such page", "127.0.0.1:8998"
ABORTED = "Aborted by AbortReq."
MOST_SECONDS = 0.5


class LookedUp(dict):
    """Once, between a thread that finds the room open and what it does then, `meanwhile` begins."""

    def __init__(self, rooms: dict, scheduler, meanwhile):
        super().__init__(rooms)
        self.began = []
        self.begin = lambda: self.began.append(scheduler.submit(meanwhile))

    def __contains__(self, room) -> bool:
        is_open = super().__contains__(room)
        if not self.began:
            self.begin()
            wait(self.began, MOST_SECONDS)  # it may itself wait for this thread
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
    return RECEIVERS[managers.backend_of(decode)](decode, ADDRESS, ROOM)


def decode_rank(backend):
    return managers.rank(backend, managers.latents(), DECODE)


def prefill_rank(backend):
    """Of this rank a decode rank has asked for the room of a request."""
    prefill = managers.rank(backend, managers.latents())
    sender = SENDERS[backend](prefill, ADDRESS, ROOM)
    managers.read(prefill, managers.request(decode_rank(backend), ROOM, range(4)))
    return prefill, sender


def fails(decode, rank: int = 0) -> None:
    decode.apply_prefill_status(
        bootstrap_room=ROOM, status=KVPoll.Failed, prefill_rank=rank, failure_reason=REASON
    )


def reason_of(ended) -> str:
    """Of a request that has failed, as the scheduler finds out."""
    assert ended.poll() == KVPoll.Failed
    with pytest.raises(KVTransferError) as raised:
        ended.failure_exception()
    return raised.value.failure_reason


def nothing_kept(manager) -> bool:
    return not manager.request_status and not manager.failure_records


@backends
def test_two_prefill_ranks_fail_a_request_of_decode(backend, scheduler):
    """The scheduler is done with the first one's failure just as the second one's is read."""
    decode = decode_rank(backend)
    receiver = receiver_of(decode)
    fails(decode, 0)
    rooms = LookedUp(decode.request_status, scheduler, lambda: reason_of(receiver))
    decode.request_status = rooms
    fails(decode, 1)
    assert rooms.reason() == REASON
    assert nothing_kept(decode)


@backends
def test_a_failure_that_is_read_after_success_was_seen(backend):
    decode = decode_rank(backend)
    receiver = receiver_of(decode)
    decode.update_status(ROOM, KVPoll.Success)
    receiver.conclude_state = KVPoll.Success
    fails(decode)
    receiver.clear()
    assert nothing_kept(decode)


@backends
def test_a_request_that_its_client_gives_up_and_nobody_polls_again(backend):
    """Between stages that agree on rooms the scheduler clears it without asking why it failed."""
    decode = decode_rank(backend)
    receiver = receiver_of(decode)
    receiver.abort()
    receiver.clear()
    assert nothing_kept(decode)


@backends
def test_the_next_request_of_a_number_whose_pages_are_held(backend):
    """The engine clears a failed request once more when it frees its pages."""
    decode = decode_rank(backend)
    receiver = receiver_of(decode)
    receiver.abort()
    assert reason_of(receiver) == ABORTED
    following = receiver_of(decode)
    receiver.clear()
    assert following.poll() == KVPoll.Bootstrapping
    fails(decode)
    receiver.clear()
    assert reason_of(following) == REASON
    assert nothing_kept(decode)


@backends
def test_a_room_is_dropped_just_as_it_fails(backend, scheduler):
    prefill = managers.rank(backend, managers.latents())
    prefill.request_status[ROOM] = KVPoll.Bootstrapping  # of which no request has come
    rooms = LookedUp(prefill.request_status, scheduler, lambda: prefill._drop_room(ROOM))
    prefill.request_status = rooms
    prefill.record_failure(ROOM, REASON)
    rooms.reason()
    assert nothing_kept(prefill)


@backends
def test_decode_gives_a_request_up_just_as_prefill_ends_it(backend, scheduler):
    prefill, sender = prefill_rank(backend)
    prefill.update_status(ROOM, KVPoll.Failed)
    prefill.record_failure(ROOM, REASON)
    rooms = LookedUp(prefill.request_status, scheduler, lambda: reason_of(sender))
    prefill.request_status = rooms
    prefill._handle_abort_notification([ABORT_TAG, b"%d" % ROOM, b"127.0.0.1", b"5555"])
    assert rooms.reason() == REASON
    assert nothing_kept(prefill)


@backends
def test_a_worker_fails_a_request_just_as_the_scheduler_aborts_it(backend, scheduler):
    prefill, sender = prefill_rank(backend)

    def abort() -> str:
        sender.abort()
        return reason_of(sender)

    rooms = LookedUp(prefill.request_status, scheduler, abort)
    prefill.request_status = rooms
    prefill.conclude_failure(bootstrap_room=ROOM, failure_reason=REASON)
    assert rooms.reason() == ABORTED
    assert nothing_kept(prefill)


@backends
def test_decode_that_knows_that_it_has_all_does_not_hear_of_an_abort(backend):
    """Its client may be another's; of the request it would be said that it failed."""
    prefill, sender = prefill_rank(backend)
    prefill.conclude_transfer(bootstrap_room=ROOM, status=KVPoll.Success)
    assert managers.statuses(prefill) == [(ROOM, KVPoll.Success, None)]
    prefill.told.clear()
    sender.abort()
    assert prefill.told == []
    assert reason_of(sender) == ABORTED
    assert nothing_kept(prefill)
