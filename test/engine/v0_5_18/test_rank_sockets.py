"""Decode's messages to prefill ranks: only what a rank reads, and no crash without a socket."""

import errno

import fakes_0_5_18
import numpy as np
import pytest
import zmq
from fake_managers import RECEIVERS, backend_of, registration_message
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.kv_layout import is_extension_frame
from sglang.srt.disaggregation.pd.status_messages import STATUS_READER

pytestmark = pytest.mark.engine

ROOM = 7


def is_ours(frame: bytes) -> bool:
    return is_extension_frame(frame) or frame == STATUS_READER


def test_own_frames_are_sent_only_to_ranks_that_read_them(decode):
    patched, stock = (registration_message(decode, is_described=one) for one in (True, False))
    assert any(map(is_ours, patched)) and not any(map(is_ours, stock))
    assert patched[: len(stock)] == stock


@pytest.mark.parametrize("message", ["registration", "metadata"])
def test_socket_error_fails_only_that_request(message, decode):
    """Such as no free file descriptor, or an address that ZeroMQ rejects."""

    def is_silent(rank: dict) -> bool:
        raise zmq.ZMQError(errno.EMFILE)

    decode.is_silent = is_silent
    decode.request_status[ROOM] = KVPoll.Bootstrapping
    receiver = fakes_0_5_18.receiver_of(decode, RECEIVERS[backend_of(decode)], ROOM)
    if message == "registration":
        assert not receiver._register_kv_args()
    else:
        receiver.send_metadata(np.array([1], np.int32), 0, None)
    assert decode.request_status[ROOM] == receiver.conclude_state == KVPoll.Failed
    assert "127.0.0.1:1" in decode.failure_records[ROOM]
