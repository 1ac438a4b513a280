"""NIXL: a chunk that is queued before the end of its forward pass is sent after that pass."""

import threading
import time

import fake_managers
import pytest
from engine_release import IS_0_5_18
from fake_managers import ENGINES, PATCHED, posted_copies, queued_chunks
from sglang.srt.disaggregation.base.conn import KVPoll

from pd_harness.polling import wait_until

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("published")]

ROOM = 7
PATIENCE = 10.0
FIRST, LAST = {"pages": (0, 1), "is_last": False}, {"pages": (2, 3), "start": 2}


class Event(threading.Event):
    """Replaces a CUDA event; `synchronize` raises `error`, if set, instead of waiting."""

    error: Exception | None = None

    def synchronize(self) -> None:
        if self.error:
            raise self.error
        assert self.wait(PATIENCE)


@pytest.fixture
def prefill(request):
    """A prefill rank with a running worker, from which a decode rank has requested a room."""
    prefill = fake_managers.prefill_rank("nixl", kinds=getattr(request, "param", PATCHED))
    prefill.sender = fake_managers.new_sender(prefill, ROOM)
    fake_managers.request_rooms(prefill, fake_managers.decode_rank("nixl"), ROOM)
    (queue,) = prefill.transfer_queues
    # A daemon, as the engine's worker never exits.
    thread = threading.Thread(target=prefill.transfer_worker, args=(queue,), daemon=True)
    thread.start()
    return prefill


def add_chunk(prefill, event: Event | None = None, **chunk) -> None:
    """Queues a chunk of the room as the scheduler does, with the event of its forward pass."""
    more = {}
    if IS_0_5_18:
        prefill.sender._early_send_wait_event = event
    else:
        more["wait_event"] = event
    fake_managers.add_chunk(prefill, ROOM, **chunk, **more)


def reaches_status(prefill, status: KVPoll) -> bool:
    return wait_until(lambda: prefill.request_status[ROOM] == status, PATIENCE, 0.01)


def test_chunk_is_sent_after_its_event(prefill):
    event = Event()
    add_chunk(prefill, event, **FIRST)
    add_chunk(prefill, **LAST)
    time.sleep(0.3)
    assert not posted_copies(prefill)
    assert prefill.request_status[ROOM] == KVPoll.WaitingForInput
    event.set()
    assert reaches_status(prefill, KVPoll.Success)
    assert posted_copies(prefill)


@pytest.mark.parametrize("prefill", [ENGINES], indirect=True)
def test_stock_sends_a_chunk_before_its_event(prefill):
    add_chunk(prefill, Event(), **FIRST)
    assert wait_until(lambda: posted_copies(prefill), PATIENCE, 0.01)


def test_failed_room_does_not_wait_for_its_event(prefill):
    prefill.update_status(ROOM, KVPoll.Failed)
    add_chunk(prefill, Event())
    assert wait_until(lambda: not queued_chunks(prefill), PATIENCE, 0.01)
    # Until the worker waits for another chunk:
    assert wait_until(lambda: prefill._staging_outstanding.get(ROOM, 0) <= 0, 1, 0.01)
    assert not posted_copies(prefill)


def test_failed_event_fails_the_room(prefill):
    event = Event()
    event.error = RuntimeError("device lost")
    add_chunk(prefill, event)
    assert reaches_status(prefill, KVPoll.Failed)
    assert not posted_copies(prefill)
    ((room, status, reason),) = fake_managers.sent_statuses(prefill)
    assert (room, status) == (ROOM, KVPoll.Failed)
    assert reason == "Prefill could not wait for the pages of a cached prefix: device lost"


def test_event_of_a_chunk_does_not_delay_the_next(prefill):
    (queue,) = prefill.transfer_queues
    event = Event()
    add_chunk(prefill, event, **FIRST)
    add_chunk(prefill, pages=(2,), start=2, is_last=False)
    event.set()
    assert wait_until(lambda: posted_copies(prefill) and not len(queue), PATIENCE, 0.01)
    kept = prefill.sender._early_send_wait_event if IS_0_5_18 else prefill.queuing.wait_event
    assert kept is None
