"""What memory a side has, as far as it says so, and whether a copy stays within it.

A transfer engine may take more than was registered: MemFabric takes a write anywhere in a page of
2 MiB in which something is registered, and reads from anywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Optional

import numpy as np
import numpy.typing as npt

from .local_layout import Buffer, RankLayout

# Address and bytes of a buffer; None where its side does not say how many.
Memory = tuple[int, Optional[int]]

ENDLESS = 1 << 64


def bytes_until_next(pointers: Iterable[int]) -> dict[int, int]:
    """Of each address the bytes until the next one: what begins there has no more."""
    known = sorted(set(pointers))
    return {here: there - here for here, there in zip(known, [*known[1:], ENDLESS])}


def min_pages_until_next(
    numbers: Iterable[int], buffers: Sequence[Buffer], pointers: Sequence[int]
) -> int:
    """Pages that each of the buffers with these numbers has room for before the next one begins.

    0 where that says nothing: of the last one in memory, or where they lie within one another.
    """
    room = bytes_until_next(pointers)
    pages = [room[pointers[i]] // buffers[i].page_bytes for i in set(numbers)]
    fewest = min(pages, default=0)
    return fewest if fewest < ENDLESS >> 32 else 0


class Bounds:
    """Memory that a side has; `whose` says whose, for messages."""

    def __init__(self, owner: str, held: Iterable[Memory]):
        """Buffers that lie within one another are one; those that only touch are not.

        One of unknown length reaches to the next.
        """
        self.owner = owner
        known = [(start, size) for start, size in held if start]  # what is empty has no address
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
        """Which copy, by address and bytes, is not within a buffer; "" if all are."""
        if not len(starts):
            return ""
        try:
            first, size = np.array(starts, dtype=np.uint64), np.array(sizes, dtype=np.uint64)
        except OverflowError:  # below 0, or above all addresses
            return f"a copy of {min(sizes)} bytes or more from {min(starts):#x} on"
        at = np.searchsorted(self.starts, first, side="right").astype(np.int64) - 1
        outside = at < 0
        if self.ends.size:
            end = first + size
            outside |= (end > self.ends[at]) | (end < first)  # above all addresses it wraps
        if not outside.any():
            return ""
        which = outside.argmax()
        return (
            f"a copy of {int(size[which]):,} bytes at {int(first[which]):#x}, which is in none of "
            f"the buffers that {self.owner} registered"
        )


def described_memory(
    layout: Optional[RankLayout], role: str, pointers: Sequence[int]
) -> list[Memory]:
    """Memory of a side's `kv` or `state` buffers, by its description where it describes them."""
    buffers = getattr(layout, role, ())
    if len(buffers) != len(pointers):
        return [(pointer, None) for pointer in pointers]
    return [
        (pointer, one.pages * one.page_bytes if one.pages else None)
        for pointer, one in zip(pointers, buffers)
    ]


def announced_memory(pointers: Sequence[int], told: Sequence[int]) -> Optional[list[Memory]]:
    """The same by a list of bytes; None where it is not of these buffers."""
    return list(zip(pointers, told)) if len(pointers) == len(told) else None


def described_aux(layout: Optional[RankLayout], pointers: Sequence[int]) -> list[Memory]:
    """The same of metadata."""
    if layout is None or not layout.aux_slots or len(layout.aux) != len(pointers):
        return [(pointer, None) for pointer in pointers]
    return [
        (pointer, width * layout.aux_slots or None) for pointer, width in zip(pointers, layout.aux)
    ]


def max_slots(memory: Sequence[Memory], item_bytes: Sequence[int]) -> Optional[int]:
    """Slots of the buffer that has the most of them; None where that is not known.

    One whose slots are of 0 bytes is not sent; of nothing but those the slots do not matter.
    """
    if len(memory) != len(item_bytes) or any(size is None for _, size in memory):
        return None
    slots = (size // item for (_, size), item in zip(memory, item_bytes) if item)
    return max(slots, default=None)


def slot_error(kind: object, slots: npt.ArrayLike, most: Optional[int]) -> str:
    """Which of a peer's slots or pages of state it does not have; "" if it has all."""
    asked = np.asarray(slots, dtype=np.int64).reshape(-1)
    if not asked.size or (asked.min() >= 0 and (most is None or asked.max() < most)):
        return ""
    return (
        f"decode has set aside {kind} slots {asked.min()} to {asked.max()} of "
        f"{'an unknown number' if most is None else most}"
    )
