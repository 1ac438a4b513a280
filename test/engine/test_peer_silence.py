"""Detects silent decode ranks and their return, over real sockets and with a fake manager."""

import gc
import inspect
import time
import weakref
from types import SimpleNamespace

import pytest
from sglang.srt.disaggregation.pd import local_layout, peer_silence, peer_sockets
from sglang.srt.disaggregation.pd.environment import seconds_of
from sglang.srt.disaggregation.pd.peer_silence import VARIABLE, SilenceWatch

from pd_harness.polling import wait_until

pytestmark = pytest.mark.engine

PATIENCE = 10.0


class Manager(SilenceWatch):
    def __init__(self):
        self.transfer_infos, self.decode_kv_args_table = {}, {}
        self.failed, self.recovered, self.released, self.dropped = [], [], [], []
        self.is_writing = False

    def fail_room_of_silent_peer(self, room: int, reason: str) -> None:
        self.failed.append((room, reason))
        self.transfer_infos.pop(room)

    def handle_peer_recovered(self, name: str) -> None:
        self.recovered.append(name)

    def register(self, name: str, port: int) -> SimpleNamespace:
        info = SimpleNamespace(endpoint="127.0.0.1", dst_port=port)
        self.decode_kv_args_table[name] = info
        self.watch_peer(name, info)
        return info

    def release_peer(self, name: str) -> bool:
        if not self.is_writing:
            self.released.append(name)
        return not self.is_writing

    def drop_peer(self, name: str) -> None:
        self.dropped.append(name)


@pytest.fixture
def manager(monkeypatch):
    """A manager for which a rank is silent after a second without a connection."""
    monkeypatch.setattr(peer_silence, "MIN_SECONDS", 1.0)
    monkeypatch.setenv(VARIABLE, "1")
    return Manager()


def becomes_silent(manager) -> bool:
    return wait_until(lambda: "a" in manager.silent_peers, PATIENCE)


def test_silent_rank_fails_only_its_own_rooms(manager, listen):
    (gone, first), (_, second) = listen(), listen()
    manager.register("a", first)
    manager.register("b", second)
    manager.transfer_infos = {1: {"a": None}, 2: {"b": None}, 3: {"b": None, "a": None}}
    time.sleep(1.5)
    assert not manager.silent_peers and not manager.failed
    gone.close(linger=0)
    begun = time.monotonic()
    assert wait_until(lambda: len(manager.failed) == 2, PATIENCE)
    assert 0.9 < time.monotonic() - begun < 4
    assert sorted(room for room, _ in manager.failed) == [1, 3]
    assert manager.silence_reason(2) == ""
    manager.transfer_infos[4] = {"b": None, "a": None}
    assert f"decode 127.0.0.1:{first} has not answered for 1 s" in manager.failed[0][1]
    assert VARIABLE in manager.silence_reason(4)


def test_silent_rank_that_answers_again_is_served(manager, listen):
    gone, port = listen()
    manager.register("a", port)
    time.sleep(0.2)
    gone.close(linger=0)
    assert becomes_silent(manager)
    assert manager.recovered == []
    listen(port)
    assert wait_until(lambda: not manager.silent_peers, PATIENCE)
    assert manager.recovered == ["a"]
    manager.transfer_infos[1] = {"a": None}
    time.sleep(1.2)
    assert manager.silence_reason(1) == "" and not manager.failed


def test_silent_rank_that_registers_elsewhere_is_served_at_once(manager, listen):
    """The rank is served before the next check; its first endpoint has never answered."""
    gone, nowhere = listen()
    gone.close(linger=0)
    manager.register("a", nowhere)
    assert becomes_silent(manager)
    _, port = listen()
    manager.register("a", port)
    assert "a" not in manager.silent_peers


def test_message_ends_silence_before_the_rank_is_connected(manager, listen, monkeypatch):
    """The message gives the rank another second, even if its socket has been closed by then."""
    gone, port = listen()
    info = manager.register("a", port)
    time.sleep(0.2)
    gone.close(linger=0)
    monkeypatch.setattr(peer_sockets, "CLOSE_AFTER_SECONDS", 0.0)
    assert becomes_silent(manager)
    endpoint = f"tcp://127.0.0.1:{port}"
    assert wait_until(lambda: endpoint not in peer_sockets.open_sockets(), PATIENCE)
    time.sleep(1.2)
    assert "a" in manager.silent_peers  # no message has come
    monkeypatch.setattr(peer_sockets, "CLOSE_AFTER_SECONDS", 60.0)
    manager.note_peer_alive("a", info)
    assert not manager.silent_peers and manager.recovered == ["a"]
    assert becomes_silent(manager)


def test_rank_that_is_being_registered_is_not_silent(manager, listen):
    """Registering may take a while, during which prefill has no socket to the rank."""
    _, port = listen()
    manager.register("a", port)
    manager.transfer_infos[1] = {"b": None}
    manager.check_peers()
    assert manager.silence_reason(1) == "" and not manager.failed


def check_silent(manager, monkeypatch, seconds: dict[int, float]) -> None:
    """Checks the peers as if each of these ports had been silent for its number of seconds."""
    by_endpoint = {f"tcp://127.0.0.1:{port}": since for port, since in seconds.items()}
    monkeypatch.setattr(
        peer_sockets.PeerSocket, "silent_for", lambda self: by_endpoint.get(self.endpoint, 0.0)
    )
    manager.check_peers()


def test_long_silent_rank_is_released_once_and_may_come_back(manager, monkeypatch):
    for name, port in (("a", 1), ("b", 2)):
        manager.register(name, port)
    check_silent(manager, monkeypatch, {1: peer_silence.RELEASE_AFTER_SECONDS - 1})
    assert set(manager.silent_peers) == {"a"} and not manager.released
    for _ in range(2):
        check_silent(manager, monkeypatch, {1: peer_silence.RELEASE_AFTER_SECONDS})
        assert manager.released == ["a"] and set(manager.decode_kv_args_table) == {"a", "b"}
    check_silent(manager, monkeypatch, {})
    assert manager.recovered == ["a"] and not manager.released_peers
    check_silent(manager, monkeypatch, {1: peer_silence.RELEASE_AFTER_SECONDS})
    assert manager.released == ["a", "a"] and not manager.dropped
    with monkeypatch.context() as heard:
        heard.setattr(peer_sockets.PeerSocket, "silent_for", lambda self: 0.0)
        manager.register("a", 1)
        assert not manager.released_peers and not manager.silent_peers


def test_rank_with_a_room_or_a_running_write_is_not_released(manager, monkeypatch):
    manager.register("a", 1)
    manager.fail_room_of_silent_peer = lambda room, reason: None
    manager.transfer_infos = {5: {"b": None, "a": None}}
    check_silent(manager, monkeypatch, {1: 9e9})
    assert not manager.released
    manager.transfer_infos, manager.is_writing = {}, True
    manager.check_peers()
    assert not manager.released_peers
    manager.is_writing = False
    manager.check_peers()
    assert manager.released_peers == {"a"}


def test_longest_silent_ranks_are_dropped_beyond_the_maximum(manager, monkeypatch):
    """All their entries are dropped: each restart of a decode server leaves a name behind."""
    monkeypatch.setattr(peer_silence, "MAX_RELEASED_PEERS", 3)
    ports = range(1, 6)
    for port in ports:
        manager.register(f"rank {port}", port)
    manager.fail_room_of_silent_peer = lambda room, reason: None
    manager.transfer_infos = {5: {"rank 5": None}}
    check_silent(manager, monkeypatch, {port: 1000.0 + port for port in ports})
    assert manager.dropped == ["rank 4"]
    manager.transfer_infos.clear()
    manager.check_peers()
    assert manager.dropped == ["rank 4", "rank 5"]
    for table in ("watched_peers", "silent_peers", "released_peers", "decode_kv_args_table"):
        assert set(getattr(manager, table)) == {"rank 1", "rank 2", "rank 3"}, table


def test_released_rank_that_requests_a_room_is_not_dropped(manager, monkeypatch):
    """The room still needs its registration."""
    manager.register("a", 1)
    check_silent(manager, monkeypatch, {1: 9e9})
    assert manager.released_peers == {"a"}
    monkeypatch.setattr(peer_silence, "MAX_RELEASED_PEERS", 0)
    manager.fail_room_of_silent_peer = lambda room, reason: None
    manager.transfer_infos = {5: {"a": None}}
    manager.check_peers()
    assert not manager.dropped and set(manager.decode_kv_args_table) == {"a"}
    manager.transfer_infos.clear()
    manager.check_peers()
    assert manager.dropped == ["a"] and not manager.decode_kv_args_table


def test_replaced_rank_fails_its_rooms_and_is_dropped(manager, listen):
    """The replaced rank seems to answer, but its replacement at the same endpoint does."""
    _, port = listen()
    manager.register("a", port)
    manager.transfer_infos = {1: {"a": None}, 2: {"b": None}}
    manager.register("b", port)
    assert wait_until(lambda: "a" not in manager.watched_peers, PATIENCE)
    assert manager.failed == [(1, f"decode 127.0.0.1:{port} was replaced by another process")]
    assert manager.dropped == ["a"] and set(manager.decode_kv_args_table) == {"b"}
    assert not (manager.replaced_peers or manager.silent_peers or manager.released_peers)
    manager.register("b", port)
    manager.check_peers()
    assert set(manager.watched_peers) == {"b"} and not manager.silent_peers


def test_silence_watch_does_not_keep_a_manager_alive(monkeypatch, listen):
    _, port = listen()
    manager = Manager()
    manager.register("a", port)
    time.sleep(1.2)
    manager = weakref.ref(manager)
    assert wait_until(lambda: gc.collect() >= 0 and manager() is None, PATIENCE)


@pytest.mark.parametrize("value", ["soon", "4.9", "-1", "inf", "nan"])
def test_invalid_silence_seconds_are_refused_at_startup(monkeypatch, value):
    """Not by the thread that reads them first, whose failure would go unnoticed."""
    monkeypatch.setenv(VARIABLE, value)
    parameters = inspect.signature(local_layout.set_local_layout).parameters
    with pytest.raises(ValueError, match=f"{VARIABLE} is '{value}'; expected 5 seconds or more"):
        local_layout.set_local_layout(*[None] * len(parameters))


def test_seconds_from_an_environment_variable(monkeypatch):
    monkeypatch.delenv("PD_SOME_SECONDS", raising=False)
    assert seconds_of("PD_SOME_SECONDS", 3.0, 1.0) == 3.0
    monkeypatch.setenv("PD_SOME_SECONDS", "7.5")
    assert seconds_of("PD_SOME_SECONDS", 3.0, 1.0) == 7.5
