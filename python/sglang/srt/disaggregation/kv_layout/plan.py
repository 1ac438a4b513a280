"""Turn page indices into copies.

A plan is made once for each peer and holds arrays with one entry for each buffer pair; `copies` is
all that runs for a request. Whole pages merge into runs:

    src pages 4 5 6 9        -> 2 copies a buffer: 3 pages from 4 to 0, 1 page from 9 to 3
    dst pages 0 1 2 3

Sliced pages (the two sides hold different heads) are copied token by token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
class _Group:
    """Pairs copied alike: whole pages, or one slice of each token.

    All arrays have shape `[pairs]`: address of the first copied byte on page 0, bytes from page to
    page, bytes of one copy. `rows` copies a page: 1 for whole pages, else the page size.
    """

    whole: bool
    rows: int
    src: Ints
    dst: Ints
    src_page: Ints
    dst_page: Ints
    length: Ints

    def copies(self, src_pages: Ints, dst_pages: Ints) -> Copies:
        """Copies for these pages, at least one."""
        if self.whole:
            breaks = (np.diff(src_pages) != 1) | (np.diff(dst_pages) != 1)
            first = np.concatenate(([0], np.flatnonzero(breaks) + 1))
            pages = np.diff(first, append=src_pages.size)
            src_pages, dst_pages = src_pages[first], dst_pages[first]
            length = self.length[:, None] * pages
        else:
            shape = (self.length.size, src_pages.size * self.rows)
            length = np.broadcast_to(self.length[:, None], shape)
        return Copies(
            self._addresses(self.src, self.src_page, src_pages),
            self._addresses(self.dst, self.dst_page, dst_pages),
            length.reshape(-1),
        )

    def _addresses(self, base: Ints, page_bytes: Ints, pages: Ints) -> Ints:
        at = base[:, None] + page_bytes[:, None] * pages
        if self.rows > 1:
            row = np.arange(self.rows) * (page_bytes // self.rows)[:, None]
            at = at[:, :, None] + row[:, None, :]
        return at.reshape(-1)


@dataclass(frozen=True)
class TransferPlan:
    """All copies between two ranks, short of the page indices."""

    groups: tuple[_Group, ...]

    @property
    def is_sliced(self) -> bool:
        """Some copies are of single tokens, so there are many of them."""
        return not all(group.whole for group in self.groups)

    def copies(self, src_pages: npt.ArrayLike, dst_pages: npt.ArrayLike) -> Copies:
        """Copies that bring the pages `src_pages` of this rank to `dst_pages` of the peer.

        Both of shape `[pages]`, in the request's order. Buffer after buffer, pages in order; empty
        where this rank has nothing for the peer.

        Raises:
            LayoutError: The two sides name different numbers of pages.
        """
        src = np.asarray(src_pages, dtype=np.int64)
        dst = np.asarray(dst_pages, dtype=np.int64)
        if src.size != dst.size:
            raise LayoutError(
                f"prefill sends {src.size} pages where decode has set aside {dst.size}; "
                "the two servers disagree about this request's length"
            )
        parts = [group.copies(src, dst) for group in self.groups] if src.size else []
        if len(parts) == 1:
            return parts[0]
        empty = np.empty(0, dtype=np.int64)
        return Copies(
            *(
                np.concatenate([empty, *(getattr(part, field) for part in parts)])
                for field in ("src", "dst", "length")
            )
        )


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
        return np.fromiter(values, dtype=np.int64)

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
