"""Ascend A2: MemFabric's `device_rdma`, which accepts any batch and posts it into a bounded queue.

It does not wait for completions between copies, lets two threads post to one queue pair, and after
an error returns while copies that it posted before are still being written.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
from collections.abc import Callable
from typing import List

logger = logging.getLogger(__name__)

# The most copies in one call.
COPIES_VARIABLE = "SGLANG_PD_DEVICE_RDMA_COPIES"
# If 1, calls do not wait for each other.
CONCURRENT_CALLS_VARIABLE = "SGLANG_PD_DEVICE_RDMA_AT_ONCE"
DEFAULT_COPIES = 2048

# The process has one transfer engine.
_call_lock = threading.Lock()


def is_used() -> bool:
    """Whether this server's environment selects `device_rdma`."""
    return os.environ.get("ASCEND_MF_TRANSFER_PROTOCOL", "").strip().lower() == "device_rdma"


def max_copies_per_call() -> int:
    """Returns the most copies for one call to the transfer engine."""
    return _read_copies(os.environ.get(COPIES_VARIABLE, ""))


@functools.cache  # logs an invalid value once
def _read_copies(text: str) -> int:
    if text.isascii() and text.isdecimal() and int(text) > 0:
        return int(text)
    if text:
        logger.error(f"{COPIES_VARIABLE} is {text!r}, expected 1 or more; using {DEFAULT_COPIES}")
    return DEFAULT_COPIES


def transfer_serialized(
    transfer: Callable[[str, List[int], List[int], List[int]], int],
    session: str,
    src: List[int],
    dst: List[int],
    lengths: List[int],
) -> int:
    """Writes copies in calls that fit the queue, one at a time in this process.

    Args:
        transfer: The engine's function of the arguments that follow; returns a status.
        session: The decode session.
        src, dst, lengths: Source addresses, destination addresses and bytes of the copies.

    Returns:
        The first status that is not 0, after which no copy is started; otherwise 0.
    """
    at_most = max_copies_per_call()
    for start in range(0, len(src), at_most) or (0,):  # the engine gets an empty list, too
        part = slice(start, start + at_most)
        status = _call(transfer, session, src[part], dst[part], lengths[part])
        if status != 0:
            return status
    return 0


def _call(transfer: Callable[..., int], *copies) -> int:
    if os.environ.get(CONCURRENT_CALLS_VARIABLE) == "1":
        return transfer(*copies)
    with _call_lock:
        return transfer(*copies)
