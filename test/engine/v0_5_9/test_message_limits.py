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


def test_rebound_socket_disconnects_on_an_oversized_frame(monkeypatch):
    monkeypatch.setattr(message_checks, "MAX_FRAME_BYTES", 1000)
    for is_rebound in (False, True):
        port, sock = bind_like_the_engine()
        if is_rebound:
            port, sock = message_checks.rebind_with_limits(sock)
        sock.setsockopt(zmq.RCVTIMEO, ARRIVAL_MS)
        with zmq.Context.instance().socket(zmq.PUSH) as peer, sock:
            peer.setsockopt(zmq.LINGER, 0)
            monitor = peer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            peer.connect(f"tcp://127.0.0.1:{port}")
            peer.send_multipart([b"x" * 1000])
            assert sock.recv_multipart() == [b"x" * 1000]
            peer.send_multipart([b"x" * 1001])
            if is_rebound:
                assert monitor.poll(ARRIVAL_MS), "a frame above the limit was taken"
            else:
                assert sock.recv_multipart() == [b"x" * 1001]
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
