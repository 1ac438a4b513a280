"""Host memory that copies of KV reuse, because pinning a block takes longer than filling it.

A copy is dropped, without notice, when its request has been loaded or aborted (`del
req.kv_cache_cpu`). So a block belongs to an owner, and is free when the owner is gone. Free blocks
are kept, at most what was in use at one time in the last minutes. A thread releases the rest, block
by block, because the scheduler waits while the driver unpins one.
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

# Blocks that stay free this long are released one after the other, with a pause in between.
IDLE_SECONDS = 120.0
PAUSE_SECONDS = 0.2
# torch_npu's function, which is not public, to free the unused pinned memory that torch caches.
EMPTY_CACHE = "_npu_hostEmptyCache"

Kind = Tuple[int, bool]

# By bytes, and whether they are pinned. Garbage collection may return a block on any thread, in the
# middle of any statement: a list's `append` and `pop` tolerate that, a lock would not.
_free: DefaultDict[Kind, List[torch.Tensor]] = defaultdict(list)
# The lowest number of free blocks since the last call of `idle_kinds`.
_fewest: DefaultDict[Kind, int] = defaultdict(int)
_release_threads: List[threading.Thread] = []


def allocate(owner: object, nbytes: int, largest: int, pinned: bool) -> torch.Tensor:
    """Returns `nbytes` of host memory as uint8, which is reused once `owner` is gone.

    Args:
        owner: An object that allows weak references and lives while the memory is used.
        nbytes: From 1 to `largest`.
        largest: Bytes of the usual block; smaller ones are powers of two, to have few sizes.
        pinned: Whether a device reads and writes it. If pinning fails, it is not pinned.
    """
    size = min(largest, 1 << (nbytes - 1).bit_length())
    block = _pop_free(size, pinned)
    if block is None:
        block = _new_block(size, pinned)
    if block is None:  # not kept: the next copy may get pinned memory again
        return torch.empty(nbytes, dtype=torch.uint8)
    weakref.finalize(owner, _free[size, pinned].append, block).atexit = False
    if not _release_threads:
        thread = threading.Thread(target=_release_idle_blocks, name="HostBlocks", daemon=True)
        try:
            thread.start()
            _release_threads.append(thread)
        except RuntimeError as error:  # out of threads; the scheduler must go on
            logger.warning(f"Free pinned memory is not released yet: {error}")
    return block[:nbytes]


def idle_kinds() -> List[Kind]:
    """Returns the kind of each block that stayed free since the last call."""
    kinds = []
    for kind, free in list(_free.items()):
        kinds += [kind] * min(_fewest[kind], len(free))
        _fewest[kind] = len(free)
    return kinds


def _release_idle_blocks() -> None:
    while True:
        time.sleep(IDLE_SECONDS)
        for kind in idle_kinds():
            try:
                release_block(kind)
            except Exception:
                logger.exception("Pinned memory could not be released")
            time.sleep(PAUSE_SECONDS)


def release_block(kind: Kind) -> None:
    """Releases the memory of one free block to the system, if one is free."""
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
    except IndexError:  # possibly because another thread was faster
        block = None
    _fewest[kind] = min(_fewest[kind], len(_free[kind]))
    return block


def _new_block(size: int, pinned: bool) -> Optional[torch.Tensor]:
    try:
        return torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
    except RuntimeError as error:
        if not pinned:
            raise
        logger.warning(f"Could not pin memory for KV of a retracted request: {error}")
        return None
