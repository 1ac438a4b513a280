"""Host memory that copies of KV take in turns: to pin a block takes longer than to fill it.

A copy is dropped when its request has been loaded or aborted (`del req.kv_cache_cpu`), and nobody
says so; therefore a block is taken for an object, and is free when that object is gone. Free blocks
are kept: at most what was in use at one time of the last minutes. The rest is given back by a
thread, block by block, for the scheduler waits while the driver unpins one.
"""

import logging
import sys
import threading
import time
import weakref
from collections import defaultdict
from typing import DefaultDict, List, Optional, Tuple

import torch

logger = logging.getLogger(__name__)

# Blocks that were free all that time are given back, one after the other with a pause between.
IDLE_SECONDS = 120.0
PAUSE_SECONDS = 0.2
# Of torch_npu, which has no public name for it: what torch keeps of unused pinned memory is freed.
EMPTY_CACHE = "_npu_hostEmptyCache"

Kind = Tuple[int, bool]

# By bytes, and whether they are pinned. A block may come back from any thread, in the midst of any
# statement, when garbage is collected: a list's `append` and `pop` bear that, a lock would not.
_free: DefaultDict[Kind, List[torch.Tensor]] = defaultdict(list)
# The fewest that were free at a time since they were last counted.
_fewest: DefaultDict[Kind, int] = defaultdict(int)
_release_threads: List[threading.Thread] = []


def take(owner: object, nbytes: int, largest: int, pinned: bool) -> torch.Tensor:
    """Host memory of so many bytes, as uint8, which others get once `owner` is gone.

    Args:
        owner: Must have weak references, and live as long as the memory is read or written.
        nbytes: From 1 to `largest`.
        largest: Bytes of the usual block; smaller ones are powers of two, for few sizes.
        pinned: Whether a device reads and writes it. Where no more can be pinned, it is not.
    """
    size = min(largest, 1 << (nbytes - 1).bit_length())
    block = _pop_free(size, pinned)
    if block is None:
        block = _new_block(size, pinned)
    if block is None:  # not for the next copy, for which there may be pinned memory again
        return torch.empty(nbytes, dtype=torch.uint8)
    weakref.finalize(owner, _free[size, pinned].append, block).atexit = False
    if not _release_threads:
        _release_threads.append(
            threading.Thread(target=_release_idle_blocks, name="HostBlocks", daemon=True)
        )
        _release_threads[0].start()
    return block[:nbytes]


def idle_kinds() -> List[Kind]:
    """A kind for each block that was free ever since this was called last."""
    kinds = []
    for kind, free in list(_free.items()):
        kinds += [kind] * min(_fewest[kind], len(free))
        _fewest[kind] = len(free)
    return kinds


def _release_idle_blocks() -> None:
    while True:
        time.sleep(IDLE_SECONDS)
        for kind in idle_kinds():
            release_block(kind)
            time.sleep(PAUSE_SECONDS)


def release_block(kind: Kind) -> None:
    """Give the memory of one free block back to the system, if one is free."""
    block = _pop_free(*kind)
    if block is not None:
        del block
        empty = getattr(getattr(sys.modules.get("torch_npu"), "_C", None), EMPTY_CACHE, None)
        if empty is not None and kind[1]:
            empty()


def _pop_free(size: int, pinned: bool) -> Optional[torch.Tensor]:
    kind = (size, pinned)
    try:
        block = _free[kind].pop()
    except IndexError:  # also where another thread was quicker
        block = None
    _fewest[kind] = min(_fewest[kind], len(_free[kind]))
    return block


def _new_block(size: int, pinned: bool) -> Optional[torch.Tensor]:
    try:
        return torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
    except RuntimeError as error:
        if not pinned:
            raise
        logger.warning(f"KV of a retracted request goes to memory that is not pinned: {error}")
        return None
