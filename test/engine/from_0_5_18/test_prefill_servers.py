"""Decode: the scheduler does not wait for bootstrap servers, and finds restarted ones."""

import threading
import time
from types import SimpleNamespace

import fake_managers
import numpy as np
import pytest
from fake_managers import RECEIVERS, finish_failed
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common import conn as common
from sglang.srt.disaggregation.nixl.conn import NixlKVReceiver
from sglang.srt.disaggregation.pd import peer_sockets, prefill_servers
from sglang.srt.disaggregation.pd.peer_sockets import PeerSocket

from pd_harness.polling import wait_until
from pd_harness.ports import HOST, free_ports

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("published")]

ROOM, PATIENCE = 7, 10.0


@pytest.fixture
def bootstrap(bootstrap):
    """The bootstrap server of a prefill server with two DP ranks, at consecutive ports."""
    bootstrap.sizes["dp_size"] = 2
    return bootstrap


@pytest.fixture
def decode(decode):
    decode.heartbeat_failures = {}
    return decode


def wait_for(condition, pause: float = 0.01) -> bool:
    return wait_until(condition, PATIENCE, pause)


def is_resolved(decode, bootstrap) -> bool:
    return wait_for(lambda: decode.try_ensure_parallel_info(bootstrap.address))


def resolve_dp_rank(decode, bootstrap) -> int | None:
    return fake_managers.resolve_dp_rank(decode, bootstrap.address, ROOM)


def test_answering_server_is_resolved_with_all_its_ranks(backend, decode, bootstrap):
    assert is_resolved(decode, bootstrap)
    assert bootstrap.queried_dp_ranks() == [-1, 0, 1]
    receiver = RECEIVERS[backend](decode, bootstrap.address, ROOM)
    found = receiver._get_bootstrap_info_from_server(1, 0, 0, 0)
    assert (found["rank_port"], found["pp_rank"]) == (2, 0)
    found["is_dummy"] = True  # the engine sets it for this request only
    assert "is_dummy" not in receiver._get_bootstrap_info_from_server(1, 0, 0, 0)
    assert decode.try_ensure_parallel_info(bootstrap.address)
    assert bootstrap.queried_dp_ranks() == [-1, 0, 1]


def test_stopped_bootstrap_server_does_not_block_the_scheduler(decode, bootstrap):
    bootstrap.open.clear()
    begun = time.monotonic()
    assert not any(decode.try_ensure_parallel_info(bootstrap.address) for _ in range(5))
    assert time.monotonic() - begun < 1
    bootstrap.open.set()
    assert is_resolved(decode, bootstrap)
    assert bootstrap.queried_dp_ranks() == [-1, 0, 1]  # once each


def test_scheduler_waits_for_a_query_only_once(decode, bootstrap, monkeypatch):
    """Otherwise it would wait at each lookup, for each of many stopped servers."""
    monkeypatch.setattr(prefill_servers, "ANSWER_WAIT_SECONDS", 0.5)
    bootstrap.open.clear()
    seconds = []
    for _ in range(3):
        begun = time.monotonic()
        assert not decode.try_ensure_parallel_info(bootstrap.address)
        seconds.append(time.monotonic() - begun)
    bootstrap.open.set()
    assert seconds[0] > 0.4 and sum(seconds[1:]) < 0.4


@pytest.fixture
def ranks_open(monkeypatch):
    """An event for which queries for ranks wait; those for a server's sizes do not."""
    query, is_open = prefill_servers.query_route, threading.Event()
    monkeypatch.setattr(
        prefill_servers, "query_route", lambda *of: is_open.wait(PATIENCE) and query(*of)
    )
    return is_open


def test_server_stopped_before_its_ranks_are_known_does_not_block(decode, bootstrap, ranks_open):
    """A request that is opened then would query the ranks itself."""
    assert not decode.try_ensure_parallel_info(bootstrap.address)
    assert wait_for(lambda: bootstrap.address in decode.prefill_info_table)
    assert resolve_dp_rank(decode, bootstrap) is None
    ranks_open.set()
    assert is_resolved(decode, bootstrap)
    assert resolve_dp_rank(decode, bootstrap) == 1


def check_servers(queue, address: str, checks: int) -> tuple[bool, int]:
    """The scheduler checks the server of one request; returns if it is known, and the aborts."""
    aborts = []
    receiver = SimpleNamespace(abort=lambda: aborts.append(address), bootstrap_room=ROOM)
    req = SimpleNamespace(kv_receiver=receiver)
    for _ in range(checks):
        known, waiting = queue._ensure_prefill_info({address: [req]})
        if known or aborts:
            return bool(known), len(aborts)
        assert waiting == [req]
        time.sleep(0.001)
    return False, 0


def test_running_query_of_ranks_does_not_count_as_failed_tries(decode, bootstrap, ranks_open):
    """The engine aborts requests after 15 tries; a large server's ranks take longer to query."""
    queue = fake_managers.prealloc_queue(decode)
    assert not decode.try_ensure_parallel_info(bootstrap.address)
    assert wait_for(lambda: bootstrap.address in decode.prefill_info_table)
    assert check_servers(queue, bootstrap.address, 40) == (False, 0)
    ranks_open.set()
    assert wait_for(decode.pending_queries[bootstrap.address].done)
    assert check_servers(queue, bootstrap.address, 1) == (True, 0)


def test_requests_to_a_server_that_returns_only_its_sizes_are_aborted(
    decode, bootstrap, monkeypatch
):
    """It may stop, or be cut off, between the two queries, again and again."""
    monkeypatch.setattr(prefill_servers, "query_route", lambda *of: time.sleep(0.01) or 1 / 0)
    queue = fake_managers.prealloc_queue(decode)
    assert check_servers(queue, bootstrap.address, 10000) == (False, 1)


def test_query_that_a_stopped_server_does_not_answer_counts_as_failed_tries(decode, bootstrap):
    """Otherwise each try would last until the query's time-out, and 15 of them over a minute."""
    bootstrap.open.clear()
    queue = fake_managers.prealloc_queue(decode)
    assert check_servers(queue, bootstrap.address, 10000) == (False, 1)
    assert not decode.pending_queries[bootstrap.address].done()
    bootstrap.open.set()


def test_requests_to_an_absent_server_are_aborted(decode):
    (port,) = free_ports(1)
    queue = fake_managers.prealloc_queue(decode)
    assert check_servers(queue, f"{HOST}:{port}", 10000) == (False, 1)


def test_client_is_told_of_an_absent_server(decode):
    """The engine's reason, `Aborted by AbortReq.`, is that of a client's own abort."""
    (port,) = free_ports(1)
    address = f"{HOST}:{port}"
    queue = fake_managers.prealloc_queue(decode)
    receiver = RECEIVERS[fake_managers.backend_of(decode)](decode, address, ROOM)
    decode.abort_on_prefill = lambda *_: None
    req = SimpleNamespace(kv_receiver=receiver)
    assert wait_until(
        lambda: queue._ensure_prefill_info({address: [req]}) == ({}, []), PATIENCE, 0.001
    )
    reason = f"Bootstrap server {address} did not return the prefill server's sizes and ranks"
    assert fake_managers.finish_failed(receiver) == reason


def test_request_that_has_failed_is_not_started(backend, decode, bootstrap):
    """Its client leaves just before its server is known: prefill must be told nevertheless."""
    assert is_resolved(decode, bootstrap)
    aborted = []
    decode.abort_on_prefill = lambda *request: aborted.append(request)
    receiver = RECEIVERS[backend](decode, bootstrap.address, ROOM)
    receiver.abort()
    receiver.init(0)
    assert not decode.connection_pool
    finish_failed(receiver)
    assert aborted == [(bootstrap.address, ROOM)]


def test_stock_scheduler_waits_for_the_bootstrap_server(bootstrap):
    decode = fake_managers.decode_rank("nixl")
    query = common.EngineCommonKVManager.try_ensure_parallel_info
    bootstrap.open.clear()
    threading.Timer(0.5, bootstrap.open.set).start()
    begun = time.monotonic()
    assert query(decode, bootstrap.address)
    assert time.monotonic() - begun > 0.4


def test_server_with_missing_ranks_is_queried_again(decode, bootstrap, monkeypatch):
    """A thread queries it: the scheduler would wait if the request queried missing ranks."""

    def unknown(*_):
        raise OSError("404")

    with monkeypatch.context() as away:
        away.setattr(prefill_servers, "query_route", unknown)
        assert not any(decode.try_ensure_parallel_info(bootstrap.address) for _ in range(3))
    assert is_resolved(decode, bootstrap)
    assert decode.cached_rank(bootstrap.address, (1, 0, 0, 0))["rank_port"] == 2
    assert bootstrap.queried_dp_ranks()[-3:] == [-1, 0, 1]


def test_ranks_of_a_dropped_server_are_queried_again(backend, decode, bootstrap):
    """Heartbeats have failed, and another process has the address by now."""
    assert is_resolved(decode, bootstrap)
    decode.prefill_info_table.pop(bootstrap.address)
    bootstrap.rank_port = 100
    assert is_resolved(decode, bootstrap)
    receiver = RECEIVERS[backend](decode, bootstrap.address, ROOM)
    assert receiver._get_bootstrap_info_from_server(0, 0, 0, 0)["rank_port"] == 100


def test_unclaimed_answer_of_a_dropped_server_is_discarded(decode, bootstrap):
    """Its request was aborted; with that answer, the next one would query the rank itself."""
    bootstrap.open.clear()
    assert not decode.try_ensure_parallel_info(bootstrap.address)
    bootstrap.open.set()
    assert wait_for(decode.pending_queries[bootstrap.address].done)
    decode.drop_server(bootstrap.address)
    assert not decode.try_ensure_parallel_info(bootstrap.address)
    assert is_resolved(decode, bootstrap) and resolve_dp_rank(decode, bootstrap) == 1


def test_replaced_server_at_the_same_address_is_detected(decode, bootstrap, monkeypatch):
    """The old server runs on for a while, so no connection to it is lost."""
    address = bootstrap.address
    assert is_resolved(decode, bootstrap)
    decode._on_heartbeat_success(address)
    assert address in decode.prefill_info_table
    bootstrap.rank_port = 100
    with monkeypatch.context() as away:
        away.setattr(prefill_servers, "query_route", lambda *_: 1 / 0)
        decode._on_heartbeat_success(address)
    common.EngineCommonKVManager._on_heartbeat_success(decode, address)
    assert address in decode.prefill_info_table
    decode._on_heartbeat_success(address)
    assert address not in decode.prefill_info_table
    assert is_resolved(decode, bootstrap)
    assert decode.cached_rank(address, (0, 0, 0, 0))["rank_port"] == 100


@pytest.fixture
def requesting_decode(bootstrap, monkeypatch):
    """A decode rank that has requested ROOM from an absent prefill rank, and its receiver."""
    monkeypatch.setattr(peer_sockets, "LOST_SECONDS", 0.5)
    monkeypatch.setenv("SGLANG_PD_SILENT_SECONDS", "5")
    (bootstrap.rank_port,) = free_ports(1)
    decode = fake_managers.decode_rank("nixl", heartbeat_failures={})
    decode.silent_seconds = 1.5
    decode.update_status(ROOM, KVPoll.Bootstrapping)
    assert is_resolved(decode, bootstrap)
    receiver = NixlKVReceiver(decode, bootstrap.address, ROOM)
    receiver.init(0)
    receiver.send_metadata(np.array([1, 2], np.int32), 0, None)
    assert list(decode.requested_ranks) == [ROOM]
    return decode, receiver


def has_failed(decode) -> bool:
    return wait_for(lambda: decode.request_status[ROOM] == KVPoll.Failed)


def test_lost_rank_drops_its_server(requesting_decode, bootstrap, listen):
    (decode, _), address = requesting_decode, bootstrap.address
    decode.silent_seconds = 60
    rank, _ = listen(bootstrap.rank_port)
    assert rank.poll(1000 * PATIENCE)
    rank.close(linger=0)
    decode.session_pool[address], decode.heartbeat_failures[address] = object(), 1
    assert wait_for(lambda: address not in decode.prefill_info_table)
    assert not decode.connection_pool and not decode.routes
    assert not decode.session_pool and not decode.heartbeat_failures
    assert decode.request_status[ROOM] != KVPoll.Failed


def test_dropped_server_is_logged_once(decode, bootstrap, caplog):
    assert is_resolved(decode, bootstrap)
    for _ in range(3):
        decode.drop_server(bootstrap.address)
    assert caplog.text.count("lost a rank or was replaced") == 1


@pytest.mark.parametrize("address", ["prefill_0:8998", "[fd00::1]:8998"])
def test_server_with_an_unusual_address_is_dropped(address, monkeypatch):
    decode = fake_managers.decode_rank("nixl", heartbeat_failures={})
    monkeypatch.setattr(peer_sockets, "_seconds_disconnected", lambda *_: (0.0, 60.0))
    decode.prefill_info_table[address] = object()
    decode.connection_pool[f"{address}_0_0_0"] = [{"rank_ip": HOST, "rank_port": 1}]
    decode.check_prefill_servers()
    assert not decode.prefill_info_table and not decode.connection_pool


def test_slow_first_connection_is_not_lost(requesting_decode, bootstrap):
    """In a large fleet connecting takes seconds; querying and registering again takes more."""
    decode, receiver = requesting_decode
    decode.silent_seconds = 60
    (rank,) = decode.requested_ranks[ROOM]
    socket = PeerSocket.to(rank["rank_ip"], rank["rank_port"])
    assert wait_for(lambda: socket.silent_for() > 1)
    decode.check_prefill_servers()
    assert bootstrap.address in decode.prefill_info_table
    receiver.clear()


def test_request_waiting_for_a_lost_rank_fails(requesting_decode):
    decode, receiver = requesting_decode
    assert has_failed(decode)
    assert "has not answered for 1.5 s" in decode.failure_records[ROOM]
    assert not decode.requested_ranks
    receiver.clear()


def test_query_is_made_once_a_thread_can_start(decode, bootstrap, no_threads):
    """The system is out of threads; decode's scheduler goes on."""
    with no_threads():
        assert not decode.try_ensure_parallel_info(bootstrap.address)
    assert not decode.pending_queries
    assert is_resolved(decode, bootstrap)


def test_failed_server_is_forgotten(decode, bootstrap):
    """Servers that come and go leave nothing."""
    assert is_resolved(decode, bootstrap) and decode.routes
    decode.incompatible[bootstrap.address] = ("other page sizes", time.monotonic() + PATIENCE)
    decode._handle_node_failure(bootstrap.address)
    assert not decode.routes and not decode.incompatible


def test_is_silent_works_for_other_backends():
    """Mori's managers do not detect silent decode ranks."""

    class Mori(prefill_servers.PrefillServers):
        connection_lock, connection_pool = threading.Lock(), {}

    manager, (port,) = Mori(), free_ports(1)
    manager.check_prefill_servers()
    assert not manager.is_silent({"rank_ip": HOST, "rank_port": port})


def test_no_message_is_queued_for_a_silent_rank(requesting_decode, bootstrap, listen, monkeypatch):
    """Otherwise a request would register with it each second, which may take megabytes."""
    decode, receiver = requesting_decode
    assert has_failed(decode)
    receiver.clear()
    del decode.is_silent
    sent, reasons = [], {}
    monkeypatch.setattr(PeerSocket, "send_multipart", lambda self, frames: sent.append(frames))

    def is_served(room: int) -> bool:
        assert is_resolved(decode, bootstrap)
        another = NixlKVReceiver(decode, bootstrap.address, room)
        another.init(0)
        state = another.poll()
        if state == KVPoll.Failed:
            reasons[room] = finish_failed(another)
        another.clear()
        return state == KVPoll.WaitingForInput

    assert not is_served(8) and not sent
    assert "has not answered for 1.5 s" in reasons[8]
    assert bootstrap.address not in decode.prefill_info_table
    listen(bootstrap.rank_port)
    assert wait_for(lambda: is_served(9), 0.1)
    assert sent


def test_finished_request_is_not_checked(requesting_decode):
    decode, receiver = requesting_decode
    decode.update_status(ROOM, KVPoll.Success)
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


@pytest.mark.parametrize("forget", ["drop_server", "_handle_node_failure"])
def test_server_lost_during_init_does_not_raise(forget, backend, decode, bootstrap):
    """The scheduler would crash with a KeyError."""
    assert is_resolved(decode, bootstrap)
    receiver = RECEIVERS[backend](decode, bootstrap.address, ROOM)
    known = RacingDict(decode.prefill_info_table, getattr(decode, forget))
    decode.prefill_info_table = known
    receiver.init(0)
    assert wait_for(lambda: known.get(bootstrap.address) is None)
    receiver.clear()


def test_rank_that_many_rooms_wait_for_is_checked_once(requesting_decode, monkeypatch):
    decode, receiver = requesting_decode
    (rank,), looked = decode.requested_ranks[ROOM], []

    def without_connection(*of) -> tuple[float, float]:
        looked.append((threading.current_thread(), *of))  # the sockets' thread checks, too
        return 0.0, 0.0

    monkeypatch.setattr(peer_sockets, "_seconds_disconnected", without_connection)
    decode.requested_ranks |= {room: [dict(rank)] for room in range(100)}
    decode.check_prefill_servers()
    ours = [of for thread, *of in looked if thread is threading.current_thread()]
    assert ours == [[HOST, rank["rank_port"]]]
    receiver.clear()
