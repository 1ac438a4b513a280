"""Plans for a transport that prepares all pages in advance and gets a request as block numbers.

    run (one for each buffer and side)         blocks, numbered through all runs
    k, layer 0: address, length, stride, 3     0 1 2
    v, layer 0: address, length, stride, 3     3 4 5        page 1 of all buffers: blocks 1 and 4

A block is the unit that a plan copies: a whole page, or some heads of one token.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from .layout import LayoutError
from .plan import TransferPlan

Runs = list[tuple[int, int, int, int]]  # address, length and stride in bytes, blocks
Numbers = npt.NDArray[np.int32]

MAX_BLOCKS = 2**31 - 1


@dataclass(frozen=True)
class _BlockNumbers:
    """Block numbers of a plan's group, for both sides, whose pages have equally many blocks.

    Attributes:
        first: Number of each run's first block, `[2, runs, 1]`.
        rows: Blocks of page 0, counted from the first block of a run.
    """

    first: Numbers
    rows: Numbers

    def block_numbers(self, pages: Numbers) -> Numbers:
        """Returns the blocks of `pages`, `[2, 1, pages]`, counted from the first of a run."""
        if self.rows.size == 1:
            return pages
        return (pages[..., None] * self.rows.size + self.rows).reshape(2, 1, -1)


@dataclass(frozen=True)
class PreparedPlan:
    """All blocks that may be sent to a peer.

    Attributes:
        plan: The plan that the blocks come from.
        src, dst: Runs of each side, paired by position.
        numbered: Numbers of the blocks, one entry for each of the plan's groups.
        blocks_per_page: Blocks of one page in all runs together.
    """

    plan: TransferPlan
    src: Runs
    dst: Runs
    numbered: tuple[_BlockNumbers, ...]
    blocks_per_page: int

    def blocks(self, src_pages: npt.ArrayLike, dst_pages: npt.ArrayLike) -> tuple[Numbers, Numbers]:
        """Returns the numbers of a request's source and destination blocks, each `[blocks]`.

        Raises:
            LayoutError: As for `TransferPlan.copies`.
        """
        pages = np.array(self.plan.validate_pages(src_pages, dst_pages), dtype=np.int32)
        numbers, end = np.empty((2, self.blocks_per_page * pages.shape[1]), dtype=np.int32), 0
        for group in self.numbered:  # writes each number once
            block_numbers = group.block_numbers(pages[:, None])
            shape = (2, group.first.shape[1], block_numbers.shape[2])
            start, end = end, end + shape[1] * shape[2]
            np.add(group.first, block_numbers, out=numbers[:, start:end].reshape(shape))
        return numbers[0], numbers[1]


def prepare(plan: TransferPlan, src_pages: int, dst_pages: int) -> PreparedPlan:
    """Returns the blocks of a transfer plan.

    Args:
        src_pages, dst_pages: Pages that each side has, used where the plan does not know them.

    Raises:
        LayoutError: There are more blocks than 32 bits can number.
    """
    pages = (plan.src_pages or src_pages, plan.dst_pages or dst_pages)
    plan = replace(plan, src_pages=pages[0], dst_pages=pages[1])
    blocks = max(pages) * sum(group.src.size * group.rows for group in plan.groups)
    if blocks > MAX_BLOCKS:
        raise LayoutError(f"{blocks} KV blocks on one side exceed the limit of {MAX_BLOCKS}")
    src = [
        (address, group.length, group.src_page // group.rows, pages[0] * group.rows)
        for group in plan.groups
        for address in group.src.tolist()
    ]
    dst = [
        (address, group.length, group.dst_page // group.rows, pages[1] * group.rows)
        for group in plan.groups
        for address in group.dst.tolist()
    ]
    numbered, blocks_per_page = [], 0
    for group in plan.groups:
        # First blocks if both sides had one page; they scale with the number of pages.
        starts = blocks_per_page + np.arange(group.src.size) * group.rows
        first = np.array(pages)[:, None, None] * starts[:, None]
        rows = np.arange(group.rows, dtype=np.int32)
        numbered.append(_BlockNumbers(first.astype(np.int32), rows))
        blocks_per_page += starts.size * group.rows
    return PreparedPlan(plan, src, dst, tuple(numbered), blocks_per_page)
