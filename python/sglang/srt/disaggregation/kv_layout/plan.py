"""Turns page indices into copies.

A plan is made once for each peer and holds the addresses of each buffer pair. For a request it
returns the copies, and these return the form that a transport takes: `lists`, NIXL's `descriptors`
or plain `arrays`. Whole pages merge into runs:

    src pages 4 5 6 9        -> 2 copies per buffer: 3 pages from 4 to 0, 1 page from 9 to 3
    dst pages 0 1 2 3

Sliced pages (the two sides hold different heads) are copied token by token.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .bounds import min_pages_until_next
from .layout import Buffer, LayoutError
from .match import BufferPair

Ints = npt.NDArray[np.int64]

# Numbers computed at a time for a list: few enough to stay in a core's cache.
_CHUNK = 8192


@dataclass(frozen=True)
class CopyGroup:
    """Buffer pairs that are copied in the same way.

    Attributes:
        whole: Whether whole pages are copied, instead of one slice of each row of a page.
        rows: Rows (tokens) of a page; 1 for whole pages.
        src_page, dst_page: Bytes from one page to the next on either side.
        length: Bytes of one copy.
        src, dst: Addresses of the first byte copied on page 0, `[pairs]`.
    """

    whole: bool
    rows: int
    src_page: int
    dst_page: int
    length: int
    src: Ints
    dst: Ints

    def copies(self, src_pages: Ints, dst_pages: Ints) -> GroupCopies:
        each = self._runs if self.whole else self._rows
        return GroupCopies(self.src, self.dst, *each(src_pages, dst_pages))

    def _runs(self, src: Ints, dst: Ints) -> tuple[Ints, Ints, Ints]:
        starts = np.ones(src.size + 1, dtype=bool)  # the last entry ends the last run
        starts[1:-1] = (src[1:] - src[:-1] != 1) | (dst[1:] - dst[:-1] != 1)
        edges = np.flatnonzero(starts)
        first = edges[:-1]
        pages = edges[1:] - first
        return src[first] * self.src_page, dst[first] * self.dst_page, pages * self.length

    def _rows(self, src: Ints, dst: Ints) -> tuple[Ints, Ints, Ints]:
        row = np.arange(self.rows)
        return (
            (src[:, None] * self.src_page + row * (self.src_page // self.rows)).reshape(-1),
            (dst[:, None] * self.dst_page + row * (self.dst_page // self.rows)).reshape(-1),
            np.full(src.size * self.rows, self.length),
        )


@dataclass(frozen=True)
class GroupCopies:
    """The same copies for some buffer pairs: from `src` + `src_offset` to `dst` + `dst_offset`.

    Addresses have the shape `[pairs]`; offsets and lengths, in bytes, `[copies per pair]`.
    """

    src: Ints
    dst: Ints
    src_offset: Ints
    dst_offset: Ints
    length: Ints

    def __len__(self) -> int:
        return self.src.size * self.length.size

    def lengths(self) -> list[int]:
        """Bytes of each copy; equal ones, the usual case, share one object, which is faster."""
        if self.length.size and (self.length == self.length[0]).all():
            return [int(self.length[0])] * len(self)
        return self.length.tolist() * self.src.size

    def split(self, at_most: int) -> Iterator[GroupCopies]:
        pairs = max(1, at_most // max(1, self.length.size))
        for src, dst in zip(_slices(self.src, pairs), _slices(self.dst, pairs)):
            columns = (self.src_offset, self.dst_offset, self.length)
            for some in zip(*(_slices(column, at_most) for column in columns)):
                yield GroupCopies(src, dst, *some)


@dataclass(frozen=True)
class Copies:
    """What one request copies from this rank to a peer; its length is the number of copies.

    Every form has the same order: buffer after buffer, pages in the request's order.
    """

    groups: tuple[GroupCopies, ...]

    def __len__(self) -> int:
        return sum(map(len, self.groups))

    def arrays(self) -> Ints:
        """Source addresses, destination addresses and lengths in bytes, as one array `[3, n]`."""
        columns = np.empty((3, len(self)), dtype=np.int64)
        self._fill(*columns)
        return columns

    def lists(self) -> tuple[list[int], list[int], list[int]]:
        """Source addresses, destination addresses and lengths in bytes, as lists."""
        return (
            _outer_sums([(some.src, some.src_offset) for some in self.groups]),
            _outer_sums([(some.dst, some.dst_offset) for some in self.groups]),
            _concatenate([some.lengths() for some in self.groups]),
        )

    def descriptors(self, src_device: int, dst_device: int) -> tuple[Ints, Ints]:
        """Source and destination descriptors, each `[n, 3]`: address, length, device."""
        src, dst = np.empty((2, len(self), 3), dtype=np.int64)
        self._fill(src[:, 0], dst[:, 0], src[:, 1])
        dst[:, 1] = src[:, 1]
        src[:, 2], dst[:, 2] = src_device, dst_device
        return src, dst

    def split(self, at_most: int) -> list[Copies]:
        """Splits the copies into parts of at most `at_most` each."""
        if len(self) <= at_most:
            return [self]
        return [Copies((part,)) for some in self.groups for part in some.split(at_most)]

    def _fill(self, src: Ints, dst: Ints, length: Ints) -> None:
        """Writes into arrays `[n]` in place, because they are large."""
        end = 0
        for some in self.groups:
            rows, end = slice(end, end + len(some)), end + len(some)
            shape = (some.src.size, some.length.size)
            np.add(some.src[:, None], some.src_offset, out=src[rows].reshape(shape))
            np.add(some.dst[:, None], some.dst_offset, out=dst[rows].reshape(shape))
            length[rows].reshape(shape)[:] = some.length


@dataclass(frozen=True)
class TransferPlan:
    """All copies from one rank to another, except for the page indices.

    Attributes:
        groups: Empty if the two ranks have no heads or layers in common.
        src_pages, dst_pages: Pages of each side's buffers; 0 if the side does not report them.
        dst_max_pages: Pages that end before the peer's next buffer begins; 0 if unknown.
    """

    groups: tuple[CopyGroup, ...]
    src_pages: int = 0
    dst_pages: int = 0
    dst_max_pages: int = 0

    @property
    def is_sliced(self) -> bool:
        """Whether some copies are of single tokens, so that there are many."""
        return not all(group.whole for group in self.groups)

    def copies(self, src_pages: npt.ArrayLike, dst_pages: npt.ArrayLike) -> Copies:
        """Returns the copies from pages of this rank to pages of the peer.

        Args:
            src_pages, dst_pages: Page indices in the request's order, `[pages]`.

        Raises:
            LayoutError: The two differ in length, or name a page that the buffers do not have.
        """
        src, dst = self.validate_pages(src_pages, dst_pages)
        return Copies(tuple(group.copies(src, dst) for group in self.groups))

    def validate_pages(
        self, src_pages: npt.ArrayLike, dst_pages: npt.ArrayLike
    ) -> tuple[Ints, Ints]:
        """Returns these page indices as arrays. Raises LayoutError as `copies` does."""
        src = np.asarray(src_pages, dtype=np.int64)
        dst = np.asarray(dst_pages, dtype=np.int64)
        if src.size != dst.size:
            raise LayoutError(
                f"prefill sends {src.size} pages where decode has set aside {dst.size}; "
                "the two servers disagree about this request's length"
            )
        held = min(filter(None, (self.dst_pages, self.dst_max_pages)), default=0)
        if _is_outside(src, self.src_pages) or _is_outside(dst, held):
            raise LayoutError(
                f"prefill sends pages {_span(src, self.src_pages)}, decode has set aside pages "
                f"{_span(dst, held)}; nothing is written outside of the buffers"
            )
        return src, dst


def _is_outside(pages: Ints, held: int) -> bool:
    """Whether a page is not below `held` (0 if unknown), or is negative: huge as unsigned."""
    if not pages.size:
        return False
    unsigned = pages.view(np.uint64)
    return unsigned.item(unsigned.argmax()) >= (held or 1 << 63)  # faster than `max` on few pages


def _span(pages: Ints, held: int) -> str:
    """Formats a range of pages, such as `0 to 12 of 12`."""
    return f"{pages.min()} to {pages.max()} of {held or 'an unknown number'}"


def _slices(numbers: Ints, size: int) -> list[Ints]:
    return [numbers[start : start + size] for start in range(0, numbers.size, size)]


def _concatenate(lists: list[list[int]]) -> list[int]:
    """Returns one list of all; extends the first in place, because the lists are large."""
    chained = lists[0] if lists else []
    for more in lists[1:]:
        chained += more
    return chained


def _outer_sums(sides: list[tuple[Ints, Ints]]) -> list[int]:
    """Returns, for each pair of arrays, each number of the first plus each of the second."""
    numbers = array("q")
    for firsts, offsets in sides:
        step = max(1, _CHUNK // max(1, offsets.size))
        for start in range(0, firsts.size, step):
            numbers.frombytes((firsts[start : start + step, None] + offsets).view(np.uint8))
    return numbers.tolist()  # 10% faster than NumPy's `tolist`


def make_plan(
    pairs: Sequence[BufferPair],
    page_size: int,
    src_buffers: Sequence[Buffer],
    src_pointers: Sequence[int],
    dst_buffers: Sequence[Buffer],
    dst_pointers: Sequence[int],
) -> TransferPlan:
    """Returns the plan for `pairs`, which index the four sequences; `page_size` is in tokens.

    Raises:
        LayoutError: A copy extends beyond its row of a page on either side.
    """
    addresses: dict[tuple, list[tuple[int, int]]] = {}
    for pair in sorted(pairs, key=lambda pair: not pair.whole):
        rows = 1 if pair.whole else page_size
        src_page, dst_page = src_buffers[pair.src].page_bytes, dst_buffers[pair.dst].page_bytes
        _check_row(src_buffers[pair.src], src_page / rows, pair.src_offset + pair.row_bytes)
        _check_row(dst_buffers[pair.dst], dst_page / rows, pair.dst_offset + pair.row_bytes)
        addresses.setdefault((pair.whole, rows, src_page, dst_page, pair.row_bytes), []).append(
            (src_pointers[pair.src] + pair.src_offset, dst_pointers[pair.dst] + pair.dst_offset)
        )
    return TransferPlan(
        tuple(
            CopyGroup(*alike, *np.array(both, dtype=np.int64).T.copy())
            for alike, both in addresses.items()
        ),
        _fewest_pages(src_buffers[pair.src] for pair in pairs),
        _fewest_pages(dst_buffers[pair.dst] for pair in pairs),
        min_pages_until_next((pair.dst for pair in pairs), dst_buffers, dst_pointers),
    )


def _check_row(buffer: Buffer, row: float, end: int) -> None:
    if end > row:
        raise LayoutError(
            f"{buffer.name}: a copy ends {end} bytes after the start of a row of {row:.10g} bytes; "
            f"{buffer.page_bytes} bytes per page and {buffer.heads or 'no'} heads do not match"
        )


def _fewest_pages(buffers: Iterable[Buffer]) -> int:
    """Returns the number of pages that all buffers have; 0 if none reports it."""
    return min((buffer.pages for buffer in buffers if buffer.pages), default=0)
