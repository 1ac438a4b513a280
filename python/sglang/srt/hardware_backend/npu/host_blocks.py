"""Host memory that copies of KV take in turns: to pin a block takes longer than to fill it.

A copy is dropped when its request has been loaded or aborted (`del req.kv_cache_cpu`), and nobody
says so; therefore a block is taken for an object, and is free when that object is gone. Free blocks
are kept: at most what was in use at one time.
"""

import logging
import weakref
from collections import defaultdict
from typing import DefaultDict, List, Optional, Tuple

import torch

logger = logging.getLogger(__name__)

# By bytes, and whether they are pinned. A block may come back from any thread, in the midst of any
# statement, when garbage is collected: a list's `append` and `pop` bear that, a lock would not.
_free: DefaultDict[Tuple[int, bool], List[torch.Tensor]] = defaultdict(list)


def take(owner: object, nbytes: int, largest: int, pinned: bool) -> torch.Tensor:
    """Host memory of so many bytes, as uint8, which others get once `owner` is gone.

    Args:
        owner: Must have weak references, and live as long as the memory is read or written.
        nbytes: From 1 to `largest`.
        largest: Bytes of the usual block; smaller ones are powers of two, for few sizes.
        pinned: Whether a device reads and writes it. Where no more can be pinned, it is not.
    """
    size = min(largest, 1 << (nbytes - 1).bit_length())
    free = _free[size, pinned]
    block = free.pop() if free else _allocated(size, pinned)
    if block is None:  # not for the next copy, for which there may be pinned memory again
        return torch.empty(nbytes, dtype=torch.uint8)
    weakref.finalize(owner, free.append, block).atexit = False
    return block[:nbytes]


def _allocated(size: int, pinned: bool) -> Optional[torch.Tensor]:
    try:
        return torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
    except RuntimeError as error:
        if not pinned:
            raise
        logger.warning(f"KV of a retracted request goes to memory that is not pinned: {error}")
        return None
