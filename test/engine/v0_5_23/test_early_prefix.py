"""NIXL: a chunk that is queued before the end of its forward pass is sent after that pass."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import fake_managers
import numpy as np
import pytest
from fake_managers import DECODE, ENGINES, PATCHED
from sglang.srt.disaggregation.base.conn import KVPoll

from pd_harness.polling import wait_until

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("published")]

ROOM = 7
PATIENCE = 10.0


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
    kinds = getattr(request, "param", PATCHED)
    prefill = fake_managers.make_manager("nixl", fake_managers.mla_layout(), kinds=kinds)
    decode = fake_managers.make_manager("nixl", fake_managers.mla_layout(), DECODE)
    prefill.request_status[ROOM] = KVPoll.Bootstrapping
    fake_managers.process_messages(
        prefill,
        fake_managers.registration_message(decode),
        fake_managers.metadata_message(decode, ROOM, range(4)),
    )
    prefill.agent.check_xfer_state = lambda handle: "DONE"
    (queue,) = prefill.transfer_queues
    # A daemon, as the engine's worker never exits.
    thread = threading.Thread(target=prefill.transfer_worker, args=(queue,), daemon=True)
    thread.start()
    return prefill


def add(prefill, first: int, last: int, **more) -> None:
    pages = np.arange(first, last, dtype=np.int32)
    is_last = last == 4
    prefill.add_transfer_request(
        ROOM, pages, slice(first, last), is_last, aux_index=0 if is_last else None, **more
    )


def test_chunk_is_sent_after_its_event(prefill):
    event = Event()
    add(prefill, 0, 2, wait_event=event)
    add(prefill, 2, 4)
    time.sleep(0.3)
    assert not fake_managers.posted_copies(prefill)
    assert prefill.request_status[ROOM] == KVPoll.WaitingForInput
    event.set()
    assert wait_until(lambda: prefill.request_status[ROOM] == KVPoll.Success, PATIENCE, 0.01)
    assert fake_managers.posted_copies(prefill)


@pytest.mark.parametrize("prefill", [ENGINES], indirect=True)
def test_stock_sends_a_chunk_before_its_event(prefill):
    add(prefill, 0, 2, wait_event=Event())
    assert wait_until(lambda: fake_managers.posted_copies(prefill), PATIENCE, 0.01)


def test_failed_room_does_not_wait_for_its_event(prefill):
    prefill.update_status(ROOM, KVPoll.Failed)
    add(prefill, 0, 4, wait_event=Event())
    assert wait_until(lambda: not fake_managers.queued_chunks(prefill), PATIENCE, 0.01)
    with ThreadPoolExecutor(1) as executor:  # until the worker waits for another chunk
        idle = executor.submit(lambda: wait_until(lambda: not writes_or_busy(prefill), 1, 0.01))
        assert idle.result()
    assert not fake_managers.posted_copies(prefill)


def writes_or_busy(prefill) -> bool:
    return (
        bool(fake_managers.posted_copies(prefill)) or prefill._staging_outstanding.get(ROOM, 0) > 0
    )


def test_failed_event_fails_the_room(prefill):
    event = Event()
    event.error = RuntimeError("device lost")
    add(prefill, 0, 4, wait_event=event)
    assert wait_until(lambda: prefill.request_status[ROOM] == KVPoll.Failed, PATIENCE, 0.01)
    assert not fake_managers.posted_copies(prefill)
    ((room, status, reason),) = fake_managers.sent_statuses(prefill)
    assert (room, status) == (ROOM, KVPoll.Failed)
    assert reason == "Prefill could not wait for the pages of a cached prefix: device lost"


def test_event_of_a_chunk_does_not_delay_the_next(prefill):
    (queue,) = prefill.transfer_queues
    event = Event()
    add(prefill, 0, 2, wait_event=event)
    add(prefill, 2, 3)
    event.set()
    assert wait_until(
        lambda: fake_managers.posted_copies(prefill) and not len(queue), PATIENCE, 0.01
    )
    assert prefill.queuing.wait_event is None
