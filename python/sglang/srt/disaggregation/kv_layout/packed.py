"""Sends head slices as whole rows, so that one copy carries many tokens.

A unit is a chunk of a request as prefill sends it: whole pages. If prefill ranks hold fewer heads
than decode, their rows are sent unchanged, and decode interleaves them, a block of the unit at a
time (`permutation`). A copy is as long as pages stay neighbours on both sides:

    prefill TP 1, pages 4 5 6                     b0 b1 | b2 b3 | b4 b5
    decode, pages 7 2 9        a0 a1 a2 a3 | a4 a5 b0 b1 | b2 b3 b4 b5    2 copies: b0 b1, b2 to b5

If prefill ranks hold more heads, each packs those that one decode rank holds, a round at a time:

    prefill: a0 b0 a1 b1 a2 b2 -> packing buffer: b0 b1 b2 -> decode TP 1: b0 b1 b2
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Union

import numpy as np
import numpy.typing as npt

from .heads import heads_of_rank
from .layout import Buffer, LayoutError, RankLayout
from .match import match_buffers
from .permutation import page_slots, pages_of_block, unpacked_reason, widest_word
from .plan import Copies, CopyGroup, GroupCopies, Ints, TransferPlan, make_plan

# Where runs of neighbouring pages start, in these pages' bytes and in the buffer: `[runs]` each.
_Runs = tuple[Ints, Ints]


@dataclass(frozen=True)
class PartGroup:
    """Buffer pairs whose rows on prefill become the same part of decode's bytes.

    Attributes:
        page_size: Tokens of a page.
        src_page, dst_page: Bytes from one page to the next on either side.
        before: Bytes of a page on decode that belong to the parts before this one.
        src, dst: Addresses of page 0, `[pairs]`.
    """

    page_size: int
    src_page: int
    dst_page: int
    before: int
    src: Ints
    dst: Ints

    whole = True  # for `TransferPlan.is_sliced`: no copy is of a single token

    def copies(self, src_pages: Ints, dst_pages: Ints) -> GroupCopies:
        src, dst = _runs(src_pages, self.src_page), _runs(dst_pages, self.dst_page)
        size, count = pages_of_block(self.page_size), src_pages.size
        # For each block: where it starts and ends in prefill's bytes of the unit, and how many
        # bytes later its part starts in decode's.
        first = np.arange(0, count, size)
        pages = np.minimum(count - first, size)
        start, end = first * self.src_page, (first + pages) * self.src_page
        shift = first * (self.dst_page - self.src_page) + pages * self.before

        block = dst[0] // (size * self.dst_page)
        breaks = dst[0] - shift[block]  # where decode's pages are not neighbours
        breaks = breaks[(start[block] <= breaks) & (breaks < end[block])]
        edges = np.sort(np.concatenate((start, src[0], breaks)))
        edges = edges[np.diff(edges, prepend=-1) > 0]
        dst_edges = edges + shift[edges // (size * self.src_page)]
        lengths = np.diff(edges, append=count * self.src_page)
        offsets = _offsets(src, edges), _offsets(dst, dst_edges)
        return GroupCopies(self.src, self.dst, *offsets, lengths)


@dataclass(frozen=True)
class PackGroup:
    """Buffer pairs of which prefill packs the same bytes of each row.

    Attributes:
        buffers: Indices of prefill's buffers.
        start, length: First byte of a prefill row that is packed, and the number of bytes, which
            are decode's whole row.
        word: Bytes of the widest word that fits into all rows and addresses on prefill.
        dst_page: Bytes from one page to the next on decode.
        dst: Addresses of page 0 on decode, `[buffers]`.
    """

    buffers: tuple[int, ...]
    start: int
    length: int
    word: int
    dst_page: int
    dst: Ints

    def rounds(self, src_pages: Ints, dst_pages: Ints, capacity: int) -> Iterator[PackingRound]:
        slots = page_slots(src_pages, self.dst_page // self.length)
        runs = _runs(dst_pages, self.dst_page)
        rows = capacity // self.length
        if not rows:
            raise LayoutError(
                f"a packing buffer of {capacity} bytes cannot hold a row of {self.length} bytes"
            )
        tokens = min(rows, max(1, slots.size))
        for first in range(0, slots.size, tokens):
            some = slots[first : first + tokens]
            pieces = _pieces(runs, first * self.length, some.size * self.length)
            at_once = rows // some.size
            for i in range(0, len(self.buffers), at_once):
                which = slice(i, i + at_once)
                group = replace(self, buffers=self.buffers[which], dst=self.dst[which])
                yield PackingRound(group, some, pieces)


@dataclass(frozen=True)
class PackingRound:
    """What is in the packing buffer at one time.

    These are bytes `[buffers, tokens, length]`: of each buffer `[slots, start : start + length]`.

    Attributes:
        group: The buffers, and which bytes of their rows are packed.
        slots: Slots of the tokens on prefill, `[tokens]`.
        pieces: Offsets in a packed buffer, offsets in decode's, and lengths; each `[copies]`.
    """

    group: PackGroup
    slots: Ints
    pieces: tuple[Ints, Ints, Ints]

    def copies(self, address: int) -> Copies:
        """Returns the copies to decode from the packing buffer at `address`."""
        group = self.group
        src = address + np.arange(len(group.buffers)) * (self.slots.size * group.length)
        return Copies((GroupCopies(src, group.dst, *self.pieces),))


@dataclass(frozen=True)
class PackedPlan(TransferPlan):
    """All copies from one rank to another, with head slices as whole rows.

    `copies` returns those from the buffers, `rounds` those from a packing buffer. Their pages are
    all pages of one unit: where a part is written depends on their number.

    Attributes:
        packs: Empty if this rank does not hold more heads than the peer.
    """

    groups: tuple[Union[CopyGroup, PartGroup], ...]
    packs: tuple[PackGroup, ...] = ()

    @property
    def has_parts(self) -> bool:
        """Whether decode must interleave what it receives."""
        return any(isinstance(group, PartGroup) for group in self.groups)

    def rounds(
        self, src_pages: npt.ArrayLike, dst_pages: npt.ArrayLike, capacity: int
    ) -> list[PackingRound]:
        """Returns what to pack and send, one round after another.

        Args:
            src_pages, dst_pages: Page indices of a unit, `[pages]`.
            capacity: Bytes of the packing buffer.

        Raises:
            LayoutError: As for `copies`; or the packing buffer cannot hold a single row.
        """
        src, dst = self.validate_pages(src_pages, dst_pages)
        return [each for group in self.packs for each in group.rounds(src, dst, capacity)]

    def validate_pages(
        self, src_pages: npt.ArrayLike, dst_pages: npt.ArrayLike
    ) -> tuple[Ints, Ints]:
        """Returns these page indices as arrays.

        Raises:
            LayoutError: As for `TransferPlan.copies`; or a page of decode occurs twice.
        """
        src, dst = super().validate_pages(src_pages, dst_pages)
        if self.has_parts and not np.diff(np.sort(dst)).all():
            raise LayoutError("decode has set aside a page twice, in which parts would overlap")
        return src, dst


def make_packed_plan(
    src: RankLayout,
    dst: RankLayout,
    src_buffers: tuple[Buffer, ...],
    src_pointers: Sequence[int],
    dst_buffers: tuple[Buffer, ...],
    dst_pointers: Sequence[int],
) -> PackedPlan:
    """Returns the plan from prefill `src` to decode `dst` for their KV buffers, or for their state.

    What `unpacked_reason` excludes is sent as `make_plan` sends it.

    Raises:
        LayoutError: As for `match_buffers` and `make_plan`; or `src` does not hold the KV heads of
            its TP rank, so that its rows are not the part that decode expects.
    """
    pairs = match_buffers(src, dst, src_buffers, dst_buffers)
    others, parts, packs = [], {}, {}
    for pair in pairs:
        ours, theirs = src_buffers[pair.src], dst_buffers[pair.dst]
        if pair.whole or unpacked_reason(theirs, dst, src.tp_size):
            others.append(pair)
            continue
        if ours.heads != heads_of_rank(src.tp_rank, src.tp_size, ours.heads.total):
            raise LayoutError(f"{ours.name}: {src.name} holds KV heads {ours.heads}")
        if pair.row_bytes * src.page_size == ours.page_bytes:
            alike = (ours.page_bytes, theirs.page_bytes, pair.dst_offset * dst.page_size)
            parts.setdefault(alike, []).append((src_pointers[pair.src], dst_pointers[pair.dst]))
        else:
            alike = (ours.page_bytes, theirs.page_bytes, pair.src_offset, pair.row_bytes)
            packs.setdefault(alike, []).append((pair.src, dst_pointers[pair.dst]))

    def pack_group(src_page: int, dst_page: int, start: int, length: int, both) -> PackGroup:
        buffers, dst = zip(*both)
        pointers = [src_pointers[i] for i in buffers]
        word = widest_word(src_page // src.page_size, start, length, *pointers)
        return PackGroup(buffers, start, length, word, dst_page, np.array(dst, np.int64))

    def plan(some):
        return make_plan(some, src.page_size, src_buffers, src_pointers, dst_buffers, dst_pointers)

    every = plan(pairs)  # checks all rows, and knows the pages of both sides
    size = dst.page_size
    part_groups = (PartGroup(size, *alike, *np.array(both).T) for alike, both in parts.items())
    return PackedPlan(
        (*plan(others).groups, *part_groups),
        every.src_pages,
        every.dst_pages,
        every.dst_max_pages,
        tuple(pack_group(*alike, both) for alike, both in packs.items()),
    )


def _runs(pages: Ints, page_bytes: int) -> _Runs:
    first = np.flatnonzero(np.diff(pages, prepend=pages[:1] - 2) != 1)
    return first * page_bytes, pages[first] * page_bytes


def _pieces(dst: _Runs, start: int, size: int) -> tuple[Ints, Ints, Ints]:
    """Returns the longest copies of `size` packed bytes to decode's pages from byte `start` on.

    Offsets in the packed bytes, offsets in decode's buffer, and lengths.
    """
    edges = dst[0] - start
    edges = np.concatenate(([0], edges[(edges > 0) & (edges < size)]))
    return edges, _offsets(dst, edges + start), np.diff(edges, append=size)


def _offsets(runs: _Runs, places: Ints) -> Ints:
    run = np.searchsorted(runs[0], places, side="right") - 1
    return runs[1][run] + places - runs[0][run]
