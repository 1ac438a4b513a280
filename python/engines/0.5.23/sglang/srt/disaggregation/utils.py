"""What this rank's registered buffers hold, and recurrent state between TP sizes."""

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
    *, conv_shard_groups: Optional[List[int]] = None, **given: int
) -> List[Tuple[int, int, int]]:
    """Channels to copy of one state between TP sizes: (from, to, how many); the engine's, but for
    a Mamba 2 model with a single group, whose B and C every rank has whole.

    given: each side's TP rank and size, and channels (`src_dim`, `dst_dim`), by the engine's names.
    """
    prefill = given["local_tp_rank_in_group"], given["src_attn_tp_size"]
    decode = given["dst_tp_rank_in_group"], given["dst_attn_tp_size"]
    sides = (prefill[1], given["src_dim"]), (decode[1], given["dst_dim"])
    if conv_shard_groups and all(replicates_bc(conv_shard_groups, *side) for side in sides):
        return slice_blocks_with_shared_bc(conv_shard_groups, prefill, decode)
    return engine_compute_mamba_state_slice_blocks(conv_shard_groups=conv_shard_groups, **given)


def setup_state_kv_args(
    kv_args: KVArgs, token_to_kv_pool, draft_token_to_kv_pool=None, total_kv_layers=None, **more
) -> None:
    """Register state, as the engine does; KV is registered by now, and all of it is described.

    Args:
        total_kv_layers: Layers of the whole target model.
    """
    pools = (token_to_kv_pool, draft_token_to_kv_pool)
    engine_setup_state_kv_args(kv_args, *pools, total_kv_layers, **more)
    set_local_layout(kv_args, *pools, total_kv_layers)
