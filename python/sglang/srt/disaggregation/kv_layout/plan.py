"""Turn page indices into copies.

A plan is made once for each peer and holds arrays with one entry for each buffer pair. For a
request it gives the copies as the transport takes them: `lists`, or NIXL's `descriptors`, or plain
arrays with `copies`. Whole pages merge into runs:

    src pages 4 5 6 9        -> 2 copies a buffer: 3 pages from 4 to 0, 1 page from 9 to 3
    dst pages 0 1 2 3

Sliced pages (the two sides hold different heads) are copied token by token.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import numpy.typing as npt

from .describe import Buffer, LayoutError
from .match import Pair

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Copies:
    """Copy `length[i]` bytes from address `src[i]` to address `dst[i]`; all of shape `[n]`."""

    src: Ints
    dst: Ints
    length: Ints

    def __len__(self) -> int:
        return self.src.size

    @property
    def total_bytes(self) -> int:
        return int(self.length.sum())


@dataclass(frozen=True)
class _Runs:
    """Runs of pages, as columns `[runs, 1]`: the first page on each side, and how many pages."""

    src: Ints
    dst: Ints
    pages: Ints

    @classmethod
    def merged(cls, src: Ints, dst: Ints) -> _Runs:
        starts = np.ones(src.size + 1, dtype=bool)  # the last says where the last run ends
        starts[1:-1] = (src[1:] - src[:-1] != 1) | (dst[1:] - dst[:-1] != 1)
        edges = np.flatnonzero(starts)
        first = edges[:-1]
        return cls(src[first, None], dst[first, None], (edges[1:] - first)[:, None])

    @classmethod
    def single(cls, src: Ints, dst: Ints) -> _Runs:
        return cls(src[:, None], dst[:, None], np.ones((src.size, 1), dtype=np.int64))


@dataclass(frozen=True)
class _Group:
    """Pairs copied alike: whole pages, or one slice of each token.

    All arrays have shape `[pairs, 1, 1]`: address of the first copied byte on page 0, bytes from
    page to page, bytes of one copy. `rows` copies a page: 1 for whole pages, else the page size.
    """

    whole: bool
    rows: int
    src: Ints
    dst: Ints
    src_page: Ints
    dst_page: Ints
    length: Ints

    def part(self, pairs: slice) -> _Group:
        columns = (self.src, self.dst, self.src_page, self.dst_page, self.length)
        return _Group(self.whole, self.rows, *(column[pairs] for column in columns))

    def shape(self, runs: _Runs) -> tuple[int, int, int]:
        """Pairs, runs, rows: the order of the copies."""
        return self.length.size, runs.pages.size, self.rows

    def fill(self, runs: _Runs, src: Ints, dst: Ints, *lengths: Ints) -> None:
        """Write addresses and lengths into arrays of this shape; in place, for they are large."""
        row = np.arange(self.rows)
        np.add(self.src + self.src_page // self.rows * row, self.src_page * runs.src, out=src)
        np.add(self.dst + self.dst_page // self.rows * row, self.dst_page * runs.dst, out=dst)
        for length in lengths:
            np.multiply(self.length, runs.pages, out=length)

    def listed_lengths(self, runs: _Runs) -> list[int]:
        """As `fill` writes them; buffers that are alike share objects, which saves making them."""

        def of_pairs(length: int, pairs: int) -> list[int]:
            if self.whole:
                return (length * runs.pages[:, 0]).tolist() * pairs
            return [length] * (pairs * runs.pages.size * self.rows)

        alike = groupby(self.length.reshape(-1).tolist())
        return _chained([of_pairs(length, len(list(pairs))) for length, pairs in alike])


@dataclass(frozen=True)
class TransferPlan:
    """All copies between two ranks, short of the page indices.

    `src_pages` of this rank go to `dst_pages` of the peer: both of shape `[pages]`, in the
    request's order. Copies come buffer after buffer, pages in order; none where this rank has
    nothing for the peer. A LayoutError says that the two sides name different numbers of pages.
    """

    groups: tuple[_Group, ...]

    @property
    def is_sliced(self) -> bool:
        """Some copies are of single tokens, so there are many of them."""
        return not all(group.whole for group in self.groups)

    def most_copies(self, pages: int) -> int:
        """Copies of so many pages if none is merged with its neighbour."""
        return pages * sum(group.length.size * group.rows for group in self.groups)

    def parts(self, pages: int, at_most: int) -> list[TransferPlan]:
        """Plans that together are this one, of one buffer or of `at_most` copies each."""
        found = []
        for group in self.groups:
            step = max(1, at_most // max(1, pages * group.rows))
            for start in range(0, group.length.size, step):
                found.append(TransferPlan((group.part(slice(start, start + step)),)))
        return found

    def copies(self, src_pages: npt.ArrayLike, dst_pages: npt.ArrayLike) -> Copies:
        """Copies as arrays."""
        parts = []
        for group, runs in self._runs(src_pages, dst_pages):
            columns = np.empty((3, *group.shape(runs)), dtype=np.int64)
            group.fill(runs, *columns)
            parts.append(columns.reshape(3, -1))
        return Copies(*_joined(parts, np.empty((3, 0), dtype=np.int64)))

    def lists(
        self, src_pages: npt.ArrayLike, dst_pages: npt.ArrayLike
    ) -> tuple[list[int], list[int], list[int]]:
        """Copies as lists: source addresses, destination addresses, lengths."""
        src, dst, lengths = [], [], []
        for group, runs in self._runs(src_pages, dst_pages):
            sides = [np.empty(group.shape(runs), dtype=np.int64) for _ in range(2)]
            group.fill(runs, *sides)
            src.append(_listed(sides[0]))
            dst.append(_listed(sides[1]))
            lengths.append(group.listed_lengths(runs))
        return _chained(src), _chained(dst), _chained(lengths)

    def descriptors(
        self,
        src_pages: npt.ArrayLike,
        dst_pages: npt.ArrayLike,
        src_device: int,
        dst_device: int,
    ) -> tuple[Ints, Ints]:
        """Copies as source and destination, each `[n, 3]`: address, length, device."""
        parts = []
        for group, runs in self._runs(src_pages, dst_pages):
            sides = np.empty((2, *group.shape(runs), 3), dtype=np.int64)
            address, length, device = np.moveaxis(sides, -1, 0)
            group.fill(runs, *address, *length)
            device[0], device[1] = src_device, dst_device
            parts.append(sides.reshape(2, -1, 3))
        src, dst = _joined(parts, np.empty((2, 0, 3), dtype=np.int64))
        return src, dst

    def _runs(
        self, src_pages: npt.ArrayLike, dst_pages: npt.ArrayLike
    ) -> Iterator[tuple[_Group, _Runs]]:
        src = np.asarray(src_pages, dtype=np.int64)
        dst = np.asarray(dst_pages, dtype=np.int64)
        if src.size != dst.size:
            raise LayoutError(
                f"prefill sends {src.size} pages where decode has set aside {dst.size}; "
                "the two servers disagree about this request's length"
            )
        for group in self.groups:
            yield group, (_Runs.merged if group.whole else _Runs.single)(src, dst)


def _joined(parts: list[Ints], empty: Ints) -> Ints:
    return parts[0] if len(parts) == 1 else np.concatenate([empty, *parts], axis=1)


def _listed(numbers: Ints) -> list[int]:
    # Most of the time of `lists` goes here; array's own is a tenth faster than NumPy's.
    return array("q", numbers.tobytes()).tolist()


def _chained(lists: list[list[int]]) -> list[int]:
    """One list of all; the first grows, for they are large."""
    chained = lists[0] if lists else []
    for more in lists[1:]:
        chained += more
    return chained


def make_plan(
    pairs: Sequence[Pair],
    page_size: int,
    src_buffers: Sequence[Buffer],
    src_pointers: Sequence[int],
    dst_buffers: Sequence[Buffer],
    dst_pointers: Sequence[int],
) -> TransferPlan:
    """The plan for `pairs`, whose indices point into all four sequences; `page_size` in tokens."""

    def column(values) -> Ints:
        return np.fromiter(values, dtype=np.int64)[:, None, None]

    groups = []
    for whole in (True, False):
        chosen = [pair for pair in pairs if pair.whole is whole]
        if not chosen:
            continue
        groups.append(
            _Group(
                whole=whole,
                rows=1 if whole else page_size,
                src=column(src_pointers[p.src] + p.src_offset for p in chosen),
                dst=column(dst_pointers[p.dst] + p.dst_offset for p in chosen),
                src_page=column(src_buffers[p.src].page_bytes for p in chosen),
                dst_page=column(dst_buffers[p.dst].page_bytes for p in chosen),
                length=column(p.row_bytes for p in chosen),
            )
        )
    return TransferPlan(tuple(groups))
