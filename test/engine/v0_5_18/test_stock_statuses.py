"""Mooncake: how a stock prefill rank tells decode that a room has ended."""

import fake_managers
import pytest
from fake_managers import process_messages
from sglang.srt.disaggregation.base.conn import KVPoll

pytestmark = pytest.mark.engine

ROOM = 7


class ClearedMeanwhile(dict):
    """Loses its rooms right after a look-up, as when the scheduler clears them just then."""

    def __contains__(self, room) -> bool:
        is_known = super().__contains__(room)
        self.clear()
        return is_known


@pytest.fixture
def decode(published):
    """A decode rank that waits for two prefill ranks."""
    decode = fake_managers.decode_rank("mooncake")
    decode.request_status[ROOM] = KVPoll.WaitingForInput
    decode.required_prefill_response_num_table[ROOM] = 2
    return decode


def status(status: KVPoll, rank: int, room: int = ROOM) -> list[bytes]:
    return [b"%d" % room, b"%d" % status, b"%d" % rank]


def test_room_succeeds_when_all_ranks_have(decode):
    process_messages(decode, status(KVPoll.Success, 0), status(KVPoll.Success, 0))
    assert decode.request_status[ROOM] == KVPoll.WaitingForInput
    process_messages(decode, status(KVPoll.Success, 1))
    assert decode.request_status[ROOM] == KVPoll.Success


def test_room_fails_with_a_reason(decode):
    process_messages(decode, status(KVPoll.Failed, 0))
    assert decode.request_status[ROOM] == KVPoll.Failed
    assert decode.failure_records[ROOM].startswith("Prefill failed")


@pytest.mark.parametrize("state", [KVPoll.Success, KVPoll.Failed, KVPoll.Transferring, 9])
def test_status_of_an_unknown_room_is_dropped(state, decode):
    process_messages(decode, status(state, 0, ROOM + 1))
    assert decode.request_status == {ROOM: KVPoll.WaitingForInput}


def test_room_that_is_cleared_meanwhile_does_not_end_the_thread(decode):
    decode.required_prefill_response_num_table = ClearedMeanwhile({ROOM: 1})
    process_messages(decode, status(KVPoll.Success, 0))
    assert not decode.prefill_response_tracker
