"""A plan for a transport that is told of all pages beforehand, and of a request by their numbers.

    run (one for each buffer and side)         blocks, numbered through all runs
    k, layer 0: address, length, stride, 3     0 1 2
    v, layer 0: address, length, stride, 3     3 4 5        page 1 of all buffers: blocks 1 and 4

A block is what a plan copies at a time: a whole page, or some heads of one token.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .plan import CopyGroup, Ints, TransferPlan

Runs = list[tuple[int, int, int, int]]  # address, length and stride in bytes, blocks


@dataclass(frozen=True)
class PreparedPlan:
    """All blocks that a peer may be sent.

    Attributes:
        plan: What they were made from.
        src, dst: Runs of each side, which belong together in this order.
        pages: Pages that are prepared, of each side.
    """

    plan: TransferPlan
    src: Runs
    dst: Runs
    pages: tuple[int, int]

    def blocks(
        self, src_pages: npt.ArrayLike, dst_pages: npt.ArrayLike
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """Numbers of the blocks that a request copies, from and to, `[blocks]`.

        Raises:
            LayoutError: As `TransferPlan.copies`.
        """
        src, dst = self.plan.checked(src_pages, dst_pages)
        numbers = tuple(
            _numbers(self.plan.groups, pages, held) for pages, held in zip((src, dst), self.pages)
        )
        return numbers[0], numbers[1]


def prepare(plan: TransferPlan, src_pages: int, dst_pages: int) -> PreparedPlan:
    """For a transfer plan; how many pages each side has, where the plan does not know.

    Blocks are numbered in 32 bits.
    """
    pages = (plan.src_pages or src_pages, plan.dst_pages or dst_pages)
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
    return PreparedPlan(plan, src, dst, pages)


def _numbers(groups: tuple[CopyGroup, ...], pages: Ints, held: int) -> npt.NDArray[np.int32]:
    """Of the blocks of these pages, of all runs of one side, where each has `held` pages."""
    parts, first = [np.empty(0, np.int32)], 0
    for group in groups:
        of_run = (pages[:, None] * group.rows + np.arange(group.rows)).reshape(-1)
        starts = first + np.arange(group.src.size) * (held * group.rows)
        parts.append((starts[:, None] + of_run).reshape(-1).astype(np.int32))
        first += group.src.size * held * group.rows
    return np.concatenate(parts)
