"""Decode is notified of a request that prefill aborts, whatever queue the request was in."""

import gc

import fake_managers
import pytest
from fake_managers import SENDERS, finish_failed, register, send_metadata, sent_statuses
from sglang.srt.disaggregation.base.conn import KVPoll

pytestmark = pytest.mark.engine

ROOM, ADDRESS = 7, "127.0.0.1:8998"
ABORTED = "Aborted by AbortReq."


def new_sender(prefill):
    sender = SENDERS[fake_managers.backend_of(prefill)]
    return sender(prefill, ADDRESS, ROOM, dest_tp_ranks=[0], pp_rank=0)


@pytest.fixture
def sender(prefill, decode):
    """The sender of a request whose room a decode rank has requested."""
    made = new_sender(prefill)
    register(prefill, decode)
    send_metadata(prefill, decode, ROOM)
    return made


def test_aborted_request_is_reported_and_dropped_at_once(prefill, sender):
    """The scheduler never polls a request again that it aborts while its prompt is computed."""
    sender.abort()
    assert sent_statuses(prefill) == [(ROOM, KVPoll.Failed, ABORTED)]
    assert not prefill.request_status and not prefill.transfer_infos
    assert not prefill.failure_records


def test_second_abort_does_nothing(prefill, decode, sender):
    sender.abort()
    following = new_sender(prefill)
    send_metadata(prefill, decode, ROOM)
    sender.abort()
    assert following.poll() == KVPoll.WaitingForInput
    assert len(sent_statuses(prefill)) == 1


def test_aborted_request_has_failed_though_its_room_is_reused(prefill, decode, sender):
    sender.abort()
    following = new_sender(prefill)
    send_metadata(prefill, decode, ROOM)
    assert finish_failed(sender) == ABORTED
    assert following.poll() == KVPoll.WaitingForInput


def test_request_that_the_scheduler_drops_is_reported(prefill, decode):
    """The scheduler takes an aborted request from its waiting queue, and does not say so."""
    register(prefill, decode)
    dropped = [new_sender(prefill)]
    send_metadata(prefill, decode, ROOM)
    assert dropped[0].poll() == KVPoll.WaitingForInput
    dropped.clear()
    gc.collect()
    prefill.check_peers()
    ((room, status, _),) = sent_statuses(prefill)
    assert (room, status) == (ROOM, KVPoll.Failed)
    assert not prefill.request_status and not prefill.transfer_infos


def test_timeout_is_reported_when_it_is_noticed(prefill, decode):
    """Another rank may take a while until the scheduler ends the request."""
    prefill.bootstrap_timeout = 0
    sender = new_sender(prefill)
    register(prefill, decode)
    send_metadata(prefill, decode, ROOM, required_dst_info_num=2)
    assert sender.poll() == KVPoll.Failed
    ((room, status, reason),) = sent_statuses(prefill)
    assert (room, status) == (ROOM, KVPoll.Failed) and "timed out" in reason


@pytest.mark.parametrize("count", [0, -1])
def test_chunk_count_of_a_failed_room_is_dropped(count, prefill, sender):
    """The engine keeps the count if a chunk other than the last ends after the room has failed."""
    prefill._staging_outstanding[ROOM] = count
    sender.abort()
    assert ROOM not in prefill._staging_outstanding
