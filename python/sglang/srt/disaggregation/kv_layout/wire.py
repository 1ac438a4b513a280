"""What our messages add to a stock peer's: a description of the buffers, and their sizes.

Each is one frame of a registration: a format tag, then msgpack. Fields that a later release adds
are skipped here. A peer whose tag is not ours sends a description that we cannot read; we serve it
as if it had sent none. Stock peers read frames by position and do not see ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Optional

import msgspec

from .layout import Buffer, LayoutError, RankLayout

_TAG = b"KVL1"
_SIZES_TAG = b"KVS1"
_MAX_BYTES = 1 << 20
_decoder = msgspec.msgpack.Decoder(RankLayout)


class Sizes(msgspec.Struct, frozen=True):
    """Bytes of each buffer that a rank registers, in the order of its pointers; state by kind."""

    kv: tuple[int, ...]
    state: tuple[tuple[int, ...], ...]
    aux: tuple[int, ...]


_sizes_decoder = msgspec.msgpack.Decoder(Sizes)


def encode_layout(layout: RankLayout) -> bytes:
    """Returns the trailing frame for `layout`: about 20 bytes per buffer."""
    return _TAG + msgspec.msgpack.encode(layout)


def decode_layout(frame: bytes) -> Optional[RankLayout]:
    """Returns the description in `frame`; None if the frame is empty or has another tag.

    Raises:
        LayoutError: The frame has our tag and is invalid.
    """
    if not frame.startswith(_TAG):
        return None
    if len(frame) > _MAX_BYTES:
        raise LayoutError(f"layout frame of {len(frame)} bytes, expected at most {_MAX_BYTES}")
    try:
        layout = _decoder.decode(frame[len(_TAG) :])
    except msgspec.MsgspecError as error:
        raise LayoutError(f"layout frame of {len(frame)} bytes cannot be read: {error}") from error
    if not (0 <= layout.tp_rank < layout.tp_size and layout.page_size > 0 and layout.pp_size > 0):
        raise LayoutError(f"invalid layout frame: {layout.name}, page size {layout.page_size}")
    if min(layout.aux_slots, *layout.aux, 0) < 0:
        raise LayoutError(f"invalid layout frame: {layout.aux_slots} slots of {layout.aux} bytes")
    for buffer in (*layout.kv, *layout.state):
        if not _is_possible(buffer):
            raise LayoutError(f"invalid layout frame: {buffer}")
    return layout


def _is_possible(buffer: Buffer) -> bool:
    heads = buffer.heads
    held = heads is None or 0 <= heads.start < heads.stop <= heads.total
    least = 0 if heads is None else 1  # a short convolution registers empty state buffers
    return held and buffer.page_bytes >= least and buffer.pages >= 0


def has_layout_frame(frames: Sequence[bytes]) -> bool:
    """Whether a registration has a description of ours as its 13th frame."""
    return len(frames) > 12 and frames[12].startswith(_TAG)


def find_layout_frame(frames: Sequence[bytes]) -> bytes:
    """Returns the last description among a message's frames; empty if there is none."""
    return next((frame for frame in reversed(frames) if frame.startswith(_TAG)), b"")


def encode_sizes(sizes: Sizes) -> bytes:
    """Returns the trailing frame for `sizes`: about 10 bytes per buffer."""
    return _SIZES_TAG + msgspec.msgpack.encode(sizes)


def find_sizes(frames: Sequence[bytes]) -> Optional[Sizes]:
    """Returns the last sizes among a message's frames; None if they are missing or invalid."""
    frame = next((frame for frame in reversed(frames) if frame.startswith(_SIZES_TAG)), b"")
    try:
        told = _sizes_decoder.decode(frame[len(_SIZES_TAG) : _MAX_BYTES])
    except msgspec.MsgspecError:
        return None
    sizes = [*told.kv, *told.aux, *(size for kind in told.state for size in kind)]
    return told if min(sizes, default=0) >= 0 else None


def is_extension_frame(frame: bytes) -> bool:
    """Whether a frame is one of ours, which stock peers do not send."""
    return frame.startswith((_TAG, _SIZES_TAG))
