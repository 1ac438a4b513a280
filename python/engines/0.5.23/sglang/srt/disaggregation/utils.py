"""Describes this rank's registered buffers, and slices recurrent state between TP sizes."""

from __future__ import annotations

from typing import TYPE_CHECKING, List, Optional, Tuple

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


def compute_mamba_state_slice_blocks(
    src_dim: int,
    dst_dim: int,
    src_attn_tp_size: int,
    dst_attn_tp_size: int,
    dst_tp_rank_in_group: int,
    local_tp_rank_in_group: int,
    conv_shard_groups: Optional[List[int]] = None,
) -> List[Tuple[int, int, int]]:
    """Returns the channels of one state to copy between TP sizes, as (from, to, count).

    Extends the engine's: supports Mamba 2 models with one group, whose B and C are on every rank.

    Args:
        src_dim, dst_dim: Channels of the state on a rank of each side.
        conv_shard_groups: Channels of each convolution in the whole model.
    """
    prefill = local_tp_rank_in_group, src_attn_tp_size
    decode = dst_tp_rank_in_group, dst_attn_tp_size
    sides = (src_attn_tp_size, src_dim), (dst_attn_tp_size, dst_dim)
    if conv_shard_groups and all(replicates_bc(conv_shard_groups, *side) for side in sides):
        return slice_blocks_with_shared_bc(conv_shard_groups, prefill, decode)
    return engine_compute_mamba_state_slice_blocks(
        src_dim=src_dim,
        dst_dim=dst_dim,
        src_attn_tp_size=src_attn_tp_size,
        dst_attn_tp_size=dst_attn_tp_size,
        dst_tp_rank_in_group=dst_tp_rank_in_group,
        local_tp_rank_in_group=local_tp_rank_in_group,
        conv_shard_groups=conv_shard_groups,
    )


def setup_state_kv_args(
    kv_args: KVArgs, token_to_kv_pool, draft_token_to_kv_pool=None, total_kv_layers=None, **more
) -> None:
    """Registers state buffers, after KV. Extends the engine's: describes all of them.

    Args:
        total_kv_layers: Layers of the whole target model.
    """
    pools = (token_to_kv_pool, draft_token_to_kv_pool)
    engine_setup_state_kv_args(kv_args, *pools, total_kv_layers, **more)
    set_local_layout(kv_args, *pools, total_kv_layers)
