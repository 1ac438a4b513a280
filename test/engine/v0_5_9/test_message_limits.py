"""The sockets on which ranks read: an oversized message closes its connection."""

import pytest
import zmq
from sglang.srt.disaggregation.pd import message_checks

pytestmark = pytest.mark.engine

ARRIVAL_MS = 10_000


def bind_like_the_engine() -> tuple[int, zmq.Socket]:
    """A port and its socket, as the engine binds them."""
    sock = zmq.Context.instance().socket(zmq.PULL)
    sock.setsockopt(zmq.RCVHWM, 5)
    return sock.bind_to_random_port("tcp://127.0.0.1"), sock


def rebind(port: int, sock: zmq.Socket) -> tuple[int, zmq.Socket]:
    return message_checks.rebind_with_limits(sock)


def test_rebound_socket_disconnects_on_an_oversized_frame(monkeypatch):
    monkeypatch.setattr(message_checks, "MAX_FRAME_BYTES", 1000)
    for limits, arrives in ((lambda port, sock: (port, sock), True), (rebind, False)):
        port, sock = limits(*bind_like_the_engine())
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


def test_rebound_socket_has_a_port_of_its_own():
    port, sock = bind_like_the_engine()
    other_port, other = message_checks.rebind_with_limits(sock)
    with other:
        assert sock.closed and not other.closed
        assert other_port != port
        endpoint = other.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").decode("ascii")
        assert endpoint == f"tcp://127.0.0.1:{other_port}"
        assert other.getsockopt(zmq.MAXMSGSIZE) == message_checks.MAX_FRAME_BYTES
        assert other.getsockopt(zmq.TYPE) == zmq.PULL and other.getsockopt(zmq.RCVHWM) == 5
        with pytest.raises(zmq.ZMQError, match="in use"):
            zmq.Context.instance().socket(zmq.PULL).bind(endpoint)
