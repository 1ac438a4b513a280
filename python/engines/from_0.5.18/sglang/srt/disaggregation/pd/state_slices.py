"""Recurrent state between TP sizes: which channels of a convolution's window go where."""

from __future__ import annotations

from collections.abc import Callable
from typing import List, Optional, Tuple

from sglang.srt.disaggregation.kv_layout.convolutions import (
    replicates_bc,
    slice_blocks_with_shared_bc,
)

Blocks = List[Tuple[int, int, int]]


def slice_state(
    engine: Callable[..., Blocks], conv_shard_groups: Optional[List[int]], given: dict
) -> Blocks:
    """Returns the channels of one state to copy between TP sizes, as (from, to, count).

    Extends the engine's: supports Mamba 2 models with one group, whose B and C are on every rank.

    Args:
        conv_shard_groups: Channels of each convolution in the whole model.
        given: Each side's TP rank and size, and channels (`src_dim`, `dst_dim`), by the engine's
            names.
    """
    prefill = given["local_tp_rank_in_group"], given["src_attn_tp_size"]
    decode = given["dst_tp_rank_in_group"], given["dst_attn_tp_size"]
    sides = (prefill[1], given["src_dim"]), (decode[1], given["dst_dim"])
    if conv_shard_groups and all(replicates_bc(conv_shard_groups, *side) for side in sides):
        return slice_blocks_with_shared_bc(conv_shard_groups, prefill, decode)
    return engine(conv_shard_groups=conv_shard_groups, **given)
