"""Sockets between ranks: shared by threads, never waited for, closed when nobody may be there."""

import threading
import time

import pytest
import zmq
from sglang.srt.disaggregation.pd import messages
from sglang.srt.disaggregation.pd.messages import PeerSocket

pytestmark = pytest.mark.engine

ARRIVAL_MS = 10_000


@pytest.fixture
def open_sockets(monkeypatch):
    """The endpoints whose sockets are open, which here are none of another test."""
    sockets = {}
    monkeypatch.setattr(PeerSocket, "_open", sockets)
    yield sockets
    for sock, _ in sockets.values():
        sock.close(linger=0)


@pytest.fixture
def peer():
    """A function that makes a peer: its socket and its endpoint."""
    made = []

    def make() -> tuple[zmq.Socket, str]:
        sock = zmq.Context.instance().socket(zmq.PULL)
        sock.setsockopt(zmq.RCVTIMEO, ARRIVAL_MS)
        made.append(sock)
        port = sock.bind_to_random_port("tcp://127.0.0.1")
        return sock, f"tcp://127.0.0.1:{port}"

    yield make
    for sock in made:
        sock.close(linger=0)


def test_one_socket_for_an_endpoint(open_sockets, peer):
    sock, endpoint = peer()
    for number in (b"1", b"2"):
        PeerSocket(endpoint).send_multipart([number, b"more"])
        assert sock.recv_multipart() == [number, b"more"]
    assert list(open_sockets) == [endpoint]


def test_long_unused_ones_are_closed_when_another_is_opened(open_sockets, peer):
    (one, first), (other, second), (_, third) = peer(), peer(), peer()
    for endpoint in (first, second):
        PeerSocket(endpoint).send_multipart([b"before"])
    old, _ = open_sockets[first]
    for endpoint in (first, second):
        sock, used = open_sockets[endpoint]
        open_sockets[endpoint] = (sock, used - messages.IDLE_SECONDS - 1)
    PeerSocket(second).send_multipart([b"after"])  # is in use again
    PeerSocket(third).send_multipart([b"x"])
    assert set(open_sockets) == {second, third}
    assert old.closed
    PeerSocket(first).send_multipart([b"after"])
    # The first peer reads from two connections, the old one and the new, in either order.
    assert {one.recv(), one.recv()} == {b"before", b"after"}
    assert [other.recv(), other.recv()] == [b"before", b"after"]


def test_threads_share_a_socket(open_sockets, peer):
    sock, endpoint = peer()
    senders, each = 8, 100

    def send(sender: int) -> None:
        for number in range(each):
            PeerSocket(endpoint).send_multipart([b"%d" % sender, b"%d" % number])

    threads = [threading.Thread(target=send, args=(sender,)) for sender in range(senders)]
    for thread in threads:
        thread.start()
    got = [tuple(map(int, sock.recv_multipart())) for _ in range(senders * each)]
    assert sorted(got) == [(s, n) for s in range(senders) for n in range(each)]
    for sender in range(senders):
        assert [n for s, n in got if s == sender] == list(range(each))  # in order
    assert len(open_sockets) == 1


def test_a_peer_that_takes_nothing_makes_nobody_wait(open_sockets, peer):
    gone, endpoint = peer()
    gone.close(linger=0)
    start = time.monotonic()
    with pytest.raises(zmq.Again):
        for _ in range(10_000):
            PeerSocket(endpoint).send_multipart([b"x"])
    assert time.monotonic() - start < 2


def bound() -> tuple[int, zmq.Socket]:
    """A port and its socket, as the engine binds them."""
    sock = zmq.Context.instance().socket(zmq.PULL)
    sock.setsockopt(zmq.RCVHWM, 5)
    return sock.bind_to_random_port("tcp://127.0.0.1"), sock


def again(port: int, sock: zmq.Socket) -> tuple[int, zmq.Socket]:
    return messages.bind_again(sock)


def test_a_socket_bound_again_hangs_up_on_a_frame_above_the_limit(monkeypatch):
    monkeypatch.setattr(messages, "MAX_FRAME_BYTES", 1000)
    for limits, arrives in ((lambda port, sock: (port, sock), True), (again, False)):
        port, sock = limits(*bound())
        sock.setsockopt(zmq.RCVTIMEO, ARRIVAL_MS)
        with zmq.Context.instance().socket(zmq.PUSH) as peer, sock:
            peer.setsockopt(zmq.LINGER, 0)
            monitor = peer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            peer.connect(f"tcp://127.0.0.1:{port}")
            peer.send_multipart([b"x" * 1000])
            assert sock.recv_multipart() == [b"x" * 1000]
            peer.send_multipart([b"x" * 1001])
            if arrives:
                assert sock.recv_multipart() == [b"x" * 1001]
            else:
                assert monitor.poll(ARRIVAL_MS), "a frame above the limit was taken"
            peer.disable_monitor()


def test_a_socket_is_bound_again_to_a_port_of_its_own():
    port, sock = bound()
    other_port, other = messages.bind_again(sock)
    with other:
        assert sock.closed and not other.closed
        assert other_port != port
        endpoint = other.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").decode("ascii")
        assert endpoint == f"tcp://127.0.0.1:{other_port}"
        assert other.getsockopt(zmq.MAXMSGSIZE) == messages.MAX_FRAME_BYTES
        assert other.getsockopt(zmq.TYPE) == zmq.PULL and other.getsockopt(zmq.RCVHWM) == 5
        with pytest.raises(zmq.ZMQError, match="in use"):
            zmq.Context.instance().socket(zmq.PULL).bind(endpoint)
