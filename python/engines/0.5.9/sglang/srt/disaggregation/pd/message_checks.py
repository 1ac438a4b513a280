"""The sockets on which ranks read, which survive whatever peers send."""

from __future__ import annotations

import logging
import struct
import threading
from collections.abc import Callable, Sequence

import zmq

logger = logging.getLogger(__name__)

# A larger frame ends its connection; a million page numbers are 4 MB.
MAX_FRAME_BYTES = 64 << 20
MAX_FRAMES = 32
# Pointers and lengths in one frame, which take ten times as much once parsed; a rank has thousands.
MAX_NUMBERS_BYTES = 1 << 20


def start_reader_thread(
    sock: zmq.Socket,
    handle: Callable[[list[bytes]], None],
    dropped: Callable[[], None] = lambda: None,
) -> None:
    """Starts a thread that passes each message to `handle`, and drops one if `handle` raises.

    Args:
        dropped: Called for each message that is dropped.
    """

    def serve() -> None:
        while True:
            frames = sock.recv_multipart()
            try:
                if len(frames) > MAX_FRAMES:
                    raise ValueError(f"more than {MAX_FRAMES} frames")
                handle(frames)
            except Exception as error:
                # Some errors contain the whole frame.
                why = f"{type(error).__name__}: {str(error)[:300]}"
                logger.error(f"Dropped a message of {len(frames)} frames: {why}")
                dropped()

    threading.Thread(target=serve, daemon=True).start()


def pack_numbers(code: str, numbers: Sequence[int]) -> bytes:
    """Packs numbers into one frame, all in one `struct` format."""
    return struct.pack(f"{len(numbers)}{code}", *numbers)


def check_numbers(*frames: bytes) -> None:
    """Raises ValueError if one of these frames of numbers is longer than any rank's pointers."""
    for frame in frames:
        if len(frame) > MAX_NUMBERS_BYTES:
            raise ValueError(f"{len(frame)} bytes of numbers, expected at most {MAX_NUMBERS_BYTES}")


def rebind_with_limits(sock: zmq.Socket) -> tuple[int, zmq.Socket]:
    """Replaces a socket, whose port is unpublished, by one with the limits above and a new port.

    ZeroMQ applies a limit only when it binds, and another process might take the old port once it
    is released. Returns the new port and socket.
    """
    address = sock.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").decode("ascii").rpartition(":")[0]
    limited = sock.context.socket(sock.getsockopt(zmq.TYPE))
    for option in (zmq.IPV6, zmq.RCVHWM, zmq.RCVBUF):
        limited.setsockopt(option, sock.getsockopt(option))
    limited.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    port = limited.bind_to_random_port(address)
    sock.close(linger=0)
    return port, limited
