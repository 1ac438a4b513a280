"""Mori keeps the engine's receiver, which does not poll for prefill's ranks."""

import threading

import engine_calls
import pytest
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.pd.room_failures import DUPLICATE_ROOM

pytestmark = pytest.mark.engine


@pytest.fixture
def make_receiver(decode, server):
    """A function that makes a room's receiver over Mori, which registers nothing."""

    class Receiver(engine_calls.import_mori().MoriKVReceiver):
        def _register_kv_args(self):
            assert self.bootstrap_infos

    decode.room_to_bootstrap_addr, decode.failure_lock = {}, threading.Lock()
    decode._cleanup_room_tracking = lambda room: None
    return lambda room: Receiver(decode, server.address, room)


def test_request_waits_for_a_slow_bootstrap_server(server, make_receiver):
    server.open.clear()
    threading.Timer(0.3, server.open.set).start()
    receiver = make_receiver(7)
    assert receiver.poll() == KVPoll.WaitingForInput
    assert [rank["rank_port"] for rank in receiver.bootstrap_infos] == [server.rank["rank_port"]]


def test_failed_query_fails_the_request(server, make_receiver):
    server.sizes = {}
    assert make_receiver(7).poll() == KVPoll.Failed


def test_second_request_of_a_room_fails(decode, make_receiver):
    """It fails without affecting the first."""
    first, second = make_receiver(7), make_receiver(7)
    assert second.poll() == KVPoll.Failed
    second.abort()
    second.clear()
    with pytest.raises(RuntimeError, match=DUPLICATE_ROOM):
        second.failure_exception()
    assert first.poll() == KVPoll.WaitingForInput
    decode.update_status(7, KVPoll.Success)
    assert (first.poll(), second.poll()) == (KVPoll.Success, KVPoll.Failed)
    first.clear()
    assert not decode.request_status
