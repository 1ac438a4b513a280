"""A plan for a transport that is told of all pages beforehand, and of a request by their numbers.

    run (one for each buffer and side)         blocks, numbered through all runs
    k, layer 0: address, length, stride, 3     0 1 2
    v, layer 0: address, length, stride, 3     3 4 5        page 1 of all buffers: blocks 1 and 4

A block is what a plan copies at a time: a whole page, or some heads of one token.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from .edits import TransferPlan
from .local_layout import LayoutError

Runs = list[tuple[int, int, int, int]]  # address, length and stride in bytes, blocks
Numbers = npt.NDArray[np.int32]

MAX_BLOCKS = 2**31 - 1


@dataclass(frozen=True)
class _BlockNumbers:
    """The blocks of a plan's group, of both sides at once, which have equally many of a page.

    `first` is where each run begins, `[2, runs, 1]`; `rows` are the blocks of page 0 in a run.
    """

    first: Numbers
    rows: Numbers

    def block_numbers(self, pages: Numbers) -> Numbers:
        """Of these pages, `[2, 1, pages]`, counted from where a run begins."""
        if self.rows.size == 1:
            return pages
        return (pages[..., None] * self.rows.size + self.rows).reshape(2, 1, -1)


@dataclass(frozen=True)
class PreparedPlan:
    """All blocks that a peer may be sent.

    Attributes:
        plan: What they were made from.
        src, dst: Runs of each side, which belong together in this order.
        numbered: Numbers of the blocks, an entry for each of the plan's groups.
        blocks_per_page: How many blocks a page has, of all runs.
    """

    plan: TransferPlan
    src: Runs
    dst: Runs
    numbered: tuple[_BlockNumbers, ...]
    blocks_per_page: int

    def blocks(self, src_pages: npt.ArrayLike, dst_pages: npt.ArrayLike) -> tuple[Numbers, Numbers]:
        """Numbers of the blocks that a request copies, from and to, `[blocks]`.

        Raises:
            LayoutError: As `TransferPlan.copies`.
        """
        pages = np.array(self.plan.validate_pages(src_pages, dst_pages), dtype=np.int32)
        numbers, end = np.empty((2, self.blocks_per_page * pages.shape[1]), dtype=np.int32), 0
        for group in self.numbered:  # each number is written once
            block_numbers = group.block_numbers(pages[:, None])
            shape = (2, group.first.shape[1], block_numbers.shape[2])
            start, end = end, end + shape[1] * shape[2]
            np.add(group.first, block_numbers, out=numbers[:, start:end].reshape(shape))
        return numbers[0], numbers[1]


def prepare(plan: TransferPlan, src_pages: int, dst_pages: int) -> PreparedPlan:
    """For a transfer plan; how many pages each side has, where the plan does not know.

    Raises:
        LayoutError: More blocks than 32 bits can number.
    """
    pages = (plan.src_pages or src_pages, plan.dst_pages or dst_pages)
    plan = replace(plan, src_pages=pages[0], dst_pages=pages[1])
    blocks = max(pages) * sum(group.src.size * group.rows for group in plan.groups)
    if blocks > MAX_BLOCKS:
        raise LayoutError(
            f"{blocks} blocks of KV on one side, and at most {MAX_BLOCKS} can be named"
        )
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
        # If both sides had one page.
        starts = blocks_per_page + np.arange(group.src.size) * group.rows
        first = np.array(pages)[:, None, None] * starts[:, None]
        rows = np.arange(group.rows, dtype=np.int32)
        numbered.append(_BlockNumbers(first.astype(np.int32), rows))
        blocks_per_page += starts.size * group.rows
    return PreparedPlan(plan, src, dst, tuple(numbered), blocks_per_page)
