"""NIXL: a chunk that is queued before the forward that writes it has ended is sent after that."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import managers
import numpy as np
import pytest
from managers import DECODE, ENGINES, PATCHED
from sglang.srt.disaggregation.base.conn import KVPoll

from pd_harness.waiting import awaited

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("published")]

ROOM = 7
PATIENCE = 10.0


class Event(threading.Event):
    """As CUDA's; `error` is raised instead of waiting."""

    error: Exception | None = None

    def synchronize(self) -> None:
        if self.error:
            raise self.error
        assert self.wait(PATIENCE)


@pytest.fixture
def prefill(request):
    """A prefill rank that a decode rank has asked for a room, and its worker."""
    kinds = getattr(request, "param", PATCHED)
    prefill = managers.rank("nixl", managers.latents(), kinds=kinds)
    decode = managers.rank("nixl", managers.latents(), DECODE)
    prefill.request_status[ROOM] = KVPoll.Bootstrapping
    managers.read(prefill, managers.registration(decode), managers.request(decode, ROOM, range(4)))
    prefill.agent.check_xfer_state = lambda handle: "DONE"
    (queue,) = prefill.transfer_queues
    # The engine's worker never ends.
    thread = threading.Thread(target=prefill.transfer_worker, args=(queue,), daemon=True)
    thread.start()
    return prefill


def add(prefill, first: int, last: int, **more) -> None:
    pages = np.arange(first, last, dtype=np.int32)
    is_last = last == 4
    prefill.add_transfer_request(
        ROOM, pages, slice(first, last), is_last, aux_index=0 if is_last else None, **more
    )


def test_it_is_sent_when_the_event_has_come(prefill):
    event = Event()
    add(prefill, 0, 2, wait_event=event)
    add(prefill, 2, 4)
    time.sleep(0.3)
    assert not managers.writes(prefill)
    assert prefill.request_status[ROOM] == KVPoll.WaitingForInput
    event.set()
    assert awaited(lambda: prefill.request_status[ROOM] == KVPoll.Success, PATIENCE, 0.01)
    assert managers.writes(prefill)


@pytest.mark.parametrize("prefill", [ENGINES], indirect=True)
def test_the_engine_sends_it_at_once(prefill):
    add(prefill, 0, 2, wait_event=Event())
    assert awaited(lambda: managers.writes(prefill), PATIENCE, 0.01)


def test_a_room_that_has_failed_waits_for_nothing(prefill):
    prefill.update_status(ROOM, KVPoll.Failed)
    add(prefill, 0, 4, wait_event=Event())
    assert awaited(lambda: not managers.queued(prefill), PATIENCE, 0.01)
    with ThreadPoolExecutor(1) as executor:  # the worker has come back for another chunk
        assert executor.submit(lambda: awaited(lambda: not writes_or_busy(prefill), 1, 0.01))
    assert not managers.writes(prefill)


def writes_or_busy(prefill) -> bool:
    return bool(managers.writes(prefill)) or prefill._staging_outstanding.get(ROOM, 0) > 0


def test_an_event_that_fails_fails_the_room(prefill):
    event = Event()
    event.error = RuntimeError("device lost")
    add(prefill, 0, 4, wait_event=event)
    assert awaited(lambda: prefill.request_status[ROOM] == KVPoll.Failed, PATIENCE, 0.01)
    assert not managers.writes(prefill)
    ((room, status, reason),) = managers.statuses(prefill)
    assert (room, status) == (ROOM, KVPoll.Failed)
    assert reason == "Prefill could not wait for the pages of a cached prefix: device lost"


def test_one_chunks_event_is_not_the_next_ones(prefill):
    (queue,) = prefill.transfer_queues
    event = Event()
    add(prefill, 0, 2, wait_event=event)
    add(prefill, 2, 3)
    event.set()
    assert awaited(lambda: managers.writes(prefill) and not len(queue), PATIENCE, 0.01)
    assert prefill.queuing.wait_event is None
