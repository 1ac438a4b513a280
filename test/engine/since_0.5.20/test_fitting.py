"""Decode: a prefill server that does not fit fails its requests with the reason, on both sides."""

import http.server
import json
import threading
import time
from types import SimpleNamespace
from urllib.parse import parse_qs, urlsplit

import managers
import pytest
import zmq
from managers import BACKENDS, DECODE, RECEIVERS
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import AbortNotification, KVTransferError
from sglang.srt.disaggregation.decode import DecodePreallocQueue
from sglang.srt.disaggregation.kv_layout import Heads
from sglang.srt.disaggregation.pd import fitting, routes
from sglang.srt.disaggregation.pd.fitting import Untold

from pd_harness.ports import HOST, free_ports
from pd_harness.waiting import awaited

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("published")]

backends = pytest.mark.parametrize("backend", BACKENDS)
FITS = {
    **{"attn_tp_size": 1, "attn_cp_size": 1, "dp_size": 1, "pp_size": 1},
    **{"page_size": managers.PAGE, "kv_cache_dtype": "bfloat16", "follow_bootstrap_room": True},
}
SIZES = ("dp_size", "attn_cp_size", "attn_tp_size", "pp_size")
RANK = ("prefill_dp_rank", "prefill_cp_rank", "target_tp_rank", "target_pp_rank")
SECONDS = 20  # which only a hang reaches


class Bootstrap(http.server.ThreadingHTTPServer):
    """Says of its server what it is told to, and for each rank where that reads messages."""

    def __init__(self, port: int):
        super().__init__((HOST, port), Answer)
        self.address = f"{HOST}:{port}"
        self.server: object = FITS
        self.asked: list[tuple[int, ...]] = []
        self.rank_port, self.rank = 1, ...
        self.thread = threading.Thread(target=self.serve_forever, args=[0.01])
        self.thread.start()

    def stop(self) -> None:
        self.shutdown()
        self.thread.join()
        self.server_close()

    def times_asked(self) -> int:
        return self.asked.count((-1,) * 4)


class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        query = parse_qs(urlsplit(self.path).query)
        rank = tuple(int(query[name][0]) for name in RANK)
        self.server.asked.append(rank)
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
def patience(monkeypatch):
    """The scheduler waits for an answer as long as it takes here."""
    monkeypatch.setattr(routes, "WAIT_SECONDS", 10.0)


@pytest.fixture
def bootstrap():
    (port,) = free_ports(1)
    server = Bootstrap(port)
    yield server
    server.stop()


def decode_rank(backend, kinds=managers.PATCHED, layout=None, **more):
    """A decode rank that notes, of what it would tell prefill, the rooms."""
    decode = managers.rank(backend, layout or managers.latents(), DECODE, kinds=kinds, **more)
    decode.untold_rooms = []
    if kinds is managers.PATCHED:
        decode.tell_prefill = lambda address, room: decode.untold_rooms.append((address, room))
    return decode


def receiver_of(decode, bootstrap, room: int = 7):
    """A request's, as the scheduler makes it: when the prefill server is known."""
    made = RECEIVERS[managers.backend_of(decode)](decode, bootstrap.address, room)
    assert decode.try_ensure_parallel_info(bootstrap.address)
    made._setup_bootstrap_infos = lambda: None
    made.init(0)
    return made


def reason_of(receiver) -> str:
    """It has failed, as the scheduler finds out."""
    manager = receiver.kv_mgr
    assert receiver.poll() == manager.request_status[receiver.bootstrap_room] == KVPoll.Failed
    with pytest.raises(KVTransferError) as raised:
        receiver.failure_exception()
    assert receiver.bootstrap_room not in manager.request_status
    return raised.value.failure_reason


TP2 = managers.heads(Heads(0, 1, 2), (0, 2))
UNFIT = {
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
@pytest.mark.parametrize("case", UNFIT)
def test_an_unfit_server_fails_its_requests_with_the_reason(case, backend, bootstrap):
    says, has, why = UNFIT[case]
    bootstrap.server = {**FITS, **says}
    decode = decode_rank(backend, **has)
    for room in (7, 8):
        assert why in reason_of(receiver_of(decode, bootstrap, room))
    assert decode.untold_rooms == [(bootstrap.address, 7), (bootstrap.address, 8)]
    assert bootstrap.times_asked() == 1
    assert not decode.failure_records


@pytest.mark.parametrize("case", ["RuntimeError", "AssertionError", "AttributeError"])
def test_the_engine_raises_in_its_scheduler(case, bootstrap):
    says, has, _ = UNFIT[case]
    bootstrap.server = {**FITS, **says}
    error = {"RuntimeError": RuntimeError, "AssertionError": AssertionError}
    with pytest.raises(error.get(case, AttributeError)):
        stock_table(bootstrap, **has)


def test_the_engine_asks_no_rank_for_some_heads_of_tp_3_to_2(bootstrap):
    """Two decode ranks, three prefill ranks: the last is not asked by either."""
    bootstrap.server = {**FITS, "attn_tp_size": 3}
    asked = []
    for rank in range(2):
        layout = managers.heads(Heads(rank, rank + 1, 2), (rank, 2))
        asked += stock_table(bootstrap, layout=layout).target_tp_ranks
    assert asked == [0, 1]


def stock_table(bootstrap, **has):
    """What a stock decode rank knows of the server."""
    decode = decode_rank("nixl", **has)
    engine = managers.common.EngineCommonKVManager

    class Stock(managers.nixl.NixlKVManager):
        try_ensure_parallel_info = engine.try_ensure_parallel_info
        _resolve_rank_mapping = engine._resolve_rank_mapping

    decode.__class__ = Stock
    assert decode.try_ensure_parallel_info(bootstrap.address)
    return decode.prefill_info_table[bootstrap.address]


@backends
def test_a_fit_server_is_served(backend, bootstrap):
    decode = decode_rank(backend)
    for room in (7, 8):
        assert receiver_of(decode, bootstrap, room).poll() == KVPoll.WaitingForInput
    assert bootstrap.times_asked() == 1
    assert not decode.untold_rooms


@backends
def test_an_unfit_server_is_asked_again_after_a_while(backend, bootstrap, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(fitting.time, "monotonic", lambda: now[0])
    bootstrap.server = {**FITS, "page_size": 16}
    decode = decode_rank(backend)
    reason_of(receiver_of(decode, bootstrap))
    bootstrap.server = FITS
    now[0] += fitting.UNFIT_SECONDS - 1
    reason_of(receiver_of(decode, bootstrap))
    assert bootstrap.times_asked() == 1
    now[0] += 2
    # The request that finds the time over is still answered by what was known.
    assert "Page size" in reason_of(receiver_of(decode, bootstrap))
    assert receiver_of(decode, bootstrap).poll() == KVPoll.WaitingForInput
    assert bootstrap.times_asked() == 2


@backends
def test_one_that_is_still_unfit_stays_so(backend, bootstrap, monkeypatch):
    monkeypatch.setattr(fitting, "UNFIT_SECONDS", -1)
    bootstrap.server = {**FITS, "page_size": 16}
    decode = decode_rank(backend)
    for times in range(1, 4):
        assert "Page size" in reason_of(receiver_of(decode, bootstrap, times))
        assert bootstrap.times_asked() == times


@backends
def test_a_server_that_returns_fit_is_served_at_once(backend, bootstrap):
    """Heartbeats have found that the unfit one was gone."""
    bootstrap.server = {**FITS, "page_size": 16}
    decode = decode_rank(backend)
    reason_of(receiver_of(decode, bootstrap))
    decode.prefill_info_table.pop(bootstrap.address)
    bootstrap.server = FITS
    assert receiver_of(decode, bootstrap).poll() == KVPoll.WaitingForInput
    assert decode.why_unfit(bootstrap.address) is None


@backends
@pytest.mark.parametrize("until", [-1, 1000])
def test_a_server_that_goes_between_the_two_questions(backend, bootstrap, until, monkeypatch):
    """Its heartbeats failed after the scheduler had asked whether it is known."""
    monkeypatch.setattr(fitting, "UNFIT_SECONDS", until)
    bootstrap.server = {**FITS, "page_size": 16}
    decode = decode_rank(backend)
    receiver = RECEIVERS[backend](decode, bootstrap.address, 7)
    decode.try_ensure_parallel_info(bootstrap.address)
    decode.prefill_info_table.pop(bootstrap.address)
    receiver.init(0)
    assert "Page size" in reason_of(receiver)


@backends
@pytest.mark.parametrize("answer", [None, [], "x", {}, {**FITS, "attn_tp_size": "x"}], ids=repr)
def test_what_is_no_answer_leaves_the_server_unknown(backend, bootstrap, answer):
    """As one that is not up yet."""
    bootstrap.server = answer
    decode = decode_rank(backend)
    assert not decode.try_ensure_parallel_info(bootstrap.address)
    assert not decode.unfit and not decode.prefill_info_table


@backends
def test_a_request_that_has_failed_before_is_told_nothing_new(backend, bootstrap):
    bootstrap.server = {**FITS, "page_size": 16}
    decode = decode_rank(backend)
    receiver = RECEIVERS[backend](decode, bootstrap.address, 7)
    decode.try_ensure_parallel_info(bootstrap.address)
    decode.record_failure(7, "given up")
    receiver.conclude_state = KVPoll.Failed
    decode.update_status(7, KVPoll.Failed)
    receiver.init(0)
    assert reason_of(receiver) == "given up"
    assert not decode.untold_rooms


@backends
def test_digests_go_with_the_room(backend, bootstrap):
    decode = decode_rank(backend)
    receiver = receiver_of(decode, bootstrap)
    decode.arrived_digests[7] = {0: b"digests"}
    receiver.clear()
    assert not decode.arrived_digests


# What a client's bootstrap server may say; the client names it


@pytest.fixture
def listening(bootstrap):
    """The bootstrap server's ranks read messages, and do nothing."""
    with zmq.Context() as context, context.socket(zmq.PULL) as sock:
        bootstrap.rank_port = sock.bind_to_random_port(f"tcp://{HOST}")
        yield bootstrap


def scheduled(decode, bootstrap, room: int = 7):
    """A request's receiver, as decode's scheduler takes it up, down to each prefill rank."""
    receiver = RECEIVERS[managers.backend_of(decode)](decode, bootstrap.address, room)
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
def test_a_server_that_fits_is_asked_for_its_rank(backend, listening):
    decode = decode_rank(backend)
    assert scheduled(decode, listening).poll() == KVPoll.WaitingForInput
    assert listening.asked == [(-1,) * 4, (0,) * 4]


@backends
@pytest.mark.parametrize("size", [0, -1])
@pytest.mark.parametrize("name", SIZES)
def test_a_server_without_ranks_fails_its_requests(name, size, backend, listening):
    """In every other way the scheduler would end, or the request wait for nobody."""
    listening.server = {**FITS, name: size}
    assert reason_of(scheduled(decode_rank(backend), listening))


RANKS = [
    *([], None, "x", {}, {"rank_ip": HOST}, {"rank_ip": HOST, "rank_port": None}),
    *({"rank_ip": HOST, "rank_port": "x"}, {"rank_ip": 7, "rank_port": 1}),
]


@backends
@pytest.mark.parametrize("answer", RANKS, ids=repr)
def test_a_rank_that_is_nowhere_fails_its_requests(answer, backend, listening):
    listening.rank = answer
    assert reason_of(scheduled(decode_rank(backend), listening))


# What prefill is told


def untold(monkeypatch, fails=(), after=(0,)):
    """Rooms that each rank was told."""
    monkeypatch.setattr(fitting, "TELL_AFTER_SECONDS", after)
    told = []

    def tell(rank: dict, room: int) -> None:
        if room in fails:
            raise OSError("no route")
        told.append((tuple(rank["rank"]), room))

    return Untold(tell), told


def test_each_rank_is_told_once(bootstrap, monkeypatch):
    bootstrap.server = {**FITS, "attn_tp_size": 3, "pp_size": 2, "dp_size": 2}
    thread, told = untold(monkeypatch)
    for room in (7, 8):
        thread.add(bootstrap.address, room)
    ranks = [(dp, 0, tp, pp) for dp in range(2) for tp in range(3) for pp in range(2)]
    expected = [(rank, room) for room in (7, 8) for rank in ranks]
    assert awaited(lambda: len(told) >= len(expected), SECONDS, 0.01)
    time.sleep(0.1)  # nothing more comes
    assert told == expected


def test_it_is_told_again(bootstrap, monkeypatch):
    """A request may come to prefill after it was told the first time, and would wait for ever."""
    thread, told = untold(monkeypatch, after=(0, 0.3, 0.6))
    thread.add(bootstrap.address, 7)
    assert awaited(lambda: told, SECONDS, 0.01)
    thread.add(bootstrap.address, 8)
    assert awaited(lambda: len(told) == 6, SECONDS, 0.01)
    assert sorted(room for _, room in told) == [7, 7, 7, 8, 8, 8]
    assert [room for _, room in told[:2]] == [7, 8]
    assert awaited(lambda: not any(thread.rooms), SECONDS, 0.01)


@backends
def test_prefill_to_which_the_request_comes_late(backend, bootstrap, monkeypatch):
    monkeypatch.setattr(fitting, "TELL_AFTER_SECONDS", (0, 0.2, 3))
    prefill = managers.rank(backend, managers.latents())
    with zmq.Context() as context, context.socket(zmq.PULL) as sock:
        sock.setsockopt(zmq.RCVTIMEO, SECONDS * 1000)
        bootstrap.rank_port = sock.bind_to_random_port(f"tcp://{HOST}")
        decode = managers.rank(backend, managers.latents(), DECODE)
        decode.tell_prefill(bootstrap.address, 7)
        managers.read(prefill, sock.recv_multipart())
        assert not prefill.request_status
        sender = managers.SENDERS[backend](prefill, bootstrap.address, 7)
        managers.read(prefill, sock.recv_multipart())
        assert sender.poll() == KVPoll.Failed
        decode.request_status[7] = KVPoll.Bootstrapping  # another request with its number
        sock.setsockopt(zmq.RCVTIMEO, 4000)
        with pytest.raises(zmq.Again):
            sock.recv_multipart()


def test_a_server_that_is_gone_is_not_told_and_the_next_one_is(bootstrap, monkeypatch, caplog):
    (port,) = free_ports(1)
    thread, told = untold(monkeypatch)
    thread.add(f"{HOST}:{port}", 6)
    thread.add(bootstrap.address, 7)
    assert awaited(lambda: told, SECONDS, 0.01)
    assert told == [((0, 0, 0, 0), 7)]
    assert f"Prefill {HOST}:{port} was not told that room 6 failed" in caplog.text


def test_one_that_does_not_answer_is_asked_once_in_a_while(bootstrap, monkeypatch):
    """Each time takes seconds, in which no other server is told."""
    asked = []

    def timed_out(address: str) -> list[dict]:
        asked.append(address)
        raise OSError("timed out")

    with monkeypatch.context() as stopped:
        stopped.setattr(fitting, "_all_ranks", timed_out)
        thread, told = untold(monkeypatch)
        for room in range(5):
            thread.add(bootstrap.address, room)
        assert awaited(lambda: asked and not any(thread.rooms), SECONDS, 0.01)
        time.sleep(0.1)  # with the last one
    assert asked == [bootstrap.address] and not told
    monkeypatch.setattr(fitting.time, "monotonic", lambda now=time.monotonic: now() + 11)
    thread.add(bootstrap.address, 7)
    assert awaited(lambda: told, SECONDS, 0.01)


def test_a_rank_that_cannot_be_told_ends_no_thread(bootstrap, monkeypatch, caplog):
    thread, told = untold(monkeypatch, fails=[6])
    thread.add(bootstrap.address, 6)
    thread.add(bootstrap.address, 7)
    assert awaited(lambda: told, SECONDS, 0.01)
    assert told == [((0, 0, 0, 0), 7)]
    assert "room 6 failed: no route" in caplog.text


def test_not_before_a_request_may_have_come(bootstrap, monkeypatch):
    thread, told = untold(monkeypatch, after=(0.3,))
    began = time.monotonic()
    thread.add(bootstrap.address, 7)
    assert awaited(lambda: told, SECONDS, 0.01)
    assert time.monotonic() - began >= 0.3


def test_so_many_wait_to_be_told(bootstrap, monkeypatch):
    """The oldest are dropped; their prefill requests end by their timeout."""
    monkeypatch.setattr(fitting, "MAX_UNTOLD", 3)
    thread, told = untold(monkeypatch)
    monkeypatch.setattr(thread.thread, "is_alive", lambda: True)
    for room in range(6):
        thread.add(bootstrap.address, room)
    thread.thread.start()
    assert awaited(lambda: len(told) == 3, SECONDS, 0.01)
    assert [room for _, room in told] == [3, 4, 5]
    thread.add(bootstrap.address, 9)
    assert awaited(lambda: len(told) == 4, SECONDS, 0.01)


@backends
def test_over_the_wire(backend, bootstrap, monkeypatch):
    """Prefill's rank reads what its thread takes as an abort."""
    monkeypatch.setattr(fitting, "TELL_AFTER_SECONDS", (0,))
    with zmq.Context() as context, context.socket(zmq.PULL) as sock:
        sock.setsockopt(zmq.RCVTIMEO, SECONDS * 1000)
        bootstrap.rank_port = sock.bind_to_random_port(f"tcp://{HOST}")
        decode = managers.rank(backend, managers.latents(), DECODE)
        decode.tell_prefill(bootstrap.address, 7)
        frames = sock.recv_multipart()
    assert AbortNotification.from_zmq(frames) == AbortNotification(7, *managers.ENDPOINT)
    prefill = managers.rank(backend, managers.latents())
    prefill.request_status[7] = KVPoll.Bootstrapping
    managers.read(prefill, frames)
    assert prefill.request_status[7] == KVPoll.Failed


@backends
@pytest.mark.parametrize("place", [{"attn_tp_rank": 1}, {"pp_rank": 1}], ids=str)
def test_one_decode_rank_tells(backend, place):
    decode = managers.rank(backend, managers.latents(), DECODE, **place)
    decode.tell_prefill("127.0.0.1:1", 7)
    assert not hasattr(decode, "untold")
