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
        self.transfer_infos = {}
        self.failed, self.back = [], []

    def fail_silent(self, room: int, reason: str) -> None:
        self.failed.append((room, reason))
        self.transfer_infos.pop(room)

    def is_back(self, name: str) -> None:
        self.back.append(name)

    def register(self, name: str, port: int) -> SimpleNamespace:
        info = SimpleNamespace(endpoint="127.0.0.1", dst_port=port)
        self.meet(name, info)
        return info


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
