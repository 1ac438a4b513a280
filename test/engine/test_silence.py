"""Who does not answer is silent, until it does: by real sockets, on a manager that only knows."""

import gc
import time
import weakref
from types import SimpleNamespace

import pytest
import zmq
from sglang.srt.disaggregation.pd import peer_sockets, silence
from sglang.srt.disaggregation.pd.silence import VARIABLE, NoticesSilence
from sglang.srt.disaggregation.pd.variables import seconds_of

from pd_harness.waiting import awaited

pytestmark = pytest.mark.engine

PATIENCE = 10.0


class Manager(NoticesSilence):
    def __init__(self):
        self.transfer_infos, self.decode_kv_args_table = {}, {}
        self.failed, self.back, self.rested, self.dropped = [], [], [], []
        self.is_writing = False

    def fail_silent(self, room: int, reason: str) -> None:
        self.failed.append((room, reason))
        self.transfer_infos.pop(room)

    def is_back(self, name: str) -> None:
        self.back.append(name)

    def register(self, name: str, port: int) -> SimpleNamespace:
        info = SimpleNamespace(endpoint="127.0.0.1", dst_port=port)
        self.decode_kv_args_table[name] = info
        self.meet(name, info)
        return info

    def rest(self, name: str) -> bool:
        if not self.is_writing:
            self.rested.append(name)
        return not self.is_writing

    def drop(self, name: str) -> None:
        self.dropped.append(name)


@pytest.fixture
def manager(monkeypatch):
    """One for which a second without a connection is silence."""
    monkeypatch.setattr(silence, "LEAST_SECONDS", 1.0)
    monkeypatch.setenv(VARIABLE, "1")
    return Manager()


@pytest.fixture
def listening():
    """A function that listens on a port, any if it is 0: the socket, and the port."""
    made = []

    def listen(port: int = 0) -> tuple[zmq.Socket, int]:
        sock = zmq.Context.instance().socket(zmq.PULL)
        made.append(sock)
        sock.bind(f"tcp://127.0.0.1:{port or '*'}")
        return sock, int(
            sock.getsockopt(zmq.LAST_ENDPOINT).decode().rpartition(":")[2].rstrip("\0")
        )

    yield listen
    for sock in made:
        sock.close(linger=0)


def test_rooms_of_a_silent_rank_fail_and_others_do_not(manager, listening):
    (gone, first), (_, second) = listening(), listening()
    manager.register("a", first)
    manager.register("b", second)
    manager.transfer_infos = {1: {"a": None}, 2: {"b": None}, 3: {"b": None, "a": None}}
    time.sleep(1.5)
    assert not manager.silent and not manager.failed
    gone.close(linger=0)
    begun = time.monotonic()
    assert awaited(lambda: len(manager.failed) == 2, PATIENCE, 0.01)
    assert 0.9 < time.monotonic() - begun < 4
    assert sorted(room for room, _ in manager.failed) == [1, 3]
    assert manager.why_silent(2) == ""
    manager.transfer_infos[4] = {"b": None, "a": None}
    assert f"decode 127.0.0.1:{first} has not answered for 1 s" in manager.failed[0][1]
    assert VARIABLE in manager.why_silent(4)


def test_one_that_answers_again_is_served_again(manager, listening):
    gone, port = listening()
    manager.register("a", port)
    time.sleep(0.2)
    gone.close(linger=0)
    assert awaited(lambda: "a" in manager.silent, PATIENCE, 0.01)
    assert manager.back == []
    listening(port)
    assert awaited(lambda: not manager.silent, PATIENCE, 0.01)
    assert manager.back == ["a"]
    manager.transfer_infos[1] = {"a": None}
    time.sleep(1.2)
    assert manager.why_silent(1) == "" and not manager.failed


def test_one_that_registers_from_elsewhere_is_served_at_once(manager, listening):
    """Before the next look; where it was said to be, nobody answers."""
    gone, nowhere = listening()
    gone.close(linger=0)
    manager.register("a", nowhere)
    assert awaited(lambda: "a" in manager.silent, PATIENCE, 0.01)
    _, port = listening()
    manager.register("a", port)
    assert "a" not in manager.silent


def test_one_that_sends_a_message_lives_before_it_is_connected_to(manager, listening, monkeypatch):
    """And has a second from then on, also where its socket has been closed by now."""
    gone, port = listening()
    info = manager.register("a", port)
    time.sleep(0.2)
    gone.close(linger=0)
    monkeypatch.setattr(peer_sockets, "GONE_SECONDS", 0.0)
    assert awaited(lambda: "a" in manager.silent, PATIENCE, 0.01)
    endpoint = f"tcp://127.0.0.1:{port}"
    assert awaited(lambda: endpoint not in peer_sockets.open_sockets(), PATIENCE, 0.01)
    time.sleep(1.2)
    assert "a" in manager.silent  # nobody has said anything
    monkeypatch.setattr(peer_sockets, "GONE_SECONDS", 60.0)
    manager.heard("a", info)
    assert not manager.silent and manager.back == ["a"]
    assert awaited(lambda: "a" in manager.silent, PATIENCE, 0.01)


def test_one_that_never_answered_is_silent(manager, listening):
    gone, port = listening()
    gone.close(linger=0)
    manager.register("a", port)
    assert awaited(lambda: "a" in manager.silent, PATIENCE, 0.01)


def test_one_that_is_being_registered_is_not_silent(manager, listening):
    """That may take a while, in which there is no socket to it."""
    _, port = listening()
    manager.register("a", port)
    manager.transfer_infos[1] = {"b": None}
    manager.look_at_peers()
    assert manager.why_silent(1) == "" and not manager.failed


def silent_for_long(manager, monkeypatch, seconds: dict[int, float]) -> None:
    """These ports have been silent for so long."""
    ports = {f"tcp://127.0.0.1:{port}": since for port, since in seconds.items()}
    monkeypatch.setattr(
        peer_sockets.PeerSocket, "silent_for", lambda self: ports.get(self.endpoint, 0.0)
    )
    manager.look_at_peers()


def test_a_rank_that_is_silent_for_long_rests_once_and_may_come_back(manager, monkeypatch):
    for name, port in (("a", 1), ("b", 2)):
        manager.register(name, port)
    silent_for_long(manager, monkeypatch, {1: silence.REST_SECONDS - 1})
    assert set(manager.silent) == {"a"} and not manager.rested
    for _ in range(2):
        silent_for_long(manager, monkeypatch, {1: silence.REST_SECONDS})
        assert manager.rested == ["a"] and set(manager.decode_kv_args_table) == {"a", "b"}
    silent_for_long(manager, monkeypatch, {})
    assert manager.back == ["a"] and not manager.resting
    silent_for_long(manager, monkeypatch, {1: silence.REST_SECONDS})
    assert manager.rested == ["a", "a"] and not manager.dropped
    with monkeypatch.context() as heard:
        heard.setattr(peer_sockets.PeerSocket, "silent_for", lambda self: 0.0)
        manager.register("a", 1)
        assert not manager.resting and not manager.silent


def test_none_rests_that_has_a_room_or_is_written_to(manager, monkeypatch):
    manager.register("a", 1)
    manager.fail_silent = lambda room, reason: None
    manager.transfer_infos = {5: {"b": None, "a": None}}
    silent_for_long(manager, monkeypatch, {1: 9e9})
    assert not manager.rested
    manager.transfer_infos, manager.is_writing = {}, True
    manager.look_at_peers()
    assert not manager.resting
    manager.is_writing = False
    manager.look_at_peers()
    assert manager.resting == {"a"}


def test_of_too_many_the_longest_silent_are_forgotten(manager, monkeypatch):
    """All that is kept of them: a decode server that is restarted leaves a name each time."""
    monkeypatch.setattr(silence, "MAX_RESTING", 3)
    ports = range(1, 6)
    for port in ports:
        manager.register(f"rank {port}", port)
    manager.fail_silent = lambda room, reason: None
    manager.transfer_infos = {5: {"rank 5": None}}
    silent_for_long(manager, monkeypatch, {port: 1000.0 + port for port in ports})
    assert manager.dropped == ["rank 4"]
    manager.transfer_infos.clear()
    manager.look_at_peers()
    assert manager.dropped == ["rank 4", "rank 5"]
    left = {"rank 1", "rank 2", "rank 3"}
    tables = (manager.met, manager.silent, manager.resting, manager.decode_kv_args_table)
    assert all(set(table) == left for table in tables)


def test_a_rank_whose_endpoint_is_anothers_fails_its_rooms_and_is_forgotten(manager, listening):
    """It seems to answer: who does is the other."""
    _, port = listening()
    manager.register("a", port)
    manager.transfer_infos = {1: {"a": None}, 2: {"b": None}}
    manager.register("b", port)
    assert awaited(lambda: "a" not in manager.met, PATIENCE, 0.01)
    assert manager.failed == [(1, f"decode 127.0.0.1:{port} is another process by now")]
    assert manager.dropped == ["a"] and set(manager.decode_kv_args_table) == {"b"}
    assert not (manager.replaced or manager.silent or manager.resting)
    manager.register("b", port)
    manager.look_at_peers()
    assert set(manager.met) == {"b"} and not manager.silent


def test_a_manager_that_is_gone_is_not_kept(monkeypatch, listening):
    _, port = listening()
    manager = Manager()
    manager.register("a", port)
    time.sleep(1.2)
    manager = weakref.ref(manager)
    assert awaited(lambda: gc.collect() >= 0 and manager() is None, PATIENCE, 0.05)


@pytest.mark.parametrize("value", ["soon", "4.9", "-1", "inf", "nan"])
def test_a_time_that_is_none_ends_the_start(monkeypatch, value):
    monkeypatch.setenv(VARIABLE, value)
    with pytest.raises(ValueError, match=f"{VARIABLE} is '{value}'; it takes seconds, 5 or more"):
        Manager()


def test_a_time_by_a_variable(monkeypatch):
    monkeypatch.delenv("PD_SOME_SECONDS", raising=False)
    assert seconds_of("PD_SOME_SECONDS", 3.0, 1.0) == 3.0
    monkeypatch.setenv("PD_SOME_SECONDS", "7.5")
    assert seconds_of("PD_SOME_SECONDS", 3.0, 1.0) == 7.5
