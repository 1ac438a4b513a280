"""Sockets between prefill and decode ranks that survive what peers send and when peers die."""

from __future__ import annotations

import logging
import struct
import threading
import time
from typing import Callable, Dict, List

import zmq

logger = logging.getLogger(__name__)

# A frame above this ends its connection; a million page numbers are 4 MB.
MAX_FRAME_BYTES = 64 << 20
MAX_FRAMES = 32
# Of pointers and lengths, which take ten times as much once they are read; a rank has thousands.
MAX_NUMBERS_BYTES = 1 << 20
# For a peer that is gone: its socket takes a thousand messages, and then makes the sender wait.
SEND_MS = 1000
LINGER_MS = 5000
BIND_SECONDS = 5.0


def read_messages(sock: zmq.Socket, take: Callable[[List[bytes]], None]) -> None:
    """Start a thread that gives each message to `take`; one that it cannot read is dropped."""
    _limit_frames(sock)

    def serve() -> None:
        while True:
            frames = sock.recv_multipart()
            try:
                if len(frames) > MAX_FRAMES:
                    raise ValueError(f"at most {MAX_FRAMES} frames are read")
                take(frames)
            except Exception as error:
                # Some errors hold the whole frame.
                why = f"{type(error).__name__}: {str(error)[:300]}"
                logger.error(f"Dropped a message of {len(frames)} frames: {why}")

    threading.Thread(target=serve, daemon=True).start()


def unpacked(code: str, frame: bytes) -> List[int]:
    """A frame's numbers, of one kind of `struct`.

    Raises:
        ValueError: The frame is longer than any rank's pointers; struct.error if it is cut off.
    """
    if len(frame) > MAX_NUMBERS_BYTES:
        raise ValueError(f"{len(frame)} bytes of numbers; at most {MAX_NUMBERS_BYTES} are read")
    return [number for (number,) in struct.iter_unpack(code, frame)]


def _limit_frames(sock: zmq.Socket) -> None:
    """Bind again with the limit, for ZeroMQ takes it over when it binds."""
    endpoint = sock.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").decode("ascii")
    sock.unbind(endpoint)
    sock.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    deadline = time.monotonic() + BIND_SECONDS
    while True:
        try:
            return sock.bind(endpoint)
        except zmq.ZMQError:  # unbinding takes its time
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


class PeerSockets(threading.local):
    """Sockets by endpoint, each thread its own: ZeroMQ's must not be shared."""

    def __init__(self):
        self._sockets: Dict[str, zmq.Socket] = {}

    def get(self, endpoint: str, is_ipv6: bool = False) -> zmq.Socket:
        """A socket that sends to `endpoint`; `zmq.Again` says that the peer takes nothing."""
        if endpoint not in self._sockets:
            sock = zmq.Context.instance().socket(zmq.PUSH)
            sock.setsockopt(zmq.IPV6, int(is_ipv6))
            sock.setsockopt(zmq.SNDTIMEO, SEND_MS)
            sock.setsockopt(zmq.LINGER, LINGER_MS)
            sock.connect(endpoint)
            self._sockets[endpoint] = sock
        return self._sockets[endpoint]
