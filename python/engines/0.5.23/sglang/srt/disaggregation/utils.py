"""Recurrent state between TP sizes."""

from typing import TYPE_CHECKING, List, Optional, Tuple

from sglang.srt.disaggregation.kv_layout.convolutions import blocks_of_shared_group, shares_group

if TYPE_CHECKING:
    from sglang.srt.disaggregation.utils import blocks_of_parts_cut_alike

RENAMED = (("compute_mamba_state_slice_blocks", "blocks_of_parts_cut_alike"),)


def compute_mamba_state_slice_blocks(
    *, conv_shard_groups: Optional[List[int]] = None, **given: int
) -> List[Tuple[int, int, int]]:
    """Channels to copy of one state between TP sizes: (from, to, how many); the engine's, but for
    a Mamba 2 model with a single group, whose B and C every rank has whole.

    given: each side's TP rank and size, and channels (`src_dim`, `dst_dim`), by the engine's names.
    """
    prefill = given["local_tp_rank_in_group"], given["src_attn_tp_size"]
    decode = given["dst_tp_rank_in_group"], given["dst_attn_tp_size"]
    sides = (prefill[1], given["src_dim"]), (decode[1], given["dst_dim"])
    if conv_shard_groups and all(shares_group(conv_shard_groups, *side) for side in sides):
        return blocks_of_shared_group(conv_shard_groups, prefill, decode)
    return blocks_of_parts_cut_alike(conv_shard_groups=conv_shard_groups, **given)
