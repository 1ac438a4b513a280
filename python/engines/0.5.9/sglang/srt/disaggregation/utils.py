"""What both queues use: a status that all ranks agree on, and state in `KVArgs`.

`pd.local_layout.make_kv_manager` calls `setup_state_kv_args` before it describes the buffers.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from sglang.srt.disaggregation.kv_layout import has_separate_state

if TYPE_CHECKING:
    from sglang.srt.disaggregation.base import KVArgs
    from sglang.srt.disaggregation.utils import FAILURE_PROB
    from sglang.srt.mem_cache.memory_pool import KVCache


def poll_and_all_reduce(pollers, gloo_group):
    """Returns the status of each request that all ranks of the group agree on.

    See `rank_consensus.reduce_polls`.

    Args:
        pollers: Senders or receivers, for the same requests in the same order on each rank.
    """
    from sglang.srt.disaggregation.base import KVPoll
    from sglang.srt.disaggregation.pd.rank_consensus import poll, reduce_polls

    polls = [
        KVPoll.Failed if random.random() < FAILURE_PROB else poll(poller) for poller in pollers
    ]
    return reduce_polls(pollers, polls, gloo_group)


def setup_state_kv_args(
    kv_args: KVArgs,
    token_to_kv_pool: KVCache,
    draft_token_to_kv_pool: KVCache | None = None,
    total_kv_layers: int | None = None,
) -> None:
    """Records state in `kv_args`: index keys, sliding windows, recurrent state.

    A draft pool of the target's kind adds its state after the target's (PR #23539). On an NPU index
    keys are the third group of KV and not state, so `kv_args` has the number of groups instead
    (PR #23893).

    Args:
        total_kv_layers: Layers of the whole target model.
    """
    from sglang.srt.hardware_backend.npu.memory_pool_npu import NPUMLATokenToKVPool
    from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, NSATokenToKVPool
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

    kv_args.state_type = "none"
    kv_args.state_data_ptrs, kv_args.state_data_lens, kv_args.state_item_lens = [], [], []
    kv_args.state_dim_per_tensor = []
    if isinstance(token_to_kv_pool, NPUMLATokenToKVPool):
        kv_args.kv_buf_groups = 2 if token_to_kv_pool.index_k_buffer is None else 3
        kv_args.total_kv_layers = total_kv_layers
        return
    kinds = {"swa": SWAKVPool, "mamba": HybridLinearKVPool, "nsa": NSATokenToKVPool}
    for state_type, pool_class in kinds.items():
        if not isinstance(token_to_kv_pool, pool_class):
            continue
        kv_args.state_type = state_type
        pools = [token_to_kv_pool]
        if has_separate_state(token_to_kv_pool, draft_token_to_kv_pool):
            pools.append(draft_token_to_kv_pool)
        for pool in pools:
            ptrs, lens, item_lens = pool.get_state_buf_infos()
            kv_args.state_data_ptrs += ptrs
            kv_args.state_data_lens += lens
            kv_args.state_item_lens += item_lens
            if hasattr(pool, "get_state_dim_per_tensor"):
                kv_args.state_dim_per_tensor += pool.get_state_dim_per_tensor()
