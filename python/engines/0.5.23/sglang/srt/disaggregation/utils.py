"""What this rank's registered buffers hold, and recurrent state between TP sizes."""

from __future__ import annotations

from typing import TYPE_CHECKING, List, Optional, Tuple

from sglang.srt.disaggregation.kv_layout.convolutions import blocks_of_shared_group, shares_group
from sglang.srt.disaggregation.pd.registered import describe

if TYPE_CHECKING:
    from sglang.srt.disaggregation.utils import (
        KVArgs,
        blocks_of_parts_cut_alike,
        engine_setup_state_kv_args,
    )

RENAMED = (
    ("compute_mamba_state_slice_blocks", "blocks_of_parts_cut_alike"),
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
    """Channels to copy of one state between TP sizes: (from, to, how many); the engine's, but for
    a Mamba 2 model with a single group, whose B and C every rank has whole.
    """
    sides = (src_attn_tp_size, src_dim), (dst_attn_tp_size, dst_dim)
    if conv_shard_groups and all(shares_group(conv_shard_groups, *side) for side in sides):
        return blocks_of_shared_group(
            conv_shard_groups,
            (local_tp_rank_in_group, src_attn_tp_size),
            (dst_tp_rank_in_group, dst_attn_tp_size),
        )
    return blocks_of_parts_cut_alike(
        src_dim,
        dst_dim,
        src_attn_tp_size,
        dst_attn_tp_size,
        dst_tp_rank_in_group,
        local_tp_rank_in_group,
        conv_shard_groups,
    )


def setup_state_kv_args(
    kv_args: KVArgs,
    token_to_kv_pool,
    draft_token_to_kv_pool=None,
    total_kv_layers: Optional[int] = None,
    req_to_token_pool=None,
) -> None:
    """Register state, as the engine does; KV is registered by now, and all of it is described.

    Args:
        total_kv_layers: Layers of the whole target model.
    """
    engine_setup_state_kv_args(
        kv_args,
        token_to_kv_pool,
        draft_token_to_kv_pool,
        total_kv_layers,
        req_to_token_pool=req_to_token_pool,
    )
    describe(kv_args, token_to_kv_pool, draft_token_to_kv_pool, total_kv_layers)
