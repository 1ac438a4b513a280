"""The sockets on which ranks read, which survive what peers send."""

from __future__ import annotations

import logging
import struct
import threading
from typing import Callable, List, Tuple

import zmq

logger = logging.getLogger(__name__)

# A frame above this ends its connection; a million page numbers are 4 MB.
MAX_FRAME_BYTES = 64 << 20
MAX_FRAMES = 32
# Of pointers and lengths, which take ten times as much once they are read; a rank has thousands.
MAX_NUMBERS_BYTES = 1 << 20


def start_reader_thread(sock: zmq.Socket, handle: Callable[[List[bytes]], None]) -> None:
    """Start a thread that gives each message to `take`; one that it cannot read is dropped."""

    def serve() -> None:
        while True:
            frames = sock.recv_multipart()
            try:
                if len(frames) > MAX_FRAMES:
                    raise ValueError(f"at most {MAX_FRAMES} frames are read")
                handle(frames)
            except Exception as error:
                # Some errors hold the whole frame.
                why = f"{type(error).__name__}: {str(error)[:300]}"
                logger.error(f"Dropped a message of {len(frames)} frames: {why}")

    threading.Thread(target=serve, daemon=True).start()


def unpack_numbers(code: str, frame: bytes) -> List[int]:
    """A frame's numbers, of one kind of `struct`.

    Raises:
        ValueError: The frame is longer than any rank's pointers; struct.error if it is cut off.
    """
    if len(frame) > MAX_NUMBERS_BYTES:
        raise ValueError(f"{len(frame)} bytes of numbers; at most {MAX_NUMBERS_BYTES} are read")
    return [number for (number,) in struct.iter_unpack(code, frame)]


def rebind_with_limits(sock: zmq.Socket) -> Tuple[int, zmq.Socket]:
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
