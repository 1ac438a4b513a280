"""What memory a side is known to have, and whether a copy stays within it.

A transfer engine may accept more than was registered: MemFabric accepts a write anywhere in a 2 MiB
page that contains registered memory, and reads from anywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Optional

import numpy as np
import numpy.typing as npt

from .layout import Buffer, RankLayout

# Address and bytes of a buffer; the bytes are None if its side does not report them.
Memory = tuple[int, Optional[int]]

ENDLESS = 1 << 64


def bytes_until_next(pointers: Iterable[int]) -> dict[int, int]:
    """Returns the bytes from each address to the next: the most that a buffer there can have."""
    known = sorted(set(pointers))
    return {here: there - here for here, there in zip(known, [*known[1:], ENDLESS])}


def min_pages_until_next(
    numbers: Iterable[int], buffers: Sequence[Buffer], pointers: Sequence[int]
) -> int:
    """Returns the pages that each of these buffers has room for before the next buffer begins.

    Returns 0 if the addresses do not show it: for the last buffer in memory, or for buffers that
    lie within one another.

    Args:
        numbers: Indices of the buffers that count.
    """
    room = bytes_until_next(pointers)
    pages = [room[pointers[i]] // buffers[i].page_bytes for i in set(numbers)]
    fewest = min(pages, default=0)
    return fewest if fewest < ENDLESS >> 32 else 0


class Bounds:
    """Memory that a side has; `owner` names the side in messages."""

    def __init__(self, owner: str, held: Iterable[Memory]):
        """Merges buffers that overlap, but not buffers that only touch.

        A buffer of unknown size extends to the next one.
        """
        self.owner = owner
        known = [(start, size) for start, size in held if start]  # an empty buffer has no address
        room = bytes_until_next(start for start, _ in known)
        spans = sorted(
            (start, start + (room[start] if size is None else size)) for start, size in known
        )
        merged: list[list[int]] = []
        for start, end in spans:
            if merged and start < merged[-1][1]:
                merged[-1][1] = max(merged[-1][1], end)
            elif end > start:
                merged.append([start, end])
        most = np.iinfo(np.uint64).max
        self.starts, self.ends = (
            np.array([(start, min(end, most)) for start, end in merged], dtype=np.uint64)
            .reshape(-1, 2)
            .T
        )

    def outside_error(self, starts: Sequence[int], sizes: Sequence[int]) -> str:
        """Returns which copy, by address and bytes, is not within a buffer; "" if all are."""
        if not len(starts):
            return ""
        try:
            first, size = np.array(starts, dtype=np.uint64), np.array(sizes, dtype=np.uint64)
        except OverflowError:  # negative, or more than 64 bits
            return (
                "a copy whose address or length is negative or exceeds 64 bits; the lowest address "
                f"is {min(starts):#x}, the smallest length {min(sizes)} bytes"
            )
        at = np.searchsorted(self.starts, first, side="right").astype(np.int64) - 1
        outside = at < 0
        if self.ends.size:
            end = first + size
            outside |= (end > self.ends[at]) | (end < first)  # beyond 64 bits it wraps
        if not outside.any():
            return ""
        which = outside.argmax()
        return (
            f"a copy of {int(size[which]):,} bytes at {int(first[which]):#x}, which does not lie "
            f"within any buffer that {self.owner} registered"
        )


def described_memory(
    layout: Optional[RankLayout], role: str, pointers: Sequence[int]
) -> list[Memory]:
    """Returns the memory of a side's `kv` or `state`; sizes come from its description, if any."""
    buffers = getattr(layout, role, ())
    if len(buffers) != len(pointers):
        return [(pointer, None) for pointer in pointers]
    return [
        (pointer, one.pages * one.page_bytes if one.pages else None)
        for pointer, one in zip(pointers, buffers)
    ]


def announced_memory(pointers: Sequence[int], told: Sequence[int]) -> Optional[list[Memory]]:
    """Returns memory of the sizes that a side announced, in bytes; None if the counts differ."""
    return list(zip(pointers, told)) if len(pointers) == len(told) else None


def described_aux(layout: Optional[RankLayout], pointers: Sequence[int]) -> list[Memory]:
    """Returns the memory of a side's metadata; sizes come from its description, if any."""
    if layout is None or not layout.aux_slots or len(layout.aux) != len(pointers):
        return [(pointer, None) for pointer in pointers]
    return [
        (pointer, width * layout.aux_slots or None) for pointer, width in zip(pointers, layout.aux)
    ]


def max_slots(memory: Sequence[Memory], item_bytes: Sequence[int]) -> Optional[int]:
    """Returns the slots of the buffer that has the most; None if unknown.

    Buffers with slots of 0 bytes do not count, because they are not sent; None if there are no
    others.

    Args:
        item_bytes: Bytes per slot of each buffer in `memory`.
    """
    if len(memory) != len(item_bytes) or any(size is None for _, size in memory):
        return None
    slots = (size // item for (_, size), item in zip(memory, item_bytes) if item)
    return max(slots, default=None)


def slot_error(kind: object, slots: npt.ArrayLike, most: Optional[int]) -> str:
    """Returns an error if a peer lacks some of these slots or pages of state, otherwise ""."""
    asked = np.asarray(slots, dtype=np.int64).reshape(-1)
    if not asked.size or (asked.min() >= 0 and (most is None or asked.max() < most)):
        return ""
    return (
        f"decode has set aside {kind} slots {asked.min()} to {asked.max()} of "
        f"{'an unknown number' if most is None else most}"
    )
