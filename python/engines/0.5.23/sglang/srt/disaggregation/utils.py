"""Describes this rank's registered buffers, and slices recurrent state between TP sizes."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, List, Optional, Tuple

from sglang.srt.disaggregation.kv_layout.convolutions import (
    replicates_bc,
    slice_blocks_with_shared_bc,
)
from sglang.srt.disaggregation.pd.local_layout import set_local_layout

if TYPE_CHECKING:
    from sglang.srt.disaggregation.utils import (
        KVArgs,
        engine_compute_mamba_state_slice_blocks,
        engine_setup_state_kv_args,
    )

RENAMED = (
    ("compute_mamba_state_slice_blocks", "engine_compute_mamba_state_slice_blocks"),
    ("setup_state_kv_args", "engine_setup_state_kv_args"),
)


def compute_mamba_state_slice_blocks(*args: Any, **options: Any) -> List[Tuple[int, int, int]]:
    """Returns the channels of one state to copy between TP sizes, as (from, to, count).

    Extends the engine's, and takes its parameters: supports Mamba 2 models with one group, whose B
    and C are on every rank.
    """
    engine = engine_compute_mamba_state_slice_blocks
    given = inspect.signature(engine).bind(*args, **options).arguments
    groups: Optional[List[int]] = given.get("conv_shard_groups")  # channels in the whole model
    prefill = given["local_tp_rank_in_group"], given["src_attn_tp_size"]
    decode = given["dst_tp_rank_in_group"], given["dst_attn_tp_size"]
    sides = (prefill[1], given["src_dim"]), (decode[1], given["dst_dim"])
    if groups and all(replicates_bc(groups, *side) for side in sides):
        return slice_blocks_with_shared_bc(groups, prefill, decode)
    return engine(*args, **options)


def setup_state_kv_args(
    kv_args: KVArgs, token_to_kv_pool, draft_token_to_kv_pool=None, total_kv_layers=None, **more
) -> None:
    """Lists state buffers in `kv_args`. Extends the engine's: describes all buffers in it.

    Args:
        total_kv_layers: Layers of the whole target model.
    """
    pools = (token_to_kv_pool, draft_token_to_kv_pool)
    engine_setup_state_kv_args(kv_args, *pools, total_kv_layers, **more)
    set_local_layout(kv_args, *pools, total_kv_layers)
