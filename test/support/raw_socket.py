"""A connection to a rank's ZeroMQ socket on which a test sends arbitrary messages."""

from __future__ import annotations

import contextlib
import socket
import threading

import zmq
from fleet import HOST, Rank
from zmq.utils.monitor import recv_monitor_message

Message = list[bytes]
DST = [0, 1, 8, 11]
FIRST_MARKER_ROOM = 5_906_138_274
FRAME_LIMIT = 64 << 20


class RawSocket:
    """One connection to a rank's socket; messages arrive in order."""

    def __init__(self, rank: Rank):
        self.rank = rank
        self.endpoint = f"tcp://{HOST}:{rank.call('health')['port']}"
        self.sock = self.connect()

    def connect(self) -> zmq.Socket:
        sock = zmq.Context.instance().socket(zmq.PUSH)
        sock.setsockopt(zmq.SNDTIMEO, 30_000)
        sock.setsockopt(zmq.LINGER, 0)
        sock.connect(self.endpoint)
        return sock

    def send(self, messages: list[Message]) -> None:
        for message in messages:
            self.sock.send_multipart(message)

    @contextlib.contextmanager
    def sending(self, messages: list[Message]):
        """Sends the messages while the block runs."""
        thread = threading.Thread(target=self.send, args=(messages,))
        thread.start()
        try:
            yield
        finally:
            thread.join()

    def await_read(self, room: int, conclusion: Message) -> None:
        """Sends a message that ends this room, and waits until the rank has read it."""
        self.rank.call("expect_status", room=room)
        self.send([conclusion])
        assert self.rank.call("await_status", room=room, seconds=30) == {"state": "ended"}

    def send_oversized(self) -> None:
        """Sends a frame above the limit, and asserts that the rank disconnects."""
        with self.connect() as sock:
            monitor = sock.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            sock.send_multipart([b"GuardMessage", b"x" * (FRAME_LIMIT + 1)])
            assert monitor.poll(10_000), "a frame above the limit was taken"
            recv_monitor_message(monitor)
            sock.disable_monitor()

    def send_non_zmq_bytes(self) -> None:
        """Sends bytes that are not ZeroMQ's protocol, on connections of their own."""
        for garbage in (
            b"GET / HTTP/1.1\r\n\r\n",
            b"\x16\x03\x01\x02\0" + b"\xff" * 512,
            b"\0" * 64,
        ):
            with socket.create_connection((HOST, int(self.endpoint.rsplit(":", 1)[1]))) as client:
                client.sendall(garbage)

    def close(self) -> None:
        self.sock.close()


def recorded_messages(rank: Rank, room: int) -> list[Message]:
    answer = rank.call("record_messages", room=room, pages=DST)
    assert isinstance(answer, list), answer
    return [[bytes.fromhex(frame) for frame in message] for message in answer]


def await_read(sock: RawSocket, source: Rank, mark: int, conclusion: int) -> None:
    """Waits until the rank has read all earlier messages of this socket.

    Args:
        source: A rank of the other side, whose message with index `conclusion` ends a room.
        mark: Differs in each call for a rank.
    """
    room = FIRST_MARKER_ROOM + mark
    sock.await_read(room, recorded_messages(source, room)[conclusion])
