"""Sockets between prefill and decode ranks that survive what peers send and when peers die."""

from __future__ import annotations

import logging
import struct
import threading
import time
from typing import Callable, Dict, List, Tuple

import zmq

logger = logging.getLogger(__name__)

# A frame above this ends its connection; a million page numbers are 4 MB.
MAX_FRAME_BYTES = 64 << 20
MAX_FRAMES = 32
# Of pointers and lengths, which take ten times as much once they are read; a rank has thousands.
MAX_NUMBERS_BYTES = 1 << 20
LINGER_MS = 5000
IDLE_SECONDS = 60.0


def read_messages(sock: zmq.Socket, take: Callable[[List[bytes]], None]) -> None:
    """Start a thread that gives each message to `take`; one that it cannot read is dropped."""

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


def bind_again(sock: zmq.Socket) -> Tuple[int, zmq.Socket]:
    """Another socket of this kind on that address with the limits above, and its port.

    For one that nobody knows yet: ZeroMQ takes a limit over when it binds, and a port that is given
    up to be bound again may be another's by then.
    """
    address = sock.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").decode("ascii").rpartition(":")[0]
    limited = sock.context.socket(sock.getsockopt(zmq.TYPE))
    for option in (zmq.IPV6, zmq.RCVHWM, zmq.RCVBUF):
        limited.setsockopt(option, sock.getsockopt(option))
    limited.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    port = limited.bind_to_random_port(address)
    sock.close(linger=0)
    return port, limited


class PeerSocket:
    """Sends to one endpoint, from any thread; it never waits.

    An endpoint has one ZeroMQ socket. When another endpoint's is opened, those that nothing was
    sent over for `IDLE_SECONDS` are closed: nobody says when a decode rank has died. A live one's
    is opened again when it is needed.
    """

    _lock = threading.Lock()
    # The socket and when it was used last.
    _open: Dict[str, Tuple[zmq.Socket, float]] = {}

    def __init__(self, endpoint: str, is_ipv6: bool = False):
        self.endpoint, self.is_ipv6 = endpoint, is_ipv6

    def send_multipart(self, frames: List[bytes]) -> None:
        """Hand over a message, also before the peer is connected.

        Raises:
            zmq.Again: The peer takes none, and a thousand wait for it already.
        """
        with self._lock:
            now = time.monotonic()
            sock, _ = self._open.get(self.endpoint) or (self._make(now), now)
            self._open[self.endpoint] = (sock, now)
            sock.send_multipart(frames, zmq.NOBLOCK)

    def _make(self, now: float) -> zmq.Socket:
        for endpoint, (sock, used) in list(self._open.items()):
            if now - used > IDLE_SECONDS:
                sock.close()
                del self._open[endpoint]
        sock = zmq.Context.instance().socket(zmq.PUSH)
        sock.setsockopt(zmq.IPV6, int(self.is_ipv6))
        sock.setsockopt(zmq.LINGER, LINGER_MS)
        sock.connect(self.endpoint)
        return sock
