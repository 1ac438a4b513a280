"""NIXL's notifications: one that the engine cannot read ends neither a server nor other rooms."""

from collections import defaultdict

import fake_managers
import pytest
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.nixl.conn import TransferStatus

pytestmark = pytest.mark.engine

ROOM, CLOSED = 5, 6
GOOD = b"5_kv_0_1_0"
BAD = [
    [b""],
    [b"\xff"],
    [b"5"],
    [b"x_kv_0_1_0"],
    [b"5_kv"],
    [b"5_kv_1"],
    [b"5_kv_1_x_0"],
    [b"5_kv_1_0_0_part_2_2"],
    [b"5_kv_1_0_0_part_0_2", b"5_kv_1_0_0_part_0_3"],
    [b"5_stg_1_0_0"],
    [b"5_stg_1_0_0_0_0_1_peer"],
    [b"5_state_x"],
]


@pytest.fixture
def decode(published):
    """A decode rank without staging buffers, and with one open room."""
    decode = fake_managers.decode_rank("nixl")
    del decode._staging_handler  # the engine sets it only with staging buffers
    decode.transfer_statuses = defaultdict(TransferStatus)
    decode.required_prefill_response_num_table[ROOM] = 1
    decode.request_status[ROOM] = KVPoll.WaitingForInput
    return decode


def arrive(decode, *notifications: bytes) -> None:
    decode.agent.agent.get_new_notifs = lambda: {"peer": list(notifications)}
    decode.update_transfer_status()


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: str(bad[-1]))
def test_bad_notification_is_dropped(bad, decode):
    arrive(decode, *bad, GOOD)
    status = decode.transfer_statuses[ROOM]
    assert status.received_kvs_per_pp == {0: {0}} and status.expected_kvs_per_pp == {0: 1}
    assert not status.received_aux


def test_room_that_is_over_is_not_opened_again(decode):
    arrive(decode, b"%d_kv_0_1_0" % CLOSED, b"%d_aux" % CLOSED, GOOD)
    assert set(decode.transfer_statuses) == {ROOM}


def test_room_is_done_by_its_notifications(decode):
    arrive(decode, GOOD)
    assert not decode.check_transfer_done(ROOM)
    arrive(decode, b"5_aux")
    assert decode.check_transfer_done(ROOM)


def test_nothing_is_read_twice(decode):
    arrive(decode, GOOD)
    decode.transfer_statuses.clear()
    arrive(decode)
    assert not decode.transfer_statuses
