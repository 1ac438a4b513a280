"""Decode: interleaves KV heads that arrived as whole rows, before a request is scheduled.

    the last part has arrived    ->    a thread interleaves block after block, buffer after buffer
    the request is polled              done: it is scheduled; failed: it fails
    the request is aborted             the thread stops after the buffer that it is at

`kv_layout.permutation` has the rule. Nobody reads the pages before their request is scheduled.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Dict, Iterable, List, Optional, Tuple

import numpy as np
import numpy.typing as npt
import torch
from sglang.srt.disaggregation.base.conn import KVArgs
from sglang.srt.disaggregation.kv_layout import (
    Permutation,
    Unit,
    make_permutations,
    page_slots,
    split_unit,
)
from sglang.srt.disaggregation.pd.memory_registration import flatten
from sglang.srt.disaggregation.pd.pool_views import WORDS
from sglang.srt.disaggregation.pd.side_stream import side_stream

logger = logging.getLogger(__name__)

# A permutation, the buffers that it is for, and pages of a block of a unit.
Step = Tuple[Permutation, Sequence[torch.Tensor], npt.NDArray[np.int64]]


def interleave(rows: torch.Tensor, slots: torch.Tensor, one: Permutation) -> None:
    """Interleaves a block of one buffer in place; see `Permutation.apply`.

    Args:
        rows: The buffer, uint8, `[slots, bytes per row]`.
        slots: The block's slots in order, int64, `[tokens]`, on the buffer's device.
    """
    words = rows.view(WORDS[one.word])
    size = words.element_size()
    widths = [width // size for width in one.widths]
    arrived = words.index_select(0, slots).view(-1)
    if len(set(widths)) == 1:
        parts = arrived.view(len(widths), len(slots), widths[0]).transpose(0, 1)
    else:
        parts = arrived.split([len(slots) * width for width in widths])
        parts = torch.cat([part.view(len(slots), -1) for part in parts], dim=1)
    words.index_copy_(0, slots, parts.reshape(len(slots), -1))


class InterleavingJob:
    """One request's interleaving, by a thread."""

    def __init__(self, steps: Sequence[Step], page_size: int):
        self.steps, self.page_size = steps, page_size
        self.is_cancelled = False
        self.result: Optional[Future[None]] = None

    def run(self) -> None:
        """Interleaves all buffers, or stops once the job is cancelled."""
        for one, buffers, pages in self.steps:
            slots = torch.from_numpy(page_slots(pages, self.page_size))
            for pages_of_buffer in buffers:
                if self.is_cancelled:
                    return
                slots = slots.to(pages_of_buffer.device)
                rows = pages_of_buffer.view(len(pages_of_buffer) * self.page_size, -1)
                interleave(rows, slots, one)

    def is_done(self) -> bool:
        """Returns whether the pages may be read. Raises what stopped the thread."""
        if self.is_cancelled:
            raise RuntimeError("the request was aborted")
        if not self.result.done():
            return False
        self.result.result()
        return True

    def cancel(self) -> None:
        """Returns once the thread writes no more to the request's pages."""
        self.is_cancelled = True
        if not self.result.cancel():
            with contextlib.suppress(Exception):
                self.result.result()


class Interleaver:
    """A decode rank's thread, and its permutations by prefill TP size."""

    def __init__(self, args: KVArgs):
        self.args = args
        self.permutations: Dict[int, List[Tuple[Tuple[Permutation, ...], List[torch.Tensor]]]] = {}
        self.executor = ThreadPoolExecutor(1, thread_name_prefix="interleaving")

    def start(
        self,
        prefill_tp: int,
        units: Iterable[Unit],
        pages: npt.NDArray[np.int32],
        state_pages: Optional[Sequence[int]],
    ) -> InterleavingJob:
        """Starts to interleave what a request has received.

        Args:
            prefill_tp: Prefill's attention TP size.
            units: The chunks that prefill has sent, as `[first, end)` of `pages`.
            pages: This rank's pages that the request has received, `[pages]`.
            state_pages: Its pages of state, which are one unit; None if it has none.
        """
        kv, state = self._permutations(prefill_tp)
        page_size = self.args.layout.page_size
        sent = [(kv, pages[first:end]) for first, end in units]
        sent += [] if state_pages is None else [(state, state_pages)]
        steps = [
            (one, [views[i] for i in one.buffers], block)
            for (permutations, views), unit in sent
            if len(unit)
            for block in split_unit(np.asarray(unit, np.int64), page_size)
            for one in permutations
        ]
        job = InterleavingJob(steps, page_size)
        job.result = self.executor.submit(self._run, job)
        return job

    def _permutations(self, prefill_tp: int):
        """Returns the permutations and views of KV, and those of state."""
        if prefill_tp not in self.permutations:
            args, layout = self.args, self.args.layout
            state_ptrs = flatten(args.state_data_ptrs)
            self.permutations[prefill_tp] = [
                (make_permutations(layout, buffers, ptrs, prefill_tp), views)
                for buffers, ptrs, views in (
                    (layout.kv, args.kv_data_ptrs, args.views.kv),
                    (layout.state, state_ptrs, args.views.state),
                )
            ]
        return self.permutations[prefill_tp]

    def _run(self, job: InterleavingJob) -> None:
        with torch.inference_mode(), side_stream(self.args.views.device):
            job.run()
