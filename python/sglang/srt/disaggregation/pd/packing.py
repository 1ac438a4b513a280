"""Prefill: packs the KV heads that one decode rank holds into whole rows, and sends these.

    pool, tokens 4 5 6    a0 b0 | a1 b1 | a2 b2
    packing buffer        b0 b1 b2                 one copy, to a decode rank that holds only b

For each unit a worker borrows two halves of a region: it fills one while the other is sent.
`kv_layout.packed` has the rule.
"""

from __future__ import annotations

import itertools
import logging
import math
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from sglang.srt.disaggregation.base.conn import KVArgs
from sglang.srt.disaggregation.kv_layout import (
    Copies,
    LayoutError,
    PackedPlan,
    PackingRound,
)
from sglang.srt.disaggregation.pd.memory_registration import PAGE_BYTES, Region
from sglang.srt.disaggregation.pd.packed_mode import MEMORY_VARIABLE, read_packing_bytes
from sglang.srt.disaggregation.pd.pool_views import WORDS, PoolViews
from sglang.srt.disaggregation.pd.side_stream import side_stream

logger = logging.getLogger(__name__)


def pack(
    one: PackingRound, views: Sequence[torch.Tensor], page_size: int, to: torch.Tensor
) -> None:
    """Packs a round's rows.

    Args:
        views: The plan's buffers on this rank, uint8, `[pages, bytes per page]`.
        to: The packing buffer, uint8, on the buffers' device.
    """
    group, dtype = one.group, WORDS[one.group.word]
    row = views[group.buffers[0]].shape[1] // page_size
    # As many bytes at a time as all rows and what is packed of them consist of: usually all of it.
    step = math.gcd(row, group.start, group.length)
    first = one.slots[:, None] * (row // step) + group.start // step
    steps = torch.from_numpy((first + np.arange(group.length // step)).reshape(-1)).to(to.device)
    size = len(one.slots) * group.length
    for number, buffer in enumerate(group.buffers):
        both = (views[buffer], to[number * size : (number + 1) * size])
        source, packed = (one.view(dtype).view(-1, step // dtype.itemsize) for one in both)
        torch.index_select(source, 0, steps, out=packed)


@dataclass(eq=False)
class Loan:
    """The region that a unit is packed into."""

    halves: tuple[torch.Tensor, torch.Tensor]


class Worker(threading.local):
    """What the calling thread has borrowed for its unit; None if it packs nothing."""

    loan: Loan | None = None


def sizes_of_halves(nbytes: int, workers: int) -> list[int]:
    """Returns the bytes of one half of each region, the largest last.

    One region has half of the memory, because a transfer engine takes less time for few large
    rounds, and mostly one worker packs; the others share the rest.
    """
    others = [nbytes // (4 * (workers - 1))] * (workers - 1) if workers > 1 else []
    largest = nbytes // (4 if others else 2)
    return [size // 64 * 64 for size in (*others, largest)]


class PackingBuffers:
    """A prefill rank's memory for packed rows, which its transfer engine must register.

    Attributes:
        memory: uint8, on the pools' device.
        free: Regions that no worker has borrowed, the largest last.
    """

    def __init__(self, views: PoolViews, page_size: int, nbytes: int, workers: int):
        """Allocates the memory: 2 MiB pages, none of which holds anything else (MemFabric).

        Args:
            workers: How many threads will call `copies`.
        """
        self.views, self.page_size = views, page_size
        size = max(nbytes // PAGE_BYTES, 1) * PAGE_BYTES
        held = torch.empty(size + PAGE_BYTES, dtype=torch.uint8, device=views.device)
        first = -held.data_ptr() % PAGE_BYTES
        self.memory = held[first : first + size]
        self.free: list[tuple[torch.Tensor, torch.Tensor]] = []
        at = 0
        for half in sizes_of_halves(size, workers):
            region = self.memory[at : at + 2 * half]
            self.free.append((region[:half], region[half:]))
            at += 2 * half
        self.worker = Worker()
        self.lock = threading.Lock()
        self.executor = ThreadPoolExecutor(workers, thread_name_prefix="packing")

    @property
    def region(self) -> Region:
        """The memory's name, address and bytes."""
        return "packing buffer", self.memory.data_ptr(), self.memory.numel()

    def copies(
        self,
        what: Literal["kv", "state"],
        plan: PackedPlan,
        src_pages: npt.ArrayLike,
        dst_pages: npt.ArrayLike,
    ) -> Iterator[tuple[Copies, bool]]:
        """Yields the copies of one unit: of whole rows, and then one packed round after another.

        With each, whether they are the last. The caller must have sent a round before it asks for
        the next, which is packed meanwhile.

        Args:
            what: Of which buffers the plan is.
            src_pages, dst_pages: Pages of one unit, `[pages]`.

        Raises:
            LayoutError: As for `PackedPlan.rounds`.
        """
        loan, views = self._borrow(), getattr(self.views, what)
        packing: Future[Copies] | None = None
        try:
            rounds = plan.rounds(src_pages, dst_pages, loan.halves[0].numel())
            yield plan.copies(src_pages, dst_pages), not rounds
            for one, half in zip([*rounds, None], itertools.cycle(loan.halves)):
                packed = packing
                packing = one and self.executor.submit(self._pack, one, views, half)
                if packed is not None:
                    yield packed.result(), packing is None
        finally:  # another unit will be packed into these halves, also if the caller stops early
            if packing is not None and not packing.cancel():
                wait([packing])
            self._give_back(loan)

    def _pack(self, one: PackingRound, views: list[torch.Tensor], half: torch.Tensor) -> Copies:
        with torch.inference_mode(), side_stream(half.device):
            pack(one, views, self.page_size, half)
        return one.copies(half.data_ptr())

    def _borrow(self) -> Loan:
        """Lends the largest free region; again the same one if the thread's last unit is not over.

        It is not over if it failed and is kept, as by an error's traceback.
        """
        if self.worker.loan is not None:
            halves = self.worker.loan.halves
        else:
            with self.lock:
                halves = self.free.pop()
        self.worker.loan = Loan(halves)
        return self.worker.loan

    def _give_back(self, loan: Loan) -> None:
        if self.worker.loan is not loan:
            return  # the region is lent again
        self.worker.loan = None
        with self.lock:
            self.free.append(loan.halves)
            self.free.sort(key=lambda halves: halves[0].numel())


def copies_of_unit(
    packing: PackingBuffers | None,
    what: Literal["kv", "state"],
    plan: PackedPlan,
    src_pages: npt.ArrayLike,
    dst_pages: npt.ArrayLike,
) -> Iterator[tuple[Copies, bool]]:
    """Yields the copies of one unit: see `PackingBuffers.copies`, which a plan may not need.

    Raises:
        LayoutError: As for `PackingBuffers.copies`; or there is no memory to pack in any more.
    """
    if not plan.packs:
        yield plan.copies(src_pages, dst_pages), True
        return
    if packing is None:
        raise LayoutError(
            "the transfer engine did not register the memory to pack KV heads in again; restart "
            f"this prefill server, with {MEMORY_VARIABLE}=0 if it cannot lock as much memory"
        )
    yield from packing.copies(what, plan, src_pages, dst_pages)


def make_packing_buffers(args: KVArgs, workers: int) -> PackingBuffers | None:
    """Returns memory to pack rows in; None if this prefill rank will send slices.

    Raises:
        ValueError: A variable of the patch set is wrong; the server must not start.
    """
    nbytes, views, layout = read_packing_bytes(), args.views, args.layout
    if not nbytes or layout is None or not layout.whole_rows:
        return None
    split = [one for one in (*layout.kv, *layout.state) if one.heads is not None]
    if all(buffer.heads.count == 1 for buffer in split):
        return None  # decode has whole rows
    row = max(buffer.page_bytes for buffer in split) // layout.page_size
    try:
        packing = PackingBuffers(views, layout.page_size, nbytes, workers)
        if (half := packing.free[0][0].numel()) < row:
            raise RuntimeError(f"a worker may get only {half} bytes at a time, and a row has {row}")
    except RuntimeError as error:  # or out of memory
        logger.warning(
            f"Too little memory to pack KV heads ({error}); they are sent token by token to decode "
            f"servers of a larger TP size. {MEMORY_VARIABLE} sets the size"
        )
        return None
    return packing
