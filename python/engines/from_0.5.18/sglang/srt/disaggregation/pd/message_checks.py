"""Drops invalid messages, so that they crash no thread."""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable
from typing import List, Optional

import zmq
from sglang.srt.disaggregation.pd.session_ids import port_of

logger = logging.getLogger(__name__)

MAX_FRAMES = 64
MAX_NAME = 256
# Bytes of a registration's frame: once parsed, its pointers take several times as much memory.
MAX_FRAME_BYTES = 4 << 20
# Bytes of NIXL's metadata, which grow with memory ranges and NICs.
MAX_METADATA = 64 << 20
MAX_CHUNKS = 1 << 16
# Messages about staging buffers, and the index of the first frame after their numbers.
STAGING = {b"WATERMARK": 3, b"STAGING_RSP": 6, b"STAGING_REQ": 4}

Frames = List[bytes]


def drop_invalid(
    recv: Callable[[], Optional[Frames]],
    check: Callable[[Frames], Optional[bool]],
    done: Callable[[], None] = lambda: None,
    dropped: Callable[[], None] = lambda: None,
) -> Callable[[], Optional[Frames]]:
    """Returns a function like `recv` that skips messages which `check` handles or rejects.

    Args:
        recv: Returns a message's frames, or None.
        check: Returns True for a message that it has handled; raises for an invalid one.
        done: Called when the engine fetches the next message.
        dropped: Called for each invalid message.
    """

    def recv_valid() -> Optional[Frames]:
        while True:
            done()
            frames = recv()
            if frames is None:
                return None
            try:
                if len(frames) > MAX_FRAMES:
                    raise ValueError(f"more than {MAX_FRAMES} frames")
                if check(frames):
                    continue
                return frames
            except Exception as error:
                # Some errors contain the whole frame.
                why = f"{type(error).__name__}: {str(error)[:300]}"
                logger.error(f"Dropped a message of {len(frames)} frames: {why}")
                dropped()

    return recv_valid


class ValidatingSocket:
    """A socket that skips messages which `check` handles or rejects; see `drop_invalid`."""

    def __init__(
        self,
        sock: zmq.Socket,
        check: Callable[[Frames], Optional[bool]],
        done: Callable[[], None] = lambda: None,
        dropped: Callable[[], None] = lambda: None,
    ):
        self.sock = sock
        self.recv_multipart = drop_invalid(sock.recv_multipart, check, done, dropped)

    def __getattr__(self, name: str):
        return getattr(self.sock, name)


def check_staging_message(frames: Frames, handler: object = True) -> None:
    """Raises ValueError or IndexError for an invalid message about staging buffers.

    Args:
        handler: This rank's staging handler or context; decode's is None until its scheduler has
            created it.
    """
    numbers = [int(frame) for frame in frames[1 : STAGING[frames[0]]]]
    if len(numbers) != STAGING[frames[0]] - 1:
        raise IndexError(f"{len(frames)} frames, expected at least {STAGING[frames[0]]}")
    if frames[0] == b"STAGING_REQ":
        numbers += [int(frame) for frame in frames[5:6]]
        frames = frames[:5]
    if frames[0] != b"WATERMARK" and not 0 <= numbers[1] < MAX_CHUNKS:
        raise ValueError(f"chunk {numbers[1]}, expected 0 to {MAX_CHUNKS - 1}")
    if handler is None:
        raise ValueError("staging buffers are not initialized")
    names = frames[STAGING[frames[0]] :]
    if frames[0] != b"WATERMARK" and not names:
        raise IndexError("no session")
    for name in names:
        check_rank_name(name)


def check_rank_name(name: bytes) -> None:
    """Raises ValueError for an invalid name of a decode rank."""
    if not 0 < len(name) <= MAX_NAME or not name.isascii():
        raise ValueError(
            f"decode rank name of {len(name)} bytes, expected 1 to {MAX_NAME} ASCII bytes"
        )


def check_frame_sizes(registration: Frames, metadata: Optional[int] = None) -> None:
    """Raises ValueError for a frame that is longer than any rank's pointers.

    Args:
        metadata: Index of the frame with NIXL's metadata, which may be longer.
    """
    for number, frame in enumerate(registration):
        most = MAX_METADATA if number == metadata else MAX_FRAME_BYTES
        if len(frame) > most:
            raise ValueError(
                f"{len(frame)} bytes in frame {number} of a registration, "
                f"expected at most {most >> 20} MiB"
            )


def check_agent_metadata(name: bytes, metadata: bytes) -> None:
    """Raises ValueError for metadata of another NIXL agent than the one with this name.

    NIXL uses the name in the metadata, and drops that agent if it cannot load the rest.
    """
    if struct.pack("<Q", len(name)) + name not in metadata:
        raise ValueError(f"NIXL metadata does not belong to agent {name.decode('ascii')}")


def check_session_id(session: bytes) -> None:
    """Raises ValueError for an invalid session id, whose port selects the queue of its rooms."""
    check_rank_name(session)
    port_of(session.decode("ascii"))


def check_metadata_message(info: object) -> None:
    """Raises ValueError for a request for a room with negative numbers."""
    pages = info.dst_kv_indices.min(initial=0)
    state = [min(part, default=0) for part in info.dst_state_indices]
    numbers = (info.room, info.required_dst_info_num - 1, info.dst_aux_index or 0)
    if min(*numbers, pages, *state) < 0:
        raise ValueError(f"request for room {info.room} with negative numbers")
