"""Which of several reasons the client of a failed request is told."""

import pytest
from fake_managers import RECEIVERS, finish_failed, request_rooms, sent_statuses
from sglang.srt.disaggregation.base.conn import KVPoll

pytestmark = pytest.mark.engine

ROOM, ADDRESS = 7, "127.0.0.1:8998"
FIRST, LATER = "no memory", "the request failed on another rank"


@pytest.fixture
def receiver(backend, decode):
    return RECEIVERS[backend](decode, ADDRESS, ROOM)


def test_reason_that_is_given_after_an_abort(decode, receiver):
    """The engine aborts a request of its own accord, and then records why."""
    receiver.abort()
    decode.record_failure(ROOM, FIRST)
    assert finish_failed(receiver) == FIRST


def test_first_prefill_rank_that_reports_a_failure(decode, receiver):
    for rank, reason in enumerate((FIRST, LATER)):
        decode.apply_status(ROOM, KVPoll.Failed, rank, reason)
    assert finish_failed(receiver) == f"Prefill failed: {FIRST}"


def test_report_of_prefill_after_the_reason_of_decode(decode, receiver):
    decode.record_failure(ROOM, FIRST)
    decode.update_status(ROOM, KVPoll.Failed)
    decode.apply_status(ROOM, KVPoll.Failed, 0, LATER)
    assert finish_failed(receiver) == FIRST


def test_prefill_reports_the_first_reason(prefill, decode):
    request_rooms(prefill, decode, ROOM)
    for reason in (FIRST, LATER):
        prefill.conclude_failure(bootstrap_room=ROOM, failure_reason=reason)
    assert set(sent_statuses(prefill)) == {(ROOM, KVPoll.Failed, FIRST)}
