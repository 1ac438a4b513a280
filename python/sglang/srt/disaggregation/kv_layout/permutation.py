"""Interleaves head slices that arrived as whole rows of several prefill ranks.

A unit is a chunk of a request as prefill sends it, cut into blocks of whole pages, N tokens each.
Decode's pages of a block, end to end, are N rows. A prefill rank that holds fewer heads writes its
own N rows into one part:

    prefill TP 0: a0 a1 a2         decode: a0 a1 a2 b0 b1 b2   ->   a0 b0 a1 b1 a2 b2
    prefill TP 1: b0 b1 b2                 part 0   part 1
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Optional

import msgspec
import numpy as np
import numpy.typing as npt

from .heads import heads_of_rank, parts_of
from .layout import Buffer, LayoutError, RankLayout

MAX_WORD = 16  # bytes that one instruction moves on accelerators

# Tokens of all blocks of a unit but its last one, which bounds the memory in which decode
# interleaves. A part of the protocol, because both sides cut units, and no message carries it:
# another number needs another field beside `RankLayout.whole_rows`.
BLOCK_TOKENS = 8192

# Which of a request's pages, `[first, end)`, prefill has sent as one chunk.
Unit = tuple[int, int]

_units_decoder = msgspec.msgpack.Decoder(list[Unit])


@dataclass(frozen=True)
class Permutation:
    """Decode buffers whose rows arrive as the same parts.

    Attributes:
        buffers: Indices of the buffers.
        ranks: Prefill TP ranks that write the parts, in the order of the parts.
        widths: Bytes of a token in each part; their sum is the width of decode's row.
        word: Bytes of the widest word that fits into all parts and addresses.
    """

    buffers: tuple[int, ...]
    ranks: tuple[int, ...]
    widths: tuple[int, ...]
    word: int

    def apply(self, rows: npt.NDArray[np.uint8], slots: npt.NDArray[np.int64]) -> None:
        """Interleaves a block in place, after all its parts have arrived.

        This is the reference for other implementations. If all widths are equal, the parts are
        `[parts, tokens, width]`, and become `[tokens, parts, width]`.

        Args:
            rows: One of the buffers, `[slots, bytes per row]`.
            slots: The block's slots in order, `[tokens]`, as `page_slots` returns them.
        """
        ends = np.cumsum(self.widths) * slots.size
        parts = np.split(rows[slots].reshape(-1), ends[:-1])
        interleaved = [part.reshape(slots.size, width) for part, width in zip(parts, self.widths)]
        rows[slots] = np.concatenate(interleaved, axis=1)


def make_permutations(
    own: RankLayout,
    buffers: tuple[Buffer, ...],
    pointers: Sequence[int],
    prefill_tp: int,
) -> tuple[Permutation, ...]:
    """Returns how decode rank `own` interleaves a unit; empty if no rows arrive as parts.

    Args:
        buffers, pointers: The rank's KV or its state.
        prefill_tp: Prefill's attention TP size.
    """
    alike: dict[tuple, list[int]] = {}
    for i, buffer in enumerate(buffers):
        if unpacked_reason(buffer, own, prefill_tp) is None:
            head = buffer.page_bytes // (own.page_size * buffer.heads.count)
            parts = parts_of(buffer.heads, prefill_tp, (own.tp_rank, own.tp_size))
            ranks, widths = zip(*((rank, heads.count * head) for rank, heads in parts))
            alike.setdefault((ranks, widths), []).append(i)
    return tuple(
        Permutation(tuple(which), *parts, widest_word(*parts[1], *(pointers[i] for i in which)))
        for parts, which in alike.items()
        if len(parts[0]) > 1
    )


def unpacked_reason(buffer: Buffer, decode: RankLayout, prefill_tp: int) -> Optional[str]:
    """Returns why head slices of a decode buffer are not sent as whole rows; None if they are.

    Both servers apply this rule, to what both know, so decode interleaves exactly what prefill
    writes as parts.

    Args:
        decode: The rank that holds the buffer.
        prefill_tp: Prefill's attention TP size.
    """
    heads = buffer.heads
    if buffer.unused:
        return "it is not sent"
    if heads is None:
        return "it is not split by KV heads, or its heads are unknown"
    try:
        parts = parts_of(heads, prefill_tp, (decode.tp_rank, decode.tp_size))
        held = [heads_of_rank(rank, prefill_tp, heads.total) for rank, _ in parts]
    except LayoutError as error:  # a draft that only decode has
        return str(error)
    if held == [heads]:
        return "ranks of both servers hold the same KV heads"
    sent = [part for _, part in parts]
    if sum(part.count for part in sent) != heads.count or (len(sent) > 1 and sent != held):
        ranks = ", ".join(str(rank) for rank, _ in parts) or "none"
        return f"KV heads {heads} do not consist of whole rows of prefill TP ranks ({ranks})"
    return None


def encode_units(units: Iterable[Unit]) -> bytes:
    return msgspec.msgpack.encode(list(units))


def decode_units(message: bytes) -> list[Unit]:
    """Returns the units in a message.

    Raises:
        LayoutError: It has none.
    """
    try:
        return _units_decoder.decode(message)
    except msgspec.MsgspecError as error:
        raise LayoutError(f"chunks to interleave cannot be read: {error}") from error


def agreed_units(by_sender: Collection[Collection[Unit]], senders: int, pages: int) -> list[Unit]:
    """Returns the units of a room in the request's order; empty if no sender reports any.

    Args:
        by_sender: The units that each prefill rank reports.
        senders: How many prefill ranks send.
        pages: Pages that decode has set aside for the request.

    Raises:
        LayoutError: The senders differ; or their units are not the request's pages from the first
            one on without a gap, or leave these pages.
    """
    reported = [sorted(units) for units in by_sender if units]
    if not reported:
        return []
    first, ends = reported[0], [0, *(end for _, end in reported[0])]
    if len(reported) != senders or any(units != first for units in reported):
        raise LayoutError(
            f"{len(reported)} of {senders} prefill ranks report chunks to interleave, such as "
            f"{first}; run the same patch set with the same SGLANG_PD_PACKED on all of them"
        )
    if ends[-1] > pages or any(not end == start <= stop for end, (start, stop) in zip(ends, first)):
        raise LayoutError(
            f"prefill reports chunks {first}, which overlap, have gaps, or leave the {pages} pages "
            "that decode has set aside"
        )
    return first


def pages_of_block(page_size: int) -> int:
    """Returns the pages of each block of a unit but its last one."""
    return max(1, BLOCK_TOKENS // page_size)


def split_unit(pages: npt.NDArray[np.int64], page_size: int) -> list[npt.NDArray[np.int64]]:
    """Returns the pages of each block of a unit, of which it has at least one, maybe empty."""
    size = pages_of_block(page_size)
    return [pages[at : at + size] for at in range(0, len(pages), size)] or [pages]


def page_slots(pages: npt.ArrayLike, page_size: int) -> npt.NDArray[np.int64]:
    """Returns the token slots of these pages in order, `[pages * page_size]`."""
    return (np.asarray(pages, np.int64)[:, None] * page_size + np.arange(page_size)).reshape(-1)


def widest_word(*numbers: int) -> int:
    """Returns the largest power of two up to `MAX_WORD` that divides all of these byte counts."""
    common = gcd(*numbers)
    return min(MAX_WORD, common & -common)
