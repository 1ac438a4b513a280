"""Sockets between ranks: threads share them, sends never block, and silence is detected."""

import math
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import zmq
from sglang.srt.disaggregation.pd import peer_sockets
from sglang.srt.disaggregation.pd.peer_sockets import PeerSocket, open_sockets

from pd_harness.polling import is_in_time, wait_until
from pd_harness.ports import free_ports

pytestmark = pytest.mark.engine

HOST, PATIENCE = "127.0.0.1", 15.0
# Prints its port, then each message that it receives, forever.
PEER = """
import sys, zmq
sock = zmq.Context.instance().socket(zmq.PULL)
print(sock.bind_to_random_port("tcp://127.0.0.1"), flush=True)
while True:
    print(sock.recv().decode(), flush=True)
"""


@pytest.fixture(autouse=True)
def fresh_sockets(monkeypatch):
    """Gives each test its own pool of sockets."""
    sockets = peer_sockets._SocketPool()
    monkeypatch.setattr(peer_sockets, "_sockets", sockets)
    yield
    with sockets.lock:
        for known in sockets.open.values():
            known.close(linger=0)
        sockets.open.clear()
    if sockets.context is not None:
        sockets.context.term()


@pytest.fixture
def peer_process():
    """A peer's process, and our socket to it."""
    process = subprocess.Popen([sys.executable, "-c", PEER], stdout=subprocess.PIPE, text=True)
    yield process, PeerSocket.to(HOST, int(process.stdout.readline()))
    process.kill()
    process.wait()


def connect(sock: zmq.Socket, port: int) -> PeerSocket:
    """Our socket to a peer in this process, which has received a message over it."""
    peer = PeerSocket.to(HOST, port)
    peer.send_multipart([b"before"])
    assert sock.recv() == b"before"
    return peer


def test_threads_share_one_socket_per_endpoint(listen):
    sock, port = listen()
    senders, each = 8, 100

    def send(sender: int) -> None:
        for number in range(each):
            PeerSocket.to(HOST, port).send_multipart([b"%d" % sender, b"%d" % number])

    threads = [threading.Thread(target=send, args=(sender,)) for sender in range(senders)]
    for thread in threads:
        thread.start()
    got = [tuple(map(int, sock.recv_multipart())) for _ in range(senders * each)]
    assert sorted(got) == [(s, n) for s in range(senders) for n in range(each)]
    for sender in range(senders):
        assert [n for s, n in got if s == sender] == list(range(each))  # in order
    assert open_sockets() == [f"tcp://{HOST}:{port}"]


def test_send_to_unreachable_peer_does_not_block(listen, monkeypatch):
    monkeypatch.setattr(peer_sockets, "MAX_QUEUED_MESSAGES", 1000)
    gone, port = listen()
    gone.close(linger=0)
    start = time.monotonic()
    with pytest.raises(zmq.Again):
        for _ in range(10_000):
            PeerSocket.to(HOST, port).send_multipart([b"x"])
    assert time.monotonic() - start < 2


def test_messages_sent_before_the_peer_listens_arrive(listen):
    gone, port = listen()
    gone.close(linger=0)
    peer = PeerSocket.to(HOST, port)
    for number in range(3000):  # the engine's sockets lose all once refused
        peer.send_multipart([b"%d" % number])
    assert wait_until(lambda: peer.silent_for() > 0.3, PATIENCE)
    late, _ = listen(port)
    assert [int(late.recv()) for _ in range(3000)] == list(range(3000))
    assert wait_until(lambda: peer.silent_for() == 0, PATIENCE)


def test_sockets_of_lost_peers_are_closed(listen, monkeypatch):
    (gone, port), kept = listen(), listen()
    first, second = connect(gone, port), connect(*kept)
    gone.close(linger=0)
    assert wait_until(lambda: first.silent_for() > 0, PATIENCE)
    assert open_sockets() == [first.endpoint, second.endpoint]
    monkeypatch.setattr(peer_sockets, "CLOSE_AFTER_SECONDS", 0.0)
    assert wait_until(lambda: open_sockets() == [second.endpoint], PATIENCE)
    assert 0 < first.silent_for() < PATIENCE  # closing the socket does not reset it
    again, _ = listen(port)
    first.send_multipart([b"after"])
    assert again.recv() == b"after"


def test_peer_without_a_socket_counts_as_always_silent():
    assert PeerSocket.to(HOST, 1).silent_for() == math.inf


@pytest.mark.parametrize("stops", [signal.SIGKILL, signal.SIGSTOP])
def test_killed_or_suspended_peer_is_silent(peer_process, stops):
    process, peer = peer_process
    peer.send_multipart([b"one"])
    assert process.stdout.readline() == "one\n"
    assert peer.silent_for() == 0
    os.kill(process.pid, stops)
    stopped = time.monotonic()
    assert wait_until(lambda: peer.silent_for() > 0, PATIENCE)
    took = time.monotonic() - stopped
    assert took < (1 if stops == signal.SIGKILL else 7), took
    # Also while the system accepts connections for a suspended process.
    assert wait_until(lambda: peer.silent_for() > 3, PATIENCE)
    if stops == signal.SIGSTOP:
        peer.send_multipart([b"two"])
        os.kill(process.pid, signal.SIGCONT)
        assert process.stdout.readline() == "two\n"
        assert wait_until(lambda: peer.silent_for() == 0, PATIENCE)


def test_error_of_one_check_does_not_end_the_others(listen, monkeypatch, caplog):
    """Without its thread, no silent peer would ever be noticed."""
    _, port = listen()
    checks, errors = [], [zmq.ZMQError(zmq.ENOTSOCK)]
    read = peer_sockets._SocketPool._read_events

    def fail_once(pool):
        checks.append(None)
        if errors:
            raise errors.pop()
        read(pool)

    monkeypatch.setattr(peer_sockets._SocketPool, "_read_events", fail_once)
    peer = PeerSocket.to(HOST, port)
    peer.open()
    assert wait_until(lambda: len(checks) > 2, PATIENCE)
    assert "Could not check the connections to peers" in caplog.text
    assert wait_until(lambda: peer.silent_for() == 0, PATIENCE)


def test_connection_that_was_never_established_is_not_lost(listen):
    never = PeerSocket.to(HOST, *free_ports(1))
    never.open()
    gone, port = listen()
    peer = connect(gone, port)
    assert peer.lost_for() == 0
    gone.close(linger=0)
    assert wait_until(lambda: peer.lost_for() > 0, PATIENCE)
    assert never.silent_for() > 0 and never.lost_for() == 0


def test_slow_callback_does_not_count_as_suspension(listen, monkeypatch):
    """A lost peer would count as back each time that another delays the callback."""
    monkeypatch.setattr(peer_sockets, "SUSPENDED_SECONDS", 1.0)
    gone, port = listen()
    peer = connect(gone, port)
    seen: list[float] = []

    class Watcher:
        def check(self) -> None:
            seen.append(peer.silent_for())
            time.sleep(1.2)

    watcher = Watcher()
    peer_sockets.call_periodically(watcher.check)
    gone.close(linger=0)
    assert wait_until(lambda: seen and seen[-1] > 3, 2 * PATIENCE)
    assert sorted(seen) == seen
    del watcher


def test_thread_that_cannot_start_is_an_error_of_the_socket(no_threads, monkeypatch):
    """Schedulers expect such errors, and fail one request."""
    monkeypatch.setattr(peer_sockets, "_sockets", peer_sockets._SocketPool())
    peer = PeerSocket.to(HOST, *free_ports(1))
    for use in (peer.open, lambda: peer.send_multipart([b"one"])):
        with no_threads(), pytest.raises(zmq.ZMQError, match="thread"):
            use()
    peer.open()
    assert peer_sockets.open_sockets() == [peer.endpoint]


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:70000", f"tcp://{'a' * 70}.b:80"])
def test_invalid_endpoint_is_not_listening(endpoint):
    assert not PeerSocket(endpoint).is_listening()


def test_suspension_of_this_process_does_not_count_as_silence(listen, monkeypatch):
    """Otherwise all requests of a peer would fail that had just lost its connection."""
    monkeypatch.setattr(peer_sockets, "SUSPENDED_SECONDS", 1.0)
    gone, port = listen()
    peer = connect(gone, port)
    gone.close(linger=0)
    assert wait_until(lambda: peer.silent_for() > 0, PATIENCE)
    seen, noted = [], threading.Event()

    class Watcher:
        def check(self) -> None:
            if noted.is_set():
                seen.append(peer.silent_for())

    watcher = Watcher()
    peer_sockets.call_periodically(watcher.check)
    with peer_sockets._sockets.lock:  # blocks the periodic check
        noted.set()
        time.sleep(3)
    assert wait_until(lambda: seen, PATIENCE)
    assert seen[0] < 1, seen
    assert wait_until(lambda: seen[-1] > 1.5, PATIENCE)  # the peer is silent all the same


def test_listening_is_known_at_once(listen):
    """Without a connection of our own, and no thread has to notice that the peer is gone."""
    sock, port = listen()
    peer = PeerSocket.to("127.0.0.1", port)
    assert peer.is_listening()
    sock.close(linger=0)
    assert wait_until(lambda: not peer.is_listening(), PATIENCE)
    assert not open_sockets()


def test_listening_check_does_not_wait_for_an_unresponsive_host(unresponsive_port):
    started_at = time.monotonic()
    assert not PeerSocket.to("127.0.0.1", unresponsive_port).is_listening()
    assert is_in_time(time.monotonic() - started_at, 0.05)
