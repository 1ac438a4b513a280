"""Decode: requests to an incompatible prefill server fail with the reason, on both sides."""

import http.server
import json
import threading
import time
from types import SimpleNamespace
from urllib.parse import parse_qs, urlsplit

import fake_managers
import pytest
import zmq
from fake_managers import BACKENDS, DECODE, RECEIVERS
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import AbortNotification, KVTransferError
from sglang.srt.disaggregation.decode import DecodePreallocQueue
from sglang.srt.disaggregation.kv_layout import Heads
from sglang.srt.disaggregation.pd import compatibility, prefill_servers
from sglang.srt.disaggregation.pd.compatibility import AbortNotifier

from pd_harness.polling import wait_until
from pd_harness.ports import HOST, free_ports

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("published")]

backends = pytest.mark.parametrize("backend", BACKENDS)
COMPATIBLE = {
    **{"attn_tp_size": 1, "attn_cp_size": 1, "dp_size": 1, "pp_size": 1},
    **{
        "page_size": fake_managers.PAGE,
        "kv_cache_dtype": "bfloat16",
        "follow_bootstrap_room": True,
    },
}
SIZES = ("dp_size", "attn_cp_size", "attn_tp_size", "pp_size")
RANK = ("prefill_dp_rank", "prefill_cp_rank", "target_tp_rank", "target_pp_rank")
HANG_TIMEOUT_SECONDS = 20  # reached only by a hang


class BootstrapServer(http.server.ThreadingHTTPServer):
    """Returns `server` as the server's info, and for each rank the address that it reads at."""

    def __init__(self, port: int):
        super().__init__((HOST, port), BootstrapHandler)
        self.address = f"{HOST}:{port}"
        self.server: object = COMPATIBLE
        self.queried_ranks: list[tuple[int, ...]] = []
        self.rank_port, self.rank = 1, ...
        self.thread = threading.Thread(target=self.serve_forever, args=[0.01])
        self.thread.start()

    def stop(self) -> None:
        self.shutdown()
        self.thread.join()
        self.server_close()

    def count_server_queries(self) -> int:
        return self.queried_ranks.count((-1,) * 4)


class BootstrapHandler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        query = parse_qs(urlsplit(self.path).query)
        rank = tuple(int(query[name][0]) for name in RANK)
        self.server.queried_ranks.append(rank)
        answer = {"rank_ip": HOST, "rank_port": self.server.rank_port, "rank": rank}
        if self.server.rank is not ...:
            answer = self.server.rank
        body = json.dumps(self.server.server if rank == (-1,) * 4 else answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture(autouse=True)
def long_answer_wait(monkeypatch):
    """Lets the scheduler wait until the answer has arrived."""
    monkeypatch.setattr(prefill_servers, "ANSWER_WAIT_SECONDS", 10.0)


@pytest.fixture
def bootstrap():
    (port,) = free_ports(1)
    server = BootstrapServer(port)
    yield server
    server.stop()


def decode_rank(backend, kinds=fake_managers.PATCHED, layout=None, **more):
    """A decode rank that only records the rooms that it would abort on prefill."""
    decode = fake_managers.make_manager(
        backend, layout or fake_managers.mla_layout(), DECODE, kinds=kinds, **more
    )
    decode.aborted_rooms = []
    if kinds is fake_managers.PATCHED:
        decode.abort_on_prefill = lambda address, room: decode.aborted_rooms.append((address, room))
    return decode


def receiver_of(decode, bootstrap, room: int = 7):
    """A request's receiver, opened as by the scheduler once the prefill server is known."""
    made = RECEIVERS[fake_managers.backend_of(decode)](decode, bootstrap.address, room)
    assert decode.try_ensure_parallel_info(bootstrap.address)
    made._setup_bootstrap_infos = lambda: None
    made.init(0)
    return made


def reason_of(receiver) -> str:
    """Finishes a failed request as the scheduler does; returns the failure reason."""
    manager = receiver.kv_mgr
    assert receiver.poll() == manager.request_status[receiver.bootstrap_room] == KVPoll.Failed
    with pytest.raises(KVTransferError) as raised:
        receiver.failure_exception()
    assert receiver.bootstrap_room not in manager.request_status
    return raised.value.failure_reason


TP2 = fake_managers.mha_layout(Heads(0, 1, 2), (0, 2))
INCOMPATIBLE = {
    "RuntimeError": ({"page_size": 16}, {}, "Page size mismatch: prefill server has page_size=16"),
    "RuntimeError of a dtype": ({"kv_cache_dtype": "fp8"}, {}, "KV cache dtype mismatch"),
    "RuntimeError of DCP": ({"attn_cp_size": 2}, {"dcp_size": 2}, "prefill attention CP=1, got 2"),
    "AssertionError": ({"pp_size": 3}, {"pp_size": 2}, "Decode pp size (2) should be equal to"),
    "AssertionError of CP": ({}, {"attn_cp_size": 2}, "Decode cp size (2) should be equal to 1"),
    "ZeroDivisionError": ({"attn_tp_size": 0}, {}, ""),
    "AttributeError": ({"dsv41_spec_layout": [1]}, {}, "object has no attribute 'keys'"),
    "TP 3 to 2": ({"attn_tp_size": 3}, {"layout": TP2}, "3"),
    "TP 2 to 3": ({"attn_tp_size": 2}, {"attn_tp_size": 3}, "3"),
}


@backends
@pytest.mark.parametrize("case", INCOMPATIBLE)
def test_incompatible_server_fails_its_requests_with_the_reason(case, backend, bootstrap):
    says, has, why = INCOMPATIBLE[case]
    bootstrap.server = {**COMPATIBLE, **says}
    decode = decode_rank(backend, **has)
    for room in (7, 8):
        assert why in reason_of(receiver_of(decode, bootstrap, room))
    assert decode.aborted_rooms == [(bootstrap.address, 7), (bootstrap.address, 8)]
    assert bootstrap.count_server_queries() == 1
    assert not decode.failure_records


@pytest.mark.parametrize("case", ["RuntimeError", "AssertionError", "AttributeError"])
def test_stock_raises_for_an_incompatible_server(case, bootstrap):
    says, has, _ = INCOMPATIBLE[case]
    bootstrap.server = {**COMPATIBLE, **says}
    error = {"RuntimeError": RuntimeError, "AssertionError": AssertionError}
    with pytest.raises(error.get(case, AttributeError)):
        stock_prefill_info(bootstrap, **has)


def test_stock_requests_no_rank_for_some_heads_of_tp_3_to_2(bootstrap):
    """Two decode ranks, three prefill ranks: neither decode rank requests the last one."""
    bootstrap.server = {**COMPATIBLE, "attn_tp_size": 3}
    queries = []
    for rank in range(2):
        layout = fake_managers.mha_layout(Heads(rank, rank + 1, 2), (rank, 2))
        queries += stock_prefill_info(bootstrap, layout=layout).target_tp_ranks
    assert queries == [0, 1]


def stock_prefill_info(bootstrap, **has):
    """A stock decode rank's info about the server."""
    decode = decode_rank("nixl", **has)
    engine = fake_managers.common.EngineCommonKVManager

    class Stock(fake_managers.nixl.NixlKVManager):
        try_ensure_parallel_info = engine.try_ensure_parallel_info
        _resolve_rank_mapping = engine._resolve_rank_mapping

    decode.__class__ = Stock
    assert decode.try_ensure_parallel_info(bootstrap.address)
    return decode.prefill_info_table[bootstrap.address]


@backends
def test_compatible_server_is_served(backend, bootstrap):
    decode = decode_rank(backend)
    for room in (7, 8):
        assert receiver_of(decode, bootstrap, room).poll() == KVPoll.WaitingForInput
    assert bootstrap.count_server_queries() == 1
    assert not decode.aborted_rooms


@backends
def test_incompatible_server_is_queried_again_after_a_while(backend, bootstrap, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(compatibility.time, "monotonic", lambda: now[0])
    bootstrap.server = {**COMPATIBLE, "page_size": 16}
    decode = decode_rank(backend)
    reason_of(receiver_of(decode, bootstrap))
    bootstrap.server = COMPATIBLE
    now[0] += prefill_servers.INCOMPATIBLE_SECONDS - 1
    reason_of(receiver_of(decode, bootstrap))
    assert bootstrap.count_server_queries() == 1
    now[0] += 2
    # The first request after that time still gets the old answer.
    assert "Page size" in reason_of(receiver_of(decode, bootstrap))
    assert receiver_of(decode, bootstrap).poll() == KVPoll.WaitingForInput
    assert bootstrap.count_server_queries() == 2


@backends
def test_server_that_is_still_incompatible_stays_refused(backend, bootstrap, monkeypatch):
    monkeypatch.setattr(prefill_servers, "INCOMPATIBLE_SECONDS", -1)
    bootstrap.server = {**COMPATIBLE, "page_size": 16}
    decode = decode_rank(backend)
    for times in range(1, 4):
        assert "Page size" in reason_of(receiver_of(decode, bootstrap, times))
        assert bootstrap.count_server_queries() == times


@backends
def test_server_that_restarts_as_compatible_is_served_at_once(backend, bootstrap):
    """Heartbeats have detected that the incompatible server stopped."""
    bootstrap.server = {**COMPATIBLE, "page_size": 16}
    decode = decode_rank(backend)
    reason_of(receiver_of(decode, bootstrap))
    decode.prefill_info_table.pop(bootstrap.address)
    bootstrap.server = COMPATIBLE
    assert receiver_of(decode, bootstrap).poll() == KVPoll.WaitingForInput
    assert decode.incompatibility(bootstrap.address) is None


@backends
@pytest.mark.parametrize("until", [-1, 1000])
def test_server_lost_between_lookup_and_init_keeps_its_reason(
    backend, bootstrap, until, monkeypatch
):
    """Its heartbeats failed after the scheduler had looked it up."""
    monkeypatch.setattr(prefill_servers, "INCOMPATIBLE_SECONDS", until)
    bootstrap.server = {**COMPATIBLE, "page_size": 16}
    decode = decode_rank(backend)
    receiver = RECEIVERS[backend](decode, bootstrap.address, 7)
    decode.try_ensure_parallel_info(bootstrap.address)
    decode.prefill_info_table.pop(bootstrap.address)
    receiver.init(0)
    assert "Page size" in reason_of(receiver)


@backends
@pytest.mark.parametrize(
    "answer", [None, [], "x", {}, {**COMPATIBLE, "attn_tp_size": "x"}], ids=repr
)
def test_invalid_server_info_leaves_the_server_unknown(backend, bootstrap, answer):
    """A server that is not up yet is unknown, too."""
    bootstrap.server = answer
    decode = decode_rank(backend)
    assert not decode.try_ensure_parallel_info(bootstrap.address)
    assert not decode.incompatible and not decode.prefill_info_table


@backends
def test_request_that_failed_before_keeps_its_reason(backend, bootstrap):
    bootstrap.server = {**COMPATIBLE, "page_size": 16}
    decode = decode_rank(backend)
    receiver = RECEIVERS[backend](decode, bootstrap.address, 7)
    decode.try_ensure_parallel_info(bootstrap.address)
    decode.record_failure(7, "given up")
    receiver.conclude_state = KVPoll.Failed
    decode.update_status(7, KVPoll.Failed)
    receiver.init(0)
    assert reason_of(receiver) == "given up"
    assert not decode.aborted_rooms


@backends
def test_digests_are_dropped_with_their_room(backend, bootstrap):
    decode = decode_rank(backend)
    receiver = receiver_of(decode, bootstrap)
    decode.arrived_digests[7] = {0: b"digests"}
    receiver.clear()
    assert not decode.arrived_digests


# Answers of a bootstrap server, which a client names


@pytest.fixture
def bootstrap_with_ranks(bootstrap):
    """A bootstrap server whose ranks read messages and do nothing."""
    with zmq.Context() as context, context.socket(zmq.PULL) as sock:
        bootstrap.rank_port = sock.bind_to_random_port(f"tcp://{HOST}")
        yield bootstrap


def scheduled_receiver(decode, bootstrap, room: int = 7):
    """A request's receiver, opened as by decode's scheduler, down to each prefill rank."""
    receiver = RECEIVERS[fake_managers.backend_of(decode)](decode, bootstrap.address, room)
    if decode.try_ensure_parallel_info(bootstrap.address):
        req = SimpleNamespace(
            bootstrap_host=HOST,
            bootstrap_port=int(bootstrap.address.split(":")[1]),
            bootstrap_room=room,
            disagg_prefill_dp_rank=None,
        )
        queue = object.__new__(DecodePreallocQueue)
        queue.kv_manager = decode
        receiver.init(queue._resolve_prefill_dp_rank(req))
    else:
        receiver.abort()
    return receiver


@backends
def test_compatible_server_is_queried_for_its_rank(backend, bootstrap_with_ranks):
    decode = decode_rank(backend)
    assert scheduled_receiver(decode, bootstrap_with_ranks).poll() == KVPoll.WaitingForInput
    assert bootstrap_with_ranks.queried_ranks == [(-1,) * 4, (0,) * 4]


@backends
@pytest.mark.parametrize("size", [0, -1])
@pytest.mark.parametrize("name", SIZES)
def test_parallel_size_below_1_fails_the_requests(name, size, backend, bootstrap_with_ranks):
    """Otherwise the scheduler would crash, or the request would wait for no rank at all."""
    bootstrap_with_ranks.server = {**COMPATIBLE, name: size}
    assert reason_of(scheduled_receiver(decode_rank(backend), bootstrap_with_ranks))


INVALID_RANKS = [
    *([], None, "x", {}, {"rank_ip": HOST}, {"rank_ip": HOST, "rank_port": None}),
    *({"rank_ip": HOST, "rank_port": "x"}, {"rank_ip": 7, "rank_port": 1}),
]


@backends
@pytest.mark.parametrize("answer", INVALID_RANKS, ids=repr)
def test_invalid_rank_address_fails_the_requests(answer, backend, bootstrap_with_ranks):
    bootstrap_with_ranks.rank = answer
    assert reason_of(scheduled_receiver(decode_rank(backend), bootstrap_with_ranks))


# Notifications to prefill


def recording_notifier(monkeypatch, fails=(), after=(0,)):
    """A notifier, and the list of its notifications: rank and room of each."""
    monkeypatch.setattr(compatibility, "NOTIFY_AFTER_SECONDS", after)
    notified = []

    def tell(rank: dict, room: int) -> None:
        if room in fails:
            raise OSError("no route")
        notified.append((tuple(rank["rank"]), room))

    return AbortNotifier(tell), notified


def test_each_prefill_rank_is_notified_once(bootstrap, monkeypatch):
    bootstrap.server = {**COMPATIBLE, "attn_tp_size": 3, "pp_size": 2, "dp_size": 2}
    thread, notified = recording_notifier(monkeypatch)
    for room in (7, 8):
        thread.add(bootstrap.address, room)
    ranks = [(dp, 0, tp, pp) for dp in range(2) for tp in range(3) for pp in range(2)]
    expected = [(rank, room) for room in (7, 8) for rank in ranks]
    assert wait_until(lambda: len(notified) >= len(expected), HANG_TIMEOUT_SECONDS, 0.01)
    time.sleep(0.1)  # no further notification comes
    assert notified == expected


def test_prefill_is_notified_again(bootstrap, monkeypatch):
    """A request may reach prefill after the first notification, and would wait forever."""
    thread, notified = recording_notifier(monkeypatch, after=(0, 0.3, 0.6))
    thread.add(bootstrap.address, 7)
    assert wait_until(lambda: notified, HANG_TIMEOUT_SECONDS, 0.01)
    thread.add(bootstrap.address, 8)
    assert wait_until(lambda: len(notified) == 6, HANG_TIMEOUT_SECONDS, 0.01)
    assert sorted(room for _, room in notified) == [7, 7, 7, 8, 8, 8]
    assert [room for _, room in notified[:2]] == [7, 8]
    assert wait_until(lambda: not any(thread.rooms), HANG_TIMEOUT_SECONDS, 0.01)


@backends
def test_late_prefill_request_is_aborted(backend, bootstrap, monkeypatch):
    monkeypatch.setattr(compatibility, "NOTIFY_AFTER_SECONDS", (0, 0.2, 3))
    prefill = fake_managers.make_manager(backend, fake_managers.mla_layout())
    with zmq.Context() as context, context.socket(zmq.PULL) as sock:
        sock.setsockopt(zmq.RCVTIMEO, HANG_TIMEOUT_SECONDS * 1000)
        bootstrap.rank_port = sock.bind_to_random_port(f"tcp://{HOST}")
        decode = fake_managers.make_manager(backend, fake_managers.mla_layout(), DECODE)
        decode.abort_on_prefill(bootstrap.address, 7)
        fake_managers.process_messages(prefill, sock.recv_multipart())
        assert not prefill.request_status
        sender = fake_managers.SENDERS[backend](prefill, bootstrap.address, 7)
        fake_managers.process_messages(prefill, sock.recv_multipart())
        assert sender.poll() == KVPoll.Failed
        decode.request_status[7] = KVPoll.Bootstrapping  # another request of the room
        sock.setsockopt(zmq.RCVTIMEO, 4000)
        with pytest.raises(zmq.Again):
            sock.recv_multipart()


def test_lost_server_does_not_stop_notifications_to_others(bootstrap, monkeypatch, caplog):
    (port,) = free_ports(1)
    thread, notified = recording_notifier(monkeypatch)
    thread.add(f"{HOST}:{port}", 6)
    thread.add(bootstrap.address, 7)
    assert wait_until(lambda: notified, HANG_TIMEOUT_SECONDS, 0.01)
    assert notified == [((0, 0, 0, 0), 7)]
    assert f"Could not notify prefill {HOST}:{port} that room 6 failed" in caplog.text


def test_server_that_does_not_answer_is_queried_at_intervals(bootstrap, monkeypatch):
    """Each query takes seconds, during which no other server is notified."""
    queries = []

    def timed_out(address: str) -> list[dict]:
        queries.append(address)
        raise OSError("timed out")

    with monkeypatch.context() as stopped:
        stopped.setattr(compatibility, "_query_all_ranks", timed_out)
        thread, notified = recording_notifier(monkeypatch)
        for room in range(5):
            thread.add(bootstrap.address, room)
        assert wait_until(lambda: queries and not any(thread.rooms), HANG_TIMEOUT_SECONDS, 0.01)
        time.sleep(0.1)  # until the last room is handled
    assert queries == [bootstrap.address] and not notified
    monkeypatch.setattr(compatibility.time, "monotonic", lambda now=time.monotonic: now() + 11)
    thread.add(bootstrap.address, 7)
    assert wait_until(lambda: notified, HANG_TIMEOUT_SECONDS, 0.01)


def test_failed_notification_does_not_stop_the_thread(bootstrap, monkeypatch, caplog):
    thread, notified = recording_notifier(monkeypatch, fails=[6])
    thread.add(bootstrap.address, 6)
    thread.add(bootstrap.address, 7)
    assert wait_until(lambda: notified, HANG_TIMEOUT_SECONDS, 0.01)
    assert notified == [((0, 0, 0, 0), 7)]
    assert "room 6 failed: no route" in caplog.text


def test_notification_is_delayed(bootstrap, monkeypatch):
    thread, notified = recording_notifier(monkeypatch, after=(0.3,))
    began = time.monotonic()
    thread.add(bootstrap.address, 7)
    assert wait_until(lambda: notified, HANG_TIMEOUT_SECONDS, 0.01)
    assert time.monotonic() - began >= 0.3


def test_pending_notifications_are_bounded(bootstrap, monkeypatch):
    """The oldest are dropped; their prefill requests time out."""
    monkeypatch.setattr(compatibility, "MAX_PENDING_NOTICES", 3)
    thread, notified = recording_notifier(monkeypatch)
    monkeypatch.setattr(thread.thread, "is_alive", lambda: True)
    for room in range(6):
        thread.add(bootstrap.address, room)
    thread.thread.start()
    assert wait_until(lambda: len(notified) == 3, HANG_TIMEOUT_SECONDS, 0.01)
    assert [room for _, room in notified] == [3, 4, 5]
    thread.add(bootstrap.address, 9)
    assert wait_until(lambda: len(notified) == 4, HANG_TIMEOUT_SECONDS, 0.01)


@backends
def test_abort_message_reaches_prefill(backend, bootstrap, monkeypatch):
    """The prefill rank's thread reads the message as an abort."""
    monkeypatch.setattr(compatibility, "NOTIFY_AFTER_SECONDS", (0,))
    with zmq.Context() as context, context.socket(zmq.PULL) as sock:
        sock.setsockopt(zmq.RCVTIMEO, HANG_TIMEOUT_SECONDS * 1000)
        bootstrap.rank_port = sock.bind_to_random_port(f"tcp://{HOST}")
        decode = fake_managers.make_manager(backend, fake_managers.mla_layout(), DECODE)
        decode.abort_on_prefill(bootstrap.address, 7)
        frames = sock.recv_multipart()
    assert AbortNotification.from_zmq(frames) == AbortNotification(7, *fake_managers.ENDPOINT)
    prefill = fake_managers.make_manager(backend, fake_managers.mla_layout())
    prefill.request_status[7] = KVPoll.Bootstrapping
    fake_managers.process_messages(prefill, frames)
    assert prefill.request_status[7] == KVPoll.Failed


@backends
@pytest.mark.parametrize("place", [{"attn_tp_rank": 1}, {"pp_rank": 1}], ids=str)
def test_only_the_first_decode_rank_notifies_prefill(backend, place):
    decode = fake_managers.make_manager(backend, fake_managers.mla_layout(), DECODE, **place)
    decode.abort_on_prefill("127.0.0.1:1", 7)
    assert not hasattr(decode, "abort_notifier")
