"""Decode: the scheduler does not wait for bootstrap servers, and finds restarted ones."""

import socket
import threading
import time
from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import pytest
import zmq
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.mooncake.conn import MooncakeKVManager, MooncakeKVReceiver
from sglang.srt.disaggregation.nixl.conn import NixlKVManager, NixlKVReceiver
from sglang.srt.disaggregation.pd import peer_sockets, prefill_servers, receiver
from sglang.srt.disaggregation.utils import DisaggregationMode

from pd_harness.polling import wait_until

pytestmark = pytest.mark.engine

ADDRESS, PATIENCE = "127.0.0.1:8998", 10.0
KINDS = {
    "mooncake": (MooncakeKVManager, MooncakeKVReceiver),
    "nixl": (NixlKVManager, NixlKVReceiver),
}
backends = pytest.mark.parametrize("backend", KINDS)


class PrefillRank:
    """The socket on which a prefill rank reads; `port` changes when the rank restarts."""

    def __init__(self):
        self.listen()

    def listen(self) -> None:
        self.sock = zmq.Context.instance().socket(zmq.PULL)
        self.port = self.sock.bind_to_random_port("tcp://127.0.0.1")

    def read(self) -> list[bytes] | None:
        return self.sock.recv_multipart() if self.sock.poll(5000) else None

    def restart(self) -> None:
        self.sock.close(linger=0)
        self.listen()


class BootstrapServer:
    """Answers HTTP queries in this process; `open` lets answers through."""

    def __init__(self, rank: PrefillRank):
        self.rank, self.queried_ranks, self.tp_size = rank, [], 1
        self.open = threading.Event()
        self.open.set()

    def get(self, url: str, params: dict, timeout) -> SimpleNamespace:
        self.queried_ranks.append(params["engine_rank"])
        assert self.open.wait(PATIENCE)
        sizes = {"attn_tp_size": self.tp_size, "dp_size": 1, "pp_size": 1, "page_size": 16}
        answer = {"rank_ip": "127.0.0.1", "rank_port": self.rank.port}
        if params["engine_rank"] == -1:
            answer = {f"prefill_{name}": size for name, size in sizes.items()}
            answer["takes_aborts"] = True
        return SimpleNamespace(status_code=200, text="", json=lambda: answer)


@pytest.fixture
def bootstrap(monkeypatch):
    rank = PrefillRank()
    server = BootstrapServer(rank)
    monkeypatch.setattr(prefill_servers.requests, "get", server.get)
    yield server
    rank.sock.close(linger=0)


def decode_rank(backend):
    kind, _ = KINDS[backend]
    manager = kind.__new__(kind)
    manager.__dict__.update(
        kv_args=SimpleNamespace(page_size=16, engine_rank=0, verifier=None, gpu_id=0),
        disaggregation_mode=DisaggregationMode.DECODE,
        is_mla_backend=False,
        request_status={},
        connection_pool={},
        connection_lock=threading.Lock(),
        addr_to_rooms_tracker=defaultdict(set),
        required_prefill_response_num_table={},
        prefill_response_tracker=defaultdict(set),
        transfer_statuses={},
        requested_rooms=set(),
        failing_rooms=set(),
        agent=SimpleNamespace(name="decode", get_new_notifs=dict),
        engine=SimpleNamespace(get_session_id=lambda: "127.0.0.1:1"),
        waiting_timeout=100,
        heartbeat_interval=100,
        max_failures=2,
        local_ip="127.0.0.1",
        rank_port=1,
        **{"attn_tp_rank": 0, "attn_tp_size": 1, "pp_rank": 0, "pp_size": 1},
    )
    manager.silent_seconds = 1.5
    manager.start_heartbeat()
    return manager


def receiver_of(backend, decode, room: int, **more):
    _, kind = KINDS[backend]

    class Registering(kind):
        def _register_kv_args(self):
            self._register([b"registers"])

    return Registering(decode, ADDRESS, room, **more)


def send_pages(made) -> None:
    made.init(np.array([1, 2], np.int32), 0, None)


def becomes_known(made) -> bool:
    return wait_until(lambda: made.poll() == KVPoll.WaitingForInput, PATIENCE, 0.01)


@backends
def test_answering_server_is_queried_and_registered_once(backend, bootstrap):
    decode = decode_rank(backend)
    for room in (7, 8):
        made = receiver_of(backend, decode, room)
        assert becomes_known(made)
        send_pages(made)
    assert bootstrap.queried_ranks == [-1, 0]
    frames = [bootstrap.rank.read() for _ in range(3)]
    assert frames[0] == [b"registers"]
    assert [b"7" in frames[1], b"8" in frames[2]] == [True, True]
    assert decode.required_prefill_response_num_table == {7: 1, 8: 1}


@backends
def test_stopped_bootstrap_server_does_not_block_the_scheduler(backend, bootstrap):
    decode = decode_rank(backend)
    bootstrap.open.clear()
    begun = time.monotonic()
    made = [receiver_of(backend, decode, room) for room in range(100)]
    assert {one.poll() for one in made} == {KVPoll.Bootstrapping}
    assert time.monotonic() - begun < 1
    assert bootstrap.queried_ranks == [-1]
    bootstrap.open.set()
    assert all(map(becomes_known, made))
    assert bootstrap.queried_ranks == [-1, 0]  # once each
    assert not decode.pending_queries


@backends
def test_server_that_returns_no_sizes_fails_the_request(backend, bootstrap, monkeypatch):
    def refuses(*_, **__):
        raise prefill_servers.requests.ConnectionError("nobody there")

    monkeypatch.setattr(prefill_servers.requests, "get", refuses)
    decode = decode_rank(backend)
    made = receiver_of(backend, decode, 7)
    assert wait_until(lambda: made.poll() == KVPoll.Failed, PATIENCE, 0.01)
    assert "did not return prefill's sizes" in decode.failure_records[7]
    assert made.pending_query is None


@backends
@pytest.mark.parametrize("is_first", [True, False])
def test_abort_during_a_bootstrap_query_reaches_prefill(backend, bootstrap, is_first):
    decode = decode_rank(backend)
    bootstrap.open.clear()
    first, made = (receiver_of(backend, decode, room) for room in (7, 8))
    made = first if is_first else made
    made.abort()
    assert made.poll() == KVPoll.Failed
    bootstrap.open.set()
    frames = bootstrap.rank.read()
    assert receiver.ABORT in frames and str(made.bootstrap_room).encode() in frames


@backends
def test_aborts_during_a_bootstrap_query_start_no_threads(backend, bootstrap):
    decode = decode_rank(backend)
    bootstrap.open.clear()
    made = [receiver_of(backend, decode, room) for room in range(200)]
    threads = threading.active_count()
    for one in made:
        one.abort()
    assert threading.active_count() <= threads
    assert {one.poll() for one in made} == {KVPoll.Failed}
    bootstrap.open.set()
    heard = [bootstrap.rank.read() for _ in made]
    at = heard[0].index(receiver.ABORT) + 1
    assert {int(frames[at]) for frames in heard} == set(range(200))


@backends
def test_scheduler_survives_when_no_thread_can_start(backend, bootstrap, monkeypatch):
    decode = decode_rank(backend)

    def start(thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", start)
        made, refused = (receiver_of(backend, decode, room) for room in (7, 8))
        assert made.poll() == KVPoll.Bootstrapping
        refused.prefill = SimpleNamespace(attn_tp_size=1, pp_size=1, takes_aborts=True)
        refused._fail_incompatible("the servers do not fit")
    assert becomes_known(made)
    assert refused.poll() == KVPoll.Failed


@backends
def test_restarted_server_is_queried_again(backend, bootstrap, monkeypatch):
    """Decode notices the restart before heartbeats fail; the new server has other sizes."""
    monkeypatch.setattr(peer_sockets, "LOST_SECONDS", 0.3)
    decode = decode_rank(backend)
    assert becomes_known(receiver_of(backend, decode, 7))
    assert bootstrap.rank.read() == [b"registers"]
    bootstrap.rank.restart()
    assert wait_until(lambda: not decode.connection_pool, PATIENCE, 0.01)
    assert not decode.prefill_servers
    bootstrap.tp_size = 2
    made = receiver_of(backend, decode, 8)
    assert becomes_known(made)
    assert (made.prefill.attn_tp_size, made.required_prefill_response_num) == (2, 2)
    assert bootstrap.rank.read() == [b"registers"]


@backends
def test_request_waiting_for_a_lost_rank_fails(backend, bootstrap):
    """The request fails once, as far as is known, no write to its pages can be running."""
    decode = decode_rank(backend)
    decode.release_seconds, decode.unsettled_seconds = 1.0, 0.0
    made = receiver_of(backend, decode, 7)
    assert becomes_known(made)
    send_pages(made)
    assert made.poll() == KVPoll.WaitingForInput and not decode.silent_rooms
    bootstrap.rank.sock.close(linger=0)
    assert wait_until(lambda: made.poll() == KVPoll.Failed, PATIENCE, 0.01)
    assert "has not answered for 1.5 s" in decode.failure_records[7]
    with pytest.raises(Exception, match="has not answered"):
        made.failure_exception()
    assert not decode.requested_ranks


@backends
def test_replaced_server_at_the_same_address_is_detected(backend, bootstrap, monkeypatch):
    """The old server runs on for a while, so no connection to it is lost."""
    monkeypatch.setattr(prefill_servers, "_is_healthy", lambda address: True)
    decode = decode_rank(backend)
    decode.heartbeat_interval = 0.05
    decode.start_heartbeat()
    assert becomes_known(receiver_of(backend, decode, 7))
    assert bootstrap.rank.read() == [b"registers"]
    assert not decode.is_replaced(ADDRESS) and decode.connection_pool
    bootstrap.rank = PrefillRank()
    assert wait_until(lambda: not decode.connection_pool, PATIENCE, 0.01)
    made = receiver_of(backend, decode, 8)
    assert becomes_known(made)
    assert bootstrap.rank.read() == [b"registers"]
    bootstrap.rank.sock.close(linger=0)


@backends
def test_failed_heartbeats_fail_rooms_of_a_stopped_server(backend, bootstrap, monkeypatch):
    """Its ranks' connections were lost before, so decode has already dropped the server."""
    monkeypatch.setattr(peer_sockets, "LOST_SECONDS", 0.1)
    monkeypatch.setattr(prefill_servers, "_is_healthy", lambda address: False)
    decode = decode_rank(backend)
    decode.silent_seconds = 60
    made = receiver_of(backend, decode, 7)
    assert becomes_known(made)
    assert bootstrap.rank.read() == [b"registers"]
    send_pages(made)
    assert decode.addr_to_rooms_tracker[ADDRESS] == {7}
    bootstrap.rank.sock.close(linger=0)
    assert wait_until(lambda: not decode.prefill_servers, PATIENCE, 0.01)
    decode.heartbeat_interval = 0.05
    decode.start_heartbeat()
    assert wait_until(lambda: made.poll() == KVPoll.Failed, 1, 0.01)
    assert "Lost connection to prefill server" in decode.failure_records[7]


def fail_heartbeats(decode, monkeypatch) -> None:
    """Makes all further heartbeats fail, so that the server counts as lost."""
    monkeypatch.setattr(prefill_servers, "_is_healthy", lambda address: False)
    decode.silent_seconds, decode.heartbeat_interval = 60, 0.05
    decode.start_heartbeat()


@backends
@pytest.mark.parametrize("rank_state", ["alive", "stopped"])
def test_pages_are_kept_while_a_rank_of_a_lost_server_may_write(
    backend, bootstrap, monkeypatch, rank_state
):
    """Only the bootstrap server is cut off, or the rank is suspended: accepts but never reads."""
    monkeypatch.setattr(peer_sockets, "LOST_SECONDS", 0.1)
    decode = decode_rank(backend)
    decode.release_seconds, decode.unsettled_seconds = 2.0, 0.0
    made, waiting = (receiver_of(backend, decode, room) for room in (7, 8))
    assert becomes_known(made) and becomes_known(waiting)
    send_pages(made)
    assert b"7" in [bootstrap.rank.read() for _ in range(2)][1]
    if rank_state == "stopped":
        bootstrap.rank.sock.close(linger=0)
        assert wait_until(lambda: not decode.prefill_servers, PATIENCE, 0.01)
        stopped = socket.create_server(("127.0.0.1", bootstrap.rank.port))
    fail_heartbeats(decode, monkeypatch)
    assert wait_until(lambda: waiting.poll() == KVPoll.Failed, PATIENCE, 0.01)  # it sent no request
    begun = time.monotonic()
    assert wait_until(lambda: made.poll() == KVPoll.Failed, PATIENCE, 0.01)
    assert time.monotonic() - begun > 1.5
    assert "Lost connection to prefill server" in decode.failure_records[7]
    made._end()
    assert not decode.lost_rooms
    if rank_state == "stopped":
        stopped.close()
    else:
        assert receiver.ABORT in bootstrap.rank.read()


@backends
def test_invalid_address_does_not_stop_the_heartbeats(backend):
    """Clients name bootstrap servers; `requests` raises more than its own exceptions for some."""
    decode = decode_rank(backend)
    bad, lost = "prefill..svc:8998", "127.0.0.1:1"
    for room, address in ((7, bad), (8, lost)):
        decode.request_status[room] = KVPoll.Bootstrapping
        decode.addr_to_rooms_tracker[address].add(room)
    decode.heartbeat_interval = 0.05
    decode.start_heartbeat()
    assert wait_until(lambda: decode.failure_records.keys() == {7, 8}, PATIENCE, 0.01)


def test_unresolvable_rank_does_not_count_as_closed():
    """The rank's address comes from its bootstrap server."""
    assert not prefill_servers._is_port_closed(("a" * 64, 1))
