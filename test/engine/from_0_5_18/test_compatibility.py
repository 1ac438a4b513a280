"""Decode: requests to an incompatible prefill server fail with the reason, on both sides."""

import subprocess
import sys
import time
from types import SimpleNamespace

import fake_managers
import pytest
import torch.distributed as dist
import zmq
from engine_release import IS_0_5_18
from error_texts import OTHER_RANK_FAILED
from fake_managers import ENDPOINT, RECEIVERS, decode_rank, process_messages
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import EngineCommonKVManager, KVTransferError
from sglang.srt.disaggregation.decode import DecodeRequest
from sglang.srt.disaggregation.kv_layout import Heads
from sglang.srt.disaggregation.pd import compatibility, prefill_servers
from sglang.srt.disaggregation.pd.compatibility import AbortNotifier
from sglang.srt.disaggregation.pd.room_failures import parse_abort
from sglang.srt.disaggregation.pd.threads import start_thread

from pd_harness.polling import wait_until
from pd_harness.ports import HOST, free_ports

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("published")]

ROOM = 7
OTHER_PAGE_SIZE = {"page_size": 16}
HANG_TIMEOUT_SECONDS = 20  # reached only by a hang


@pytest.fixture(autouse=True)
def long_answer_wait(monkeypatch):
    """Lets the scheduler wait until the answer has arrived."""
    monkeypatch.setattr(prefill_servers, "ANSWER_WAIT_SECONDS", 10.0)


def record_aborted_rooms(decode):
    """Makes a decode rank only record the rooms that it would abort on prefill."""
    decode.aborted_rooms = []
    decode.abort_on_prefill = lambda address, room: decode.aborted_rooms.append((address, room))
    return decode


@pytest.fixture
def decode(decode):
    return record_aborted_rooms(decode)


def count_size_queries(bootstrap) -> int:
    return bootstrap.queried_dp_ranks().count(-1)


def receiver_of(decode, bootstrap, room: int = ROOM):
    """A request's receiver, opened as by the scheduler once the prefill server is known."""
    made = RECEIVERS[fake_managers.backend_of(decode)](decode, bootstrap.address, room)
    assert decode.try_ensure_parallel_info(bootstrap.address)
    made._setup_bootstrap_infos = lambda: None
    made.init(0)
    return made


def reason_of(receiver) -> str:
    """Finishes a failed request as the scheduler does; returns the failure reason."""
    statuses, room = receiver.kv_mgr.request_status, receiver.bootstrap_room
    assert statuses[room] == KVPoll.Failed
    reason = fake_managers.finish_failed(receiver)
    assert room not in statuses
    return reason


TP2 = fake_managers.mha_layout(Heads(0, 1, 2), (0, 2))
INCOMPATIBLE = {
    "RuntimeError": (OTHER_PAGE_SIZE, {}, "Page size mismatch: prefill server has page_size=16"),
    "RuntimeError of a dtype": ({"kv_cache_dtype": "fp8"}, {}, "KV cache dtype mismatch"),
    "RuntimeError of DCP": ({"attn_cp_size": 2}, {"dcp_size": 2}, "prefill attention CP=1, got 2"),
    "AssertionError": ({"pp_size": 3}, {"pp_size": 2}, "Decode pp size (2) should be equal to"),
    "AssertionError of CP": ({}, {"attn_cp_size": 2}, "Decode cp size (2) should be equal to 1"),
    "ZeroDivisionError": ({"attn_tp_size": 0}, {}, ""),
    "TP 3 to 2": ({"attn_tp_size": 3}, {"layout": TP2}, "3"),
    "TP 2 to 3": ({"attn_tp_size": 2}, {"attn_tp_size": 3}, "3"),
}
STOCK_RAISES = [RuntimeError, AssertionError]
if not IS_0_5_18:
    INCOMPATIBLE["AttributeError"] = (
        *({"dsv41_spec_layout": [1]}, {}, "object has no attribute 'keys'"),
    )
    STOCK_RAISES.append(AttributeError)


@pytest.mark.parametrize("says, has, why", INCOMPATIBLE.values(), ids=INCOMPATIBLE)
def test_incompatible_server_fails_its_requests_with_the_reason(says, has, why, backend, bootstrap):
    bootstrap.sizes |= says
    decode = record_aborted_rooms(decode_rank(backend, **has))
    for room in (7, 8):
        assert why in reason_of(receiver_of(decode, bootstrap, room))
    assert decode.aborted_rooms == [(bootstrap.address, 7), (bootstrap.address, 8)]
    assert count_size_queries(bootstrap) == 1
    assert not decode.failure_records


def test_request_that_fails_before_its_server_is_known_is_aborted_on_prefill(decode, bootstrap):
    """It has failed on another decode rank, to which the server's sizes came first."""
    receiver = RECEIVERS[fake_managers.backend_of(decode)](decode, bootstrap.address, ROOM)
    with pytest.raises(KVTransferError):
        receiver.failure_exception()
    assert decode.aborted_rooms == [(bootstrap.address, ROOM)]


def test_request_that_another_rank_fails_for_the_server_has_the_reason(backend, decode, bootstrap):
    """The other rank had the server's sizes first; this one has them by now."""
    bootstrap.sizes |= OTHER_PAGE_SIZE
    receiver = RECEIVERS[backend](decode, bootstrap.address, ROOM)
    assert decode.try_ensure_parallel_info(bootstrap.address)
    with pytest.raises(KVTransferError, match="Page size"):
        receiver.failure_exception()
    assert not decode.failure_records


KNOWN_OR_NOT_OWNED = [{"bootstrap_infos": [{}]}]
if not IS_0_5_18:
    KNOWN_OR_NOT_OWNED.append({"_owns_bootstrap_room": False})


@pytest.mark.parametrize("has", KNOWN_OR_NOT_OWNED, ids=str)
def test_request_is_not_aborted_on_prefill_twice(has, decode, bootstrap):
    """The engine notifies ranks that it knows; a duplicate room belongs to its first request."""
    receiver = RECEIVERS[fake_managers.backend_of(decode)](decode, bootstrap.address, ROOM)
    vars(receiver).update(has)
    with pytest.raises(KVTransferError):
        receiver.failure_exception()
    assert not decode.aborted_rooms


@pytest.mark.parametrize("error", STOCK_RAISES)
def test_stock_raises_for_an_incompatible_server(error, bootstrap):
    says, has, _ = INCOMPATIBLE[error.__name__]
    bootstrap.sizes |= says
    with pytest.raises(error):
        stock_prefill_info(bootstrap, **has)


def test_stock_requests_no_rank_for_some_heads_of_tp_3_to_2(bootstrap):
    """Two decode ranks, three prefill ranks: neither decode rank requests the last one."""
    bootstrap.sizes["attn_tp_size"] = 3
    queries = []
    for rank in range(2):
        layout = fake_managers.mha_layout(Heads(rank, rank + 1, 2), (rank, 2))
        queries += stock_prefill_info(bootstrap, layout=layout).target_tp_ranks
    assert queries == [0, 1]


def stock_prefill_info(bootstrap, **has):
    """A stock decode rank's info about the server."""
    decode = decode_rank("nixl", **has)

    class Stock(fake_managers.nixl.NixlKVManager):
        try_ensure_parallel_info = EngineCommonKVManager.try_ensure_parallel_info
        _resolve_rank_mapping = EngineCommonKVManager._resolve_rank_mapping

    decode.__class__ = Stock
    assert decode.try_ensure_parallel_info(bootstrap.address)
    return decode.prefill_info_table[bootstrap.address]


def test_incompatible_server_is_queried_again_after_a_while(decode, bootstrap, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(compatibility.time, "monotonic", lambda: now[0])
    compatible = bootstrap.sizes
    bootstrap.sizes = {**compatible, **OTHER_PAGE_SIZE}
    reason_of(receiver_of(decode, bootstrap))
    bootstrap.sizes = compatible
    now[0] += prefill_servers.INCOMPATIBLE_SECONDS - 1
    reason_of(receiver_of(decode, bootstrap))
    assert count_size_queries(bootstrap) == 1
    now[0] += 2
    # The first request after that time still gets the old answer.
    assert "Page size" in reason_of(receiver_of(decode, bootstrap))
    assert receiver_of(decode, bootstrap).poll() == KVPoll.WaitingForInput
    assert count_size_queries(bootstrap) == 2


def test_server_that_is_still_incompatible_stays_refused(decode, bootstrap, monkeypatch):
    monkeypatch.setattr(prefill_servers, "INCOMPATIBLE_SECONDS", -1)
    bootstrap.sizes |= OTHER_PAGE_SIZE
    for times in range(1, 4):
        assert "Page size" in reason_of(receiver_of(decode, bootstrap, times))
        assert count_size_queries(bootstrap) == times


def test_server_that_restarts_as_compatible_is_served_at_once(decode, bootstrap):
    """Heartbeats have detected that the incompatible server stopped."""
    compatible = bootstrap.sizes
    bootstrap.sizes = {**compatible, **OTHER_PAGE_SIZE}
    reason_of(receiver_of(decode, bootstrap))
    decode.prefill_info_table.pop(bootstrap.address)
    bootstrap.sizes = compatible
    assert receiver_of(decode, bootstrap).poll() == KVPoll.WaitingForInput
    assert decode.incompatibility(bootstrap.address) is None


@pytest.mark.parametrize("seconds", [-1, 1000])
def test_server_lost_between_lookup_and_init_keeps_its_reason(
    seconds, backend, decode, bootstrap, monkeypatch
):
    """Its heartbeats failed after the scheduler had looked it up."""
    monkeypatch.setattr(prefill_servers, "INCOMPATIBLE_SECONDS", seconds)
    bootstrap.sizes |= OTHER_PAGE_SIZE
    receiver = RECEIVERS[backend](decode, bootstrap.address, ROOM)
    decode.try_ensure_parallel_info(bootstrap.address)
    decode.prefill_info_table.pop(bootstrap.address)
    receiver.init(0)
    assert "Page size" in reason_of(receiver)


def test_request_that_failed_before_keeps_its_reason(backend, decode, bootstrap):
    bootstrap.sizes |= OTHER_PAGE_SIZE
    receiver = RECEIVERS[backend](decode, bootstrap.address, ROOM)
    decode.try_ensure_parallel_info(bootstrap.address)
    decode.record_failure(ROOM, "given up")
    receiver.conclude_state = KVPoll.Failed
    decode.update_status(ROOM, KVPoll.Failed)
    receiver.init(0)
    assert reason_of(receiver) == "given up"
    assert decode.aborted_rooms == [(bootstrap.address, ROOM)]


@pytest.mark.parametrize("answer", [None, [], "", {}, {"attn_tp_size": "x"}], ids=repr)
def test_invalid_server_info_leaves_the_server_unknown(answer, decode, bootstrap):
    """A server that is not up yet is unknown, too."""
    bootstrap.sizes = answer and {**bootstrap.sizes, **answer}
    assert not decode.try_ensure_parallel_info(bootstrap.address)
    assert not decode.incompatible and not decode.prefill_info_table


def test_digests_are_dropped_with_their_room(decode, bootstrap):
    receiver = receiver_of(decode, bootstrap)
    decode.arrived_digests[ROOM] = {0: b"digests"}
    receiver.clear()
    assert not decode.arrived_digests


# Answers of a bootstrap server, which a client names


@pytest.fixture
def rank_socket(bootstrap, listen):
    """The socket of the only prefill rank."""
    sock, bootstrap.rank_port = listen()
    return sock


def scheduled_receiver(decode, bootstrap, room: int = ROOM):
    """A request's receiver, opened as by decode's scheduler, down to each prefill rank."""
    receiver = RECEIVERS[fake_managers.backend_of(decode)](decode, bootstrap.address, room)
    if decode.try_ensure_parallel_info(bootstrap.address):
        receiver.init(fake_managers.resolve_dp_rank(decode, bootstrap.address, room))
    else:
        receiver.abort()
    return receiver


def test_compatible_server_is_queried_once_and_served(decode, bootstrap, rank_socket):
    for room in (7, 8):
        assert scheduled_receiver(decode, bootstrap, room).poll() == KVPoll.WaitingForInput
    assert bootstrap.queried_ranks == [(-1,) * 4, (0,) * 4]
    assert not decode.aborted_rooms


@pytest.mark.parametrize("size", [0, -1])
@pytest.mark.parametrize("name", ["dp_size", "attn_cp_size", "attn_tp_size", "pp_size"])
def test_parallel_size_below_1_fails_the_requests(name, size, decode, bootstrap, rank_socket):
    """Otherwise the scheduler would crash, or the request would wait for no rank at all."""
    bootstrap.sizes[name] = size
    assert reason_of(scheduled_receiver(decode, bootstrap))


INVALID_RANKS = [
    *([], None, "x", {}, {"rank_ip": HOST}, {"rank_ip": HOST, "rank_port": None}),
    *({"rank_ip": HOST, "rank_port": "x"}, {"rank_ip": 7, "rank_port": 1}),
]


@pytest.mark.parametrize("answer", INVALID_RANKS, ids=repr)
def test_invalid_rank_address_fails_the_requests(answer, decode, bootstrap, rank_socket):
    bootstrap.rank = answer
    assert reason_of(scheduled_receiver(decode, bootstrap))


# Notifications to prefill


def recording_notifier(monkeypatch, fails=(), after=(0,)):
    """A notifier, and the list of its notifications: rank and room of each."""
    monkeypatch.setattr(compatibility, "NOTIFY_AFTER_SECONDS", after)
    notified = []

    def notify(rank: dict, room: int) -> None:
        if room in fails:
            raise OSError("no route")
        notified.append((tuple(rank["rank"]), room))

    return AbortNotifier(notify), notified


def wait_for(condition) -> bool:
    return wait_until(condition, HANG_TIMEOUT_SECONDS, 0.01)


def test_each_prefill_rank_is_notified_once(bootstrap, monkeypatch):
    bootstrap.sizes |= {"attn_tp_size": 3, "pp_size": 2, "dp_size": 2}
    notifier, notified = recording_notifier(monkeypatch)
    for room in (7, 8):
        notifier.add(bootstrap.address, room)
    ranks = [(dp, 0, tp, pp) for dp in range(2) for tp in range(3) for pp in range(2)]
    expected = [(rank, room) for room in (7, 8) for rank in ranks]
    assert wait_for(lambda: len(notified) >= len(expected))
    time.sleep(0.1)  # no further notification comes
    assert notified == expected


def test_prefill_is_notified_again(bootstrap, monkeypatch):
    """A request may reach prefill after the first notification, and would wait forever."""
    began = time.monotonic()
    notifier, notified = recording_notifier(monkeypatch, after=(0, 0.3, 0.6))
    notifier.add(bootstrap.address, 7)
    assert wait_for(lambda: notified)
    notifier.add(bootstrap.address, 8)
    assert wait_for(lambda: len(notified) == 6)
    assert time.monotonic() - began >= 0.6
    assert sorted(room for _, room in notified) == [7, 7, 7, 8, 8, 8]
    assert [room for _, room in notified[:2]] == [7, 8]
    assert wait_for(lambda: not any(notifier.rooms))


def test_late_prefill_request_is_aborted(backend, prefill, bootstrap, rank_socket, monkeypatch):
    monkeypatch.setattr(compatibility, "NOTIFY_AFTER_SECONDS", (0, 0.2, 3))
    decode = decode_rank(backend)
    decode.abort_on_prefill(bootstrap.address, ROOM)
    frames = rank_socket.recv_multipart()
    assert parse_abort(frames) == (ROOM, ENDPOINT, None)
    process_messages(prefill, frames)
    assert not prefill.request_status
    sender = fake_managers.new_sender(prefill, ROOM)
    process_messages(prefill, rank_socket.recv_multipart())
    assert sender.poll() == KVPoll.Failed
    decode.request_status[ROOM] = KVPoll.Bootstrapping  # another request of the room
    rank_socket.setsockopt(zmq.RCVTIMEO, 4000)
    with pytest.raises(zmq.Again):
        rank_socket.recv_multipart()


@pytest.fixture
def failing_vote(tmp_path):
    """Makes this process the first of two ranks, of which the other one votes Failed."""
    votes = f"[{int(KVPoll.Failed)}], dtype=torch.{'uint8' if IS_0_5_18 else 'int32'}"
    # In 0.5.18 it also votes to let decode free the pages.
    frees = "dist.all_reduce(torch.tensor([0], dtype=torch.uint8), dist.ReduceOp.MAX); "
    made = (
        "import sys, torch, torch.distributed as dist; "
        "dist.init_process_group('gloo', init_method=sys.argv[1], rank=1, world_size=2); "
        f"dist.all_reduce(torch.tensor({votes}), dist.ReduceOp.MIN); "
        f"{frees if IS_0_5_18 else ''}"
        "dist.destroy_process_group()"
    )
    store = f"file://{tmp_path / 'store'}"
    other = subprocess.Popen([sys.executable, "-c", made, store])
    try:
        dist.init_process_group("gloo", init_method=store, rank=0, world_size=2)
        yield dist.group.WORLD
        assert other.wait(HANG_TIMEOUT_SECONDS) == 0
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        other.kill()
        other.wait()


def test_vote_of_another_decode_rank_aborts_the_request_on_prefill(
    backend, bootstrap, rank_socket, monkeypatch, failing_vote
):
    """This rank still queries the server when another one's vote fails the request."""
    monkeypatch.setattr(compatibility, "NOTIFY_AFTER_SECONDS", (0,))
    decode = decode_rank(backend)
    receiver = RECEIVERS[backend](decode, bootstrap.address, ROOM)
    req = SimpleNamespace(rid="1", bootstrap_room=ROOM, return_logprob=False, finished_reason=None)
    queue = fake_managers.prealloc_queue(decode)
    queue.queue = [DecodeRequest(req, receiver)]
    queue.pp_size, queue.tp_rank, queue.gloo_group = 1, 0, failing_vote
    reporter = SimpleNamespace(enable_metrics=False)
    queue.scheduler = SimpleNamespace(metrics_reporter=reporter)
    assert receiver.poll() == KVPoll.Bootstrapping
    queue._update_handshake_waiters()
    assert OTHER_RANK_FAILED[backend] in req.finished_reason.message
    receiver.clear()  # as the scheduler does next; another request may then have the room
    frames = rank_socket.recv_multipart()
    assert parse_abort(frames) == (ROOM, ENDPOINT, None)


@pytest.mark.parametrize("is_lost", [True, False], ids=["lost server", "lost rank"])
def test_failed_notification_does_not_stop_others(is_lost, bootstrap, monkeypatch, caplog):
    (port,) = free_ports(1)
    address = f"{HOST}:{port}" if is_lost else bootstrap.address
    notifier, notified = recording_notifier(monkeypatch, fails=[6])
    notifier.add(address, 6)
    notifier.add(bootstrap.address, 7)
    assert wait_for(lambda: notified)
    assert notified == [((0, 0, 0, 0), 7)]
    assert f"Could not notify prefill {address} that room 6 failed" in caplog.text
    assert is_lost or "room 6 failed: no route" in caplog.text


def test_server_that_does_not_answer_is_queried_at_intervals(bootstrap, monkeypatch):
    """Each query takes seconds, during which no other server is notified."""
    queries = []

    def timed_out(address: str) -> list[dict]:
        queries.append(address)
        raise OSError("timed out")

    with monkeypatch.context() as stopped:
        stopped.setattr(compatibility, "_query_all_ranks", timed_out)
        notifier, notified = recording_notifier(monkeypatch)
        for room in range(5):
            notifier.add(bootstrap.address, room)
        assert wait_for(lambda: queries and not any(notifier.rooms))
        time.sleep(0.1)  # until the last room is handled
    assert queries == [bootstrap.address] and not notified
    monkeypatch.setattr(compatibility.time, "monotonic", lambda now=time.monotonic: now() + 11)
    notifier.add(bootstrap.address, 7)
    assert wait_for(lambda: notified)


def test_pending_notifications_are_bounded(bootstrap, monkeypatch):
    """The oldest are dropped; their prefill requests time out."""
    monkeypatch.setattr(compatibility, "MAX_PENDING_NOTICES", 3)
    notifier, notified = recording_notifier(monkeypatch)
    notifier.is_serving = True  # not yet
    for room in range(6):
        notifier.add(bootstrap.address, room)
    start_thread(notifier._serve)
    assert wait_for(lambda: len(notified) == 3)
    assert [room for _, room in notified] == [3, 4, 5]
    notifier.add(bootstrap.address, 9)
    assert wait_for(lambda: len(notified) == 4)


def test_rooms_wait_for_a_thread_that_cannot_start(bootstrap, no_threads, monkeypatch):
    """The system is out of threads; decode's scheduler goes on."""
    notifier, notified = recording_notifier(monkeypatch)
    with no_threads():
        notifier.add(bootstrap.address, 7)
    assert not notifier.is_serving
    notifier.add(bootstrap.address, 8)
    assert wait_for(lambda: len(notified) == 2)


@pytest.mark.parametrize("place", [{"attn_tp_rank": 1}, {"pp_rank": 1}], ids=str)
def test_only_the_first_decode_rank_notifies_prefill(place, backend):
    decode = decode_rank(backend, **place)
    decode.abort_on_prefill("127.0.0.1:1", ROOM)
    assert not hasattr(decode, "abort_notifier")
