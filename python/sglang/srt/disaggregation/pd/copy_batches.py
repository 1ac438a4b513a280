"""Hands copies to a transfer engine's synchronous calls."""

from __future__ import annotations

import sys
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, List

from sglang.srt.disaggregation.kv_layout import Copies
from sglang.srt.disaggregation.pd import device_rdma

# The most token slices in one call to the transfer engine; a chunk may have a million.
SLICE_BATCH = 16384


def write_copies(
    engine: Any,
    session: str,
    copies: Copies,
    executor: ThreadPoolExecutor,
    is_sliced: bool,
    in_threads: bool,
) -> int:
    """Writes copies to a decode session; returns the transfer engine's status, 0 for success.

    Makes one call, which is best over RDMA, unless there are more than `SLICE_BATCH` token slices,
    or `in_threads`.

    Args:
        is_sliced: Whether the copies may be of single tokens, as those of packed rows are between
            scattered pages of one token.
        in_threads: Whether the transport gains from concurrent calls, as NVLink does.
    """
    at_most = SLICE_BATCH if is_sliced else sys.maxsize
    if in_threads:
        at_most = min(at_most, max(1, -(-len(copies) // executor._max_workers)))

    def write(part: Copies) -> int:
        lists = part.lists()
        return engine.batch_transfer_sync(session, *lists) if lists[0] else 0

    parts = copies.split(at_most)
    if len(parts) == 1 or executor._max_workers == 1 or device_rdma.is_used():
        results = map(write, parts)  # one after the other, which needs no thread
    else:
        futures: List[Future] = []
        try:
            for part in parts:
                futures.append(executor.submit(write, part))
        finally:
            wait(futures)  # even if one fails or raises: pages must not be freed during a write
        results = [future.result() for future in futures]
    return next((status for status in results if status != 0), 0)
