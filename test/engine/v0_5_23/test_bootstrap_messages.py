"""Decode's messages to prefill ranks: only what a rank reads, and no crash without a socket."""

import errno

import fake_managers
import pytest
import zmq
from sglang.srt.disaggregation.base.conn import KVPoll

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("published")]

ROOM = 7


def test_socket_error_fails_only_that_request(decode):
    """Such as no free file descriptor, or an address that ZeroMQ rejects."""

    def is_silent(rank: dict) -> bool:
        raise zmq.ZMQError(errno.EMFILE)

    decode.is_silent = is_silent
    decode.request_status[ROOM] = KVPoll.Bootstrapping
    receiver = object.__new__(fake_managers.common.CommonKVReceiver)
    receiver.kv_mgr, receiver.bootstrap_room = decode, ROOM
    info = {"rank_ip": "127.0.0.1", "rank_port": 1}
    assert not receiver._send_bootstrap_message(
        bootstrap_info=info, message=[], operation="send_metadata"
    )
    assert decode.request_status[ROOM] == receiver.conclude_state == KVPoll.Failed
    assert "socket to prefill rank 127.0.0.1:1: Too many open" in decode.failure_records[ROOM]


@pytest.mark.parametrize("reads", [True, False], ids=["patched", "stock"])
def test_layout_is_sent_only_to_ranks_that_read_it(reads, decode, monkeypatch):
    sent = []
    engine = fake_managers.common.EngineCommonKVReceiver
    monkeypatch.setattr(engine, "_send_bootstrap_message", lambda self, **said: sent.append(said))
    receiver = object.__new__(fake_managers.common.CommonKVReceiver)
    receiver.kv_mgr = decode
    info = {"rank_ip": "127.0.0.1", "rank_port": 1, **({"reads_layouts": True} if reads else {})}
    said = {"bootstrap_info": info, "operation": "_register_kv_args"}
    receiver._send_bootstrap_message(message=fake_managers.registration_message(decode), **said)
    assert sent == [{**said, "message": fake_managers.registration_message(decode, reads)}]
