"""Decode: the scheduler does not wait for bootstrap servers, and finds restarted ones."""

import threading
import time
from types import SimpleNamespace

import fake_managers
import pytest
import zmq
from fake_managers import BACKENDS, DECODE, RECEIVERS
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common import conn as common
from sglang.srt.disaggregation.decode import DecodePreallocQueue
from sglang.srt.disaggregation.nixl.conn import NixlKVReceiver
from sglang.srt.disaggregation.pd import peer_sockets, prefill_servers
from sglang.srt.disaggregation.pd.peer_sockets import PeerSocket

from pd_harness.polling import wait_until
from pd_harness.ports import free_ports

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("published")]

backends = pytest.mark.parametrize("backend", BACKENDS)
ADDRESS, PATIENCE = "127.0.0.1:8998", 10.0
SIZES = {
    **{"attn_tp_size": 1, "attn_cp_size": 1, "dp_size": 2, "pp_size": 1},
    **{
        "page_size": fake_managers.PAGE,
        "kv_cache_dtype": "bfloat16",
        "follow_bootstrap_room": True,
    },
}


class BootstrapServer:
    """Answers HTTP queries in this process; `open` lets answers through."""

    def __init__(self, port: int = 1):
        self.port, self.asked = port, []
        self.open = threading.Event()
        self.open.set()

    def get(self, url: str, params=None, timeout=None) -> SimpleNamespace:
        assert self.open.wait(PATIENCE)
        given = params or dict(pair.split("=") for pair in url.partition("?")[2].split("&"))
        dp = int(given["prefill_dp_rank"])
        self.asked.append(dp)
        answer = dict(SIZES) if dp == -1 else {"rank_ip": "127.0.0.1", "rank_port": self.port + dp}
        return SimpleNamespace(
            status_code=200, text="", json=lambda: answer, raise_for_status=lambda: None
        )


@pytest.fixture
def bootstrap(monkeypatch):
    server = BootstrapServer()
    session = SimpleNamespace(get=server.get, __enter__=lambda: None, __exit__=lambda *_: None)

    class Session:
        get = staticmethod(server.get)

        def __enter__(self):
            return session

        def __exit__(self, *_):
            pass

    monkeypatch.setattr(common, "_get_bootstrap_session", lambda address: session)
    monkeypatch.setattr(common.requests, "get", server.get)
    monkeypatch.setattr(prefill_servers.requests, "Session", Session)
    return server


def decode_rank(backend):
    return fake_managers.make_manager(
        backend, fake_managers.mla_layout(), DECODE, heartbeat_failures={}
    )


def is_resolved(decode) -> bool:
    return wait_until(lambda: decode.try_ensure_parallel_info(ADDRESS), PATIENCE, 0.01)


def resolve_dp_rank(decode, room: int):
    """The DP rank from which decode's scheduler requests a room; None while it is unknown."""
    queue = object.__new__(DecodePreallocQueue)
    queue.kv_manager = decode
    host, port = ADDRESS.split(":")
    req = SimpleNamespace(bootstrap_host=host, bootstrap_port=int(port), bootstrap_room=room)
    req.disagg_prefill_dp_rank = None
    return queue._resolve_prefill_dp_rank(req)


@backends
def test_answering_server_is_resolved_with_all_its_ranks(backend, bootstrap):
    decode = decode_rank(backend)
    assert is_resolved(decode)
    assert bootstrap.asked == [-1, 0, 1]
    receiver = RECEIVERS[backend](decode, ADDRESS, 7)
    found = receiver._get_bootstrap_info_from_server(1, 0, 0, 0)
    assert (found["rank_port"], found["pp_rank"]) == (2, 0)
    found["is_dummy"] = True  # the engine sets it for this request only
    assert "is_dummy" not in receiver._get_bootstrap_info_from_server(1, 0, 0, 0)
    assert decode.try_ensure_parallel_info(ADDRESS)
    assert bootstrap.asked == [-1, 0, 1]


@backends
def test_stopped_bootstrap_server_does_not_block_the_scheduler(backend, bootstrap):
    decode = decode_rank(backend)
    bootstrap.open.clear()
    begun = time.monotonic()
    assert not any(decode.try_ensure_parallel_info(ADDRESS) for _ in range(5))
    assert time.monotonic() - begun < 1
    bootstrap.open.set()
    assert is_resolved(decode)
    assert bootstrap.asked == [-1, 0, 1]  # once each


@backends
def test_scheduler_waits_for_a_query_only_once(backend, bootstrap, monkeypatch):
    """Otherwise it would wait at each lookup, for each of many stopped servers."""
    monkeypatch.setattr(prefill_servers, "ANSWER_WAIT_SECONDS", 0.5)
    decode = decode_rank(backend)
    bootstrap.open.clear()
    seconds = []
    for _ in range(3):
        begun = time.monotonic()
        assert not decode.try_ensure_parallel_info(ADDRESS)
        seconds.append(time.monotonic() - begun)
    bootstrap.open.set()
    assert seconds[0] > 0.4 and sum(seconds[1:]) < 0.4


@backends
def test_server_stopped_before_its_ranks_are_known_does_not_block(backend, bootstrap, monkeypatch):
    """A request that is opened then would query the ranks itself."""
    decode, ask, is_open = decode_rank(backend), prefill_servers.query_route, threading.Event()
    monkeypatch.setattr(
        prefill_servers, "query_route", lambda *of: is_open.wait(PATIENCE) and ask(*of)
    )
    assert not decode.try_ensure_parallel_info(ADDRESS)
    assert wait_until(lambda: ADDRESS in decode.prefill_info_table, PATIENCE, 0.01)
    assert resolve_dp_rank(decode, 7) is None
    is_open.set()
    assert is_resolved(decode)
    assert resolve_dp_rank(decode, 7) == 1


def test_stock_scheduler_waits_for_the_bootstrap_server(bootstrap):
    decode = decode_rank("nixl")
    ask = common.EngineCommonKVManager.try_ensure_parallel_info
    bootstrap.open.clear()
    threading.Timer(0.5, bootstrap.open.set).start()
    begun = time.monotonic()
    assert ask(decode, ADDRESS)
    assert time.monotonic() - begun > 0.4


@backends
def test_server_with_missing_ranks_is_queried_again(backend, bootstrap, monkeypatch):
    """A thread queries it: the scheduler would wait if the request queried missing ranks."""
    decode = decode_rank(backend)

    def unknown(*_):
        raise OSError("404")

    with monkeypatch.context() as away:
        away.setattr(prefill_servers, "query_route", unknown)
        assert not any(decode.try_ensure_parallel_info(ADDRESS) for _ in range(3))
    assert is_resolved(decode)
    assert decode.cached_rank(ADDRESS, (1, 0, 0, 0))["rank_port"] == 2
    assert bootstrap.asked[-3:] == [-1, 0, 1]


@backends
def test_ranks_of_a_dropped_server_are_queried_again(backend, bootstrap):
    """Heartbeats have failed, and another process has the address by now."""
    decode = decode_rank(backend)
    assert is_resolved(decode)
    decode.prefill_info_table.pop(ADDRESS)
    bootstrap.port = 100
    assert is_resolved(decode)
    receiver = RECEIVERS[backend](decode, ADDRESS, 7)
    assert receiver._get_bootstrap_info_from_server(0, 0, 0, 0)["rank_port"] == 100


@backends
def test_unclaimed_answer_of_a_dropped_server_is_discarded(backend, bootstrap):
    """Its request was aborted; with that answer, the next one would query the rank itself."""
    decode = decode_rank(backend)
    bootstrap.open.clear()
    assert not decode.try_ensure_parallel_info(ADDRESS)
    bootstrap.open.set()
    assert wait_until(decode.pending_queries[ADDRESS].done, PATIENCE, 0.01)
    decode.drop_server(ADDRESS)
    assert not decode.try_ensure_parallel_info(ADDRESS)
    assert is_resolved(decode) and resolve_dp_rank(decode, 7) == 1


@backends
def test_replaced_server_at_the_same_address_is_detected(backend, bootstrap, monkeypatch):
    """The old server runs on for a while, so no connection to it is lost."""
    decode = decode_rank(backend)
    assert is_resolved(decode)
    decode._on_heartbeat_success(ADDRESS)
    assert ADDRESS in decode.prefill_info_table
    bootstrap.port = 100
    with monkeypatch.context() as away:
        away.setattr(prefill_servers, "query_route", lambda *_: 1 / 0)
        decode._on_heartbeat_success(ADDRESS)
    common.EngineCommonKVManager._on_heartbeat_success(decode, ADDRESS)
    assert ADDRESS in decode.prefill_info_table
    decode._on_heartbeat_success(ADDRESS)
    assert ADDRESS not in decode.prefill_info_table
    assert is_resolved(decode)
    assert decode.cached_rank(ADDRESS, (0, 0, 0, 0))["rank_port"] == 100


@pytest.fixture
def requesting_decode(bootstrap, monkeypatch):
    """A decode rank that has requested room 7 from an absent prefill rank, and its receiver."""
    monkeypatch.setattr(peer_sockets, "LOST_SECONDS", 0.5)
    monkeypatch.setenv("SGLANG_PD_SILENT_SECONDS", "5")
    (bootstrap.port,) = free_ports(1)
    decode = decode_rank("nixl")
    decode.silent_seconds = 1.5
    decode.update_status(7, KVPoll.Bootstrapping)
    assert is_resolved(decode)
    receiver = NixlKVReceiver(decode, ADDRESS, 7)
    receiver.init(0)
    receiver.send_metadata(fake_managers.np.array([1, 2], fake_managers.np.int32), 0, None)
    assert list(decode.requested_ranks) == [7]
    return decode, receiver


def test_lost_rank_drops_its_server(requesting_decode, bootstrap):
    decode, _ = requesting_decode
    decode.silent_seconds = 60
    with zmq.Context.instance().socket(zmq.PULL) as rank:
        rank.bind(f"tcp://127.0.0.1:{bootstrap.port}")
        assert rank.poll(1000 * PATIENCE)
    decode.session_pool[ADDRESS], decode.heartbeat_failures[ADDRESS] = object(), 1
    assert wait_until(lambda: ADDRESS not in decode.prefill_info_table, PATIENCE, 0.01)
    assert not decode.connection_pool and not decode.routes
    assert not decode.session_pool and not decode.heartbeat_failures
    assert decode.request_status[7] != KVPoll.Failed


@pytest.mark.parametrize("address", ["prefill_0:8998", "[fd00::1]:8998"])
def test_server_with_an_unusual_address_is_dropped(address, monkeypatch):
    decode = decode_rank("nixl")
    monkeypatch.setattr(peer_sockets, "_seconds_disconnected", lambda *_: (0.0, 60.0))
    decode.prefill_info_table[address] = object()
    decode.connection_pool[f"{address}_0_0_0"] = [{"rank_ip": "127.0.0.1", "rank_port": 1}]
    decode.check_prefill_servers()
    assert not decode.prefill_info_table and not decode.connection_pool


def test_slow_first_connection_is_not_lost(requesting_decode):
    """In a large fleet connecting takes seconds; querying and registering again takes more."""
    decode, receiver = requesting_decode
    decode.silent_seconds = 60
    (rank,) = decode.requested_ranks[7]
    socket = PeerSocket.to(rank["rank_ip"], rank["rank_port"])
    assert wait_until(lambda: socket.silent_for() > 1, PATIENCE, 0.01)
    decode.check_prefill_servers()
    assert ADDRESS in decode.prefill_info_table
    receiver.clear()


def test_request_waiting_for_a_lost_rank_fails(requesting_decode):
    decode, receiver = requesting_decode
    assert wait_until(lambda: decode.request_status[7] == KVPoll.Failed, PATIENCE, 0.01)
    assert "has not answered for 1.5 s" in decode.failure_records[7]
    assert not decode.requested_ranks
    receiver.clear()


def test_is_silent_works_for_other_backends():
    """Mori's managers do not detect silent decode ranks."""

    class Mori(prefill_servers.PrefillServers):
        connection_lock, connection_pool = threading.Lock(), {}

    manager, (port,) = Mori(), free_ports(1)
    manager.check_prefill_servers()
    assert not manager.is_silent({"rank_ip": "127.0.0.1", "rank_port": port})


def test_no_message_is_queued_for_a_silent_rank(requesting_decode, bootstrap, monkeypatch):
    """Otherwise a request would register with it each second, which may take megabytes."""
    decode, receiver = requesting_decode
    assert wait_until(lambda: decode.request_status[7] == KVPoll.Failed, PATIENCE, 0.01)
    receiver.clear()
    del decode.is_silent
    sent, reasons = [], {}
    monkeypatch.setattr(PeerSocket, "send_multipart", lambda self, frames: sent.append(frames))

    def is_served(room: int) -> bool:
        assert is_resolved(decode)
        another = NixlKVReceiver(decode, ADDRESS, room)
        another.init(0)
        state = another.poll()
        reasons.update(decode.failure_records)
        another.clear()
        return state == KVPoll.WaitingForInput

    assert not is_served(8) and not sent
    assert "has not answered for 1.5 s" in reasons[8]
    assert ADDRESS not in decode.prefill_info_table
    with zmq.Context.instance().socket(zmq.PULL) as rank:
        rank.bind(f"tcp://127.0.0.1:{bootstrap.port}")
        assert wait_until(lambda: is_served(9), PATIENCE, 0.1)
    assert sent


def test_finished_request_is_not_checked(requesting_decode):
    decode, receiver = requesting_decode
    decode.update_status(7, KVPoll.Success)
    receiver.clear()
    assert not decode.requested_ranks
    time.sleep(2.5)
    assert not decode.failure_records


class RacingDict(dict):
    """Runs `meanwhile` in another thread during each lookup of a server."""

    def __init__(self, known: dict, meanwhile):
        super().__init__(known)
        self.meanwhile = meanwhile

    def __contains__(self, address) -> bool:
        is_in = super().__contains__(address)
        thread = threading.Thread(target=self.meanwhile, args=(address,), daemon=True)
        thread.start()
        thread.join(0.3)
        return is_in


@backends
@pytest.mark.parametrize("forget", ["drop_server", "_handle_node_failure"])
def test_server_lost_during_init_does_not_raise(backend, forget, bootstrap):
    """The scheduler would crash with a KeyError."""
    decode = decode_rank(backend)
    assert is_resolved(decode)
    receiver = RECEIVERS[backend](decode, ADDRESS, 7)
    known = RacingDict(decode.prefill_info_table, getattr(decode, forget))
    decode.prefill_info_table = known
    receiver.init(0)
    assert wait_until(lambda: known.get(ADDRESS) is None, PATIENCE, 0.01)
    receiver.clear()


def test_rank_that_many_rooms_wait_for_is_checked_once(requesting_decode, monkeypatch):
    decode, receiver = requesting_decode
    (rank,), looked = decode.requested_ranks[7], []

    def without_connection(*of) -> tuple[float, float]:
        looked.append((threading.current_thread(), *of))  # the sockets' thread checks, too
        return 0.0, 0.0

    monkeypatch.setattr(peer_sockets, "_seconds_disconnected", without_connection)
    decode.requested_ranks |= {room: [dict(rank)] for room in range(100)}
    decode.check_prefill_servers()
    ours = [of for thread, *of in looked if thread is threading.current_thread()]
    assert ours == [["127.0.0.1", rank["rank_port"]]]
    receiver.clear()
