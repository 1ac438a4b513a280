"""Mooncake: pages of a request are kept only if something of it may have been written."""

import fake_managers
import pytest
from fake_managers import ENDPOINT, add_chunk, decode_rank, posted_copies, prefill_rank
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.pd.held_pages import ACK
from sglang.srt.disaggregation.pd.room_failures import abort_message

pytestmark = pytest.mark.engine

ROOM, LATER = 7, 8
SESSION = fake_managers.PEER["mooncake"]


@pytest.fixture
def prefill(published):
    """A prefill rank from which a decode rank has requested two rooms."""
    prefill = prefill_rank("mooncake")
    fake_managers.request_rooms(prefill, decode_rank("mooncake"), ROOM, LATER)
    return prefill


def send(prefill, room: int) -> None:
    """Lets a worker send a chunk of the room."""
    add_chunk(prefill, room)
    fake_managers.run_worker(prefill)
    (queue,) = set(prefill.transfer_queues)
    queue.put(None)
    assert queue.get() is None  # a worker has finished its chunk when it asks for the next


def acknowledges_abort(prefill, room: int) -> bool:
    """Aborts the room as decode; returns whether prefill says that no write is left."""
    prefill.notified.clear()
    prefill._handle_abort_notification(abort_message(room, ENDPOINT, 3))
    return [frames[0] for _, frames in prefill.notified] == [ACK]


def test_request_to_a_pausing_session_frees_its_pages(prefill):
    """Otherwise decode would keep all pages that are requested within a pause for 30 s."""
    prefill.failed_sessions.add(SESSION)
    send(prefill, ROOM)
    assert prefill.request_status[ROOM] == KVPoll.Failed and not posted_copies(prefill)
    assert acknowledges_abort(prefill, ROOM)


def test_request_whose_write_failed_keeps_its_pages(prefill):
    prefill.engine.batch_transfer_sync = lambda *lists: -1
    send(prefill, ROOM)
    assert prefill.request_status[ROOM] == KVPoll.Failed
    assert not acknowledges_abort(prefill, ROOM)


@pytest.mark.parametrize("in_threads", [False, True])
def test_request_whose_write_is_refused_frees_its_pages(in_threads, prefill):
    """Unless threads of the engine may be writing other layers."""
    prefill.enable_custom_mem_pool = in_threads
    outside = [(1, 1, 8)]
    prefill.send_kvcache = lambda session, *_, **__: prefill._transfer_data(session, outside)
    send(prefill, ROOM)
    assert "nothing of this transfer is written" in prefill.failure_records[ROOM]
    assert not posted_copies(prefill)
    assert acknowledges_abort(prefill, ROOM) != in_threads


def test_pause_of_an_earlier_request_does_not_count(prefill):
    prefill.failed_sessions.add(SESSION)
    send(prefill, ROOM)
    prefill.failed_sessions.discard(SESSION)
    prefill.engine.batch_transfer_sync = lambda *lists: -1
    send(prefill, LATER)
    assert not acknowledges_abort(prefill, LATER)
