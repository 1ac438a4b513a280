"""Recurrent state between TP sizes."""

from typing import TYPE_CHECKING, List, Optional, Tuple

from sglang.srt.disaggregation.kv_layout.convolutions import blocks_of_shared_group, shares_group

if TYPE_CHECKING:
    from sglang.srt.disaggregation.utils import blocks_of_parts_cut_alike

RENAMED = (("compute_mamba_state_slice_blocks", "blocks_of_parts_cut_alike"),)


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
