"""This rank's KV buffers as `KVArgs` registers them, and what they hold, from its real pools."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Optional

from sglang.srt.disaggregation.kv_layout import (
    LayoutError,
    RankLayout,
    describe_pools,
    memory_kind,
)
from sglang.srt.runtime_context import get_parallel

if TYPE_CHECKING:
    from sglang.srt.disaggregation.base import KVArgs
    from sglang.srt.mem_cache.memory_pool import KVCache

logger = logging.getLogger(__name__)


def registered_layout(
    kv_args: KVArgs,
    token_to_kv_pool: KVCache,
    draft_token_to_kv_pool: Optional[KVCache],
    total_layers: int,
) -> Optional[RankLayout]:
    """KV buffers, target before draft; None for pools that the core does not know.

    For those the engine's own pairing stays: hybrids that give layer ids themselves, compressed
    MLA, layers that are split between context-parallel ranks.
    """
    pools = (token_to_kv_pool, draft_token_to_kv_pool)
    if kv_args.kv_layer_ids or getattr(token_to_kv_pool, "layer_shard_enabled", False):
        return None
    parallel = get_parallel()
    tp = (parallel.attn_tp_rank, parallel.attn_tp_size)
    total_heads = getattr(kv_args, "total_kv_head_num", None)
    try:
        kv = describe_pools(
            *pools, kv_args.kv_item_lens, kv_args.kv_data_lens, False, tp, total_heads, None
        )
    except (AttributeError, LayoutError) as error:
        logger.info(f"{type(token_to_kv_pool).__name__} is paired by the engine alone: {error}")
        return None
    return RankLayout(
        tp_rank=tp[0],
        tp_size=tp[1],
        pp_rank=kv_args.pp_rank,
        pp_size=parallel.pp_size,
        page_size=kv_args.page_size,
        dtype=kv_args.kv_cache_dtype_str,
        memory=memory_kind(token_to_kv_pool),
        total_layers=total_layers,
        kv=kv,
    )
