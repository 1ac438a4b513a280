"""Decode: the scheduler does not wait for bootstrap servers, and finds restarted ones."""

import socket
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.pd import peer_sockets, prefill_servers, receiver

from pd_harness.polling import wait_until

pytestmark = pytest.mark.engine

PATIENCE = 10.0


@pytest.fixture
def decode(decode):
    """A decode rank's manager that checks its prefill servers."""
    decode.silent_seconds = 1.5
    decode.start_heartbeat()
    return decode


def send_pages(made) -> None:
    made.init(np.array([1, 2], np.int32), 0, None)


def is_located(made) -> bool:
    return wait_until(lambda: made.poll() == KVPoll.WaitingForInput, PATIENCE)


def has_failed(made) -> bool:
    return wait_until(lambda: made.poll() == KVPoll.Failed, PATIENCE)


def test_answering_server_is_queried_and_registered_once(decode, server, locate):
    for room in (7, 8):
        send_pages(locate(room))
    assert server.queried_ranks == [-1, 0]
    frames = [server.read() for _ in range(3)]
    assert frames[0] == [b"registers"]
    assert [b"7" in frames[1], b"8" in frames[2]] == [True, True]
    assert decode.required_prefill_response_num_table == {7: 1, 8: 1}


def test_stopped_bootstrap_server_does_not_block_the_scheduler(decode, server, make_receiver):
    server.open.clear()
    begun = time.monotonic()
    made = [make_receiver(room) for room in range(100)]
    assert {one.poll() for one in made} == {KVPoll.Bootstrapping}
    assert time.monotonic() - begun < 1
    assert server.queried_ranks == [-1]
    server.open.set()
    assert all(map(is_located, made))
    assert server.queried_ranks == [-1, 0]  # once each
    assert not decode.pending_queries


@pytest.mark.parametrize("is_first", [True, False])
def test_abort_during_a_bootstrap_query_reaches_prefill(server, make_receiver, is_first):
    server.open.clear()
    first, second = make_receiver(7), make_receiver(8)
    made = first if is_first else second
    made.abort()
    assert made.poll() == KVPoll.Failed
    server.open.set()
    frames = server.read()
    assert receiver.ABORT in frames and str(made.bootstrap_room).encode() in frames


def test_query_of_an_aborted_request_does_not_fail_the_next_one(decode, server, make_receiver):
    """The router uses the room again, while the query for the first request still runs."""
    server.open.clear()
    aborted = make_receiver(7)
    aborted.abort()
    assert aborted.poll() == KVPoll.Failed
    aborted.clear()
    again = make_receiver(7)
    aborted._fail("the query of the aborted request failed")
    assert 7 not in decode.failure_records and again.poll() == KVPoll.Bootstrapping
    server.open.set()
    assert receiver.ABORT in server.read() and is_located(again)


def test_aborts_during_a_bootstrap_query_start_no_threads(server, make_receiver):
    server.open.clear()
    made = [make_receiver(room) for room in range(200)]
    threads = threading.active_count()
    for one in made:
        one.abort()
    assert threading.active_count() <= threads
    assert {one.poll() for one in made} == {KVPoll.Failed}
    server.open.set()
    aborts = [server.read() for _ in made]
    at = aborts[0].index(receiver.ABORT) + 1
    assert {int(frames[at]) for frames in aborts} == set(range(200))


def test_scheduler_survives_when_no_thread_can_start(make_receiver, monkeypatch):
    def start(thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", start)
        made, refused = make_receiver(7), make_receiver(8)
        assert made.poll() == KVPoll.Bootstrapping
        refused.prefill = SimpleNamespace(attn_tp_size=1, pp_size=1, takes_aborts=True)
        refused._fail_incompatible("the servers do not fit")
    assert is_located(made)
    assert refused.poll() == KVPoll.Failed


def test_restarted_server_is_queried_again(decode, server, locate, monkeypatch):
    """Decode notices the restart before heartbeats fail; the new server has other sizes."""
    monkeypatch.setattr(peer_sockets, "LOST_SECONDS", 0.3)
    locate(7)
    assert server.read() == [b"registers"]
    server.close_rank()
    server.move_rank()
    assert wait_until(lambda: not decode.connection_pool, PATIENCE)
    assert not decode.prefill_servers
    server.sizes["prefill_attn_tp_size"] = 2
    made = locate(8)
    assert (made.prefill.attn_tp_size, made.required_prefill_response_num) == (2, 2)
    assert server.read() == [b"registers"]


def test_request_waiting_for_a_lost_rank_fails(decode, server, locate):
    """The request fails once, as far as is known, no write to its pages can be running."""
    decode.release_seconds, decode.unsettled_seconds = 1.0, 0.0
    made = locate(7)
    send_pages(made)
    assert made.poll() == KVPoll.WaitingForInput and not decode.silent_rooms
    server.close_rank()
    assert has_failed(made)
    assert "has not answered for 1.5 s" in decode.failure_records[7]
    with pytest.raises(Exception, match="has not answered"):
        made.failure_exception()
    assert not decode.requested_ranks


def start_heartbeats(decode, monkeypatch, *, succeed: bool) -> None:
    """Starts frequent heartbeats, of which all succeed or all fail."""
    monkeypatch.setattr(prefill_servers, "_is_healthy", lambda address: succeed)
    decode.heartbeat_interval = 0.05
    decode.start_heartbeat()


def test_replaced_server_at_the_same_address_is_detected(decode, server, locate, monkeypatch):
    """The old server runs on for a while, so no connection to it is lost."""
    start_heartbeats(decode, monkeypatch, succeed=True)
    locate(7)
    assert server.read() == [b"registers"]
    assert not decode.is_replaced(server.address) and decode.connection_pool
    server.move_rank()
    assert wait_until(lambda: not decode.connection_pool, PATIENCE)
    locate(8)
    assert server.read() == [b"registers"]


def test_failed_heartbeats_fail_rooms_of_a_stopped_server(decode, server, locate, monkeypatch):
    """Its ranks' connections were lost before, so decode has already dropped the server."""
    monkeypatch.setattr(peer_sockets, "LOST_SECONDS", 0.1)
    decode.silent_seconds = 60
    made = locate(7)
    assert server.read() == [b"registers"]
    send_pages(made)
    assert decode.addr_to_rooms_tracker[server.address] == {7}
    server.close_rank()
    assert wait_until(lambda: not decode.prefill_servers, PATIENCE)
    start_heartbeats(decode, monkeypatch, succeed=False)
    assert wait_until(lambda: made.poll() == KVPoll.Failed, 1)
    assert "Lost connection to prefill server" in decode.failure_records[7]


@pytest.mark.parametrize("rank_state", ["alive", "stopped"])
def test_pages_are_kept_while_a_rank_of_a_lost_server_may_write(
    decode, server, locate, monkeypatch, rank_state
):
    """Only the bootstrap server is cut off, or the rank is suspended: accepts but never reads."""
    monkeypatch.setattr(peer_sockets, "LOST_SECONDS", 0.1)
    decode.release_seconds, decode.unsettled_seconds = 2.0, 0.0
    made, waiting = locate(7), locate(8)
    send_pages(made)
    assert b"7" in [server.read() for _ in range(2)][1]
    if rank_state == "stopped":
        server.close_rank()
        assert wait_until(lambda: not decode.prefill_servers, PATIENCE)
        stopped = socket.create_server(("127.0.0.1", server.rank["rank_port"]))
    decode.silent_seconds = 60
    start_heartbeats(decode, monkeypatch, succeed=False)
    assert has_failed(waiting)  # it sent no request
    begun = time.monotonic()
    assert has_failed(made)
    assert time.monotonic() - begun > 1.5
    assert "Lost connection to prefill server" in decode.failure_records[7]
    made._end()
    assert not decode.lost_rooms
    if rank_state == "stopped":
        stopped.close()
    else:
        assert receiver.ABORT in server.read()


def test_invalid_address_does_not_stop_the_heartbeats(decode):
    """Clients name bootstrap servers; `requests` raises more than its own exceptions for some."""
    bad, lost = "prefill..svc:8998", "127.0.0.1:1"
    for room, address in ((7, bad), (8, lost)):
        decode.request_status[room] = KVPoll.Bootstrapping
        decode.addr_to_rooms_tracker[address].add(room)
    decode.heartbeat_interval = 0.05
    decode.start_heartbeat()
    assert wait_until(lambda: decode.failure_records.keys() == {7, 8}, PATIENCE)


def test_unresolvable_rank_does_not_count_as_closed():
    """The rank's address comes from its bootstrap server."""
    assert not prefill_servers._is_port_closed(("a" * 64, 1))
