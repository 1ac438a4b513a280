"""Recurrent state between TP sizes: which channels of a convolution's window go where."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, List, Optional, Tuple

from sglang.srt.disaggregation.kv_layout.convolutions import (
    replicates_bc,
    slice_blocks_with_shared_bc,
)

Blocks = List[Tuple[int, int, int]]


def slice_state(engine: Callable[..., Blocks], *args: Any, **options: Any) -> Blocks:
    """Returns the channels of one state to copy between TP sizes, as (from, to, count).

    Supports also Mamba 2 models with one group, whose B and C are on every rank.

    Args:
        engine: The engine's `compute_mamba_state_slice_blocks`, which `disaggregation/utils.py`
            calls this instead of; the other arguments are its own.
    """
    given = inspect.signature(engine).bind(*args, **options).arguments
    groups: Optional[List[int]] = given.get("conv_shard_groups")  # channels in the whole model
    prefill = given["local_tp_rank_in_group"], given["src_attn_tp_size"]
    decode = given["dst_tp_rank_in_group"], given["dst_attn_tp_size"]
    sides = (prefill[1], given["src_dim"]), (decode[1], given["dst_dim"])
    if groups and all(replicates_bc(groups, *side) for side in sides):
        return slice_blocks_with_shared_bc(groups, prefill, decode)
    return engine(*args, **options)
