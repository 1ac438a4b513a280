"""Fill `KVArgs` from the engine's pools, for prefill and decode alike.

Each `_init_kv_manager` calls `setup_kv_args`, `setup_state_kv_args` and then `pd.describe`.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Optional

from sglang.srt.disaggregation.kv_layout import keeps_own_state

if TYPE_CHECKING:
    from sglang.srt.disaggregation.base import KVArgs
    from sglang.srt.disaggregation.utils import FAILURE_PROB, MetadataBuffers, is_mla_backend
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.mem_cache.memory_pool import KVCache


def poll_and_all_reduce(pollers, gloo_group):
    """The state of each request that all ranks of the group agree on; see `agreement.vote`.

    Args:
        pollers: Senders or receivers, of the same requests in the same order on each rank.
    """
    from sglang.srt.disaggregation.base import KVPoll
    from sglang.srt.disaggregation.pd.agreement import vote

    polls = [
        KVPoll.Failed if random.random() < FAILURE_PROB else poller.poll() for poller in pollers
    ]
    return vote(pollers, polls, gloo_group)


def setup_kv_args(
    kv_args: KVArgs,
    scheduler: Scheduler,
    token_to_kv_pool: KVCache,
    draft_token_to_kv_pool: Optional[KVCache],
    metadata_buffers: MetadataBuffers,
    pp_rank: int,
) -> None:
    """Register KV, draft KV and aux buffers in `kv_args`, and say which rank this is.

    The draft's pages have the target's indices, so its buffers follow the target's in one list.
    """
    ptrs, lens, item_lens = [], [], []
    for pool in (token_to_kv_pool, draft_token_to_kv_pool):
        if pool is not None:
            for whole, part in zip((ptrs, lens, item_lens), pool.get_contiguous_buf_infos()):
                whole.extend(part)
    kv_args.kv_data_ptrs, kv_args.kv_data_lens, kv_args.kv_item_lens = ptrs, lens, item_lens
    kv_args.aux_data_ptrs, kv_args.aux_data_lens, kv_args.aux_item_lens = (
        metadata_buffers.get_buf_infos()
    )
    kv_args.pp_rank = pp_rank
    kv_args.system_dp_rank = scheduler.dp_rank
    kv_args.page_size = token_to_kv_pool.page_size
    kv_args.ib_device = scheduler.server_args.disaggregation_ib_device
    kv_args.gpu_id = scheduler.gpu_id
    kv_args.total_kv_head_num = scheduler.model_config.get_total_num_kv_heads()
    if not is_mla_backend(token_to_kv_pool):
        kv_args.kv_head_num = token_to_kv_pool.head_num


def setup_state_kv_args(
    kv_args: KVArgs,
    token_to_kv_pool: KVCache,
    draft_token_to_kv_pool: Optional[KVCache] = None,
    total_kv_layers: Optional[int] = None,
) -> None:
    """Register what is kept beside KV: index keys, sliding windows, recurrent state.

    A draft pool of the target's kind adds its own after the target's (PR #23539). On an NPU index
    keys are KV's third group and not state, so there the groups are counted instead (PR #23893).

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
        if keeps_own_state(token_to_kv_pool, draft_token_to_kv_pool):
            pools.append(draft_token_to_kv_pool)
        for pool in pools:
            ptrs, lens, item_lens = pool.get_state_buf_infos()
            kv_args.state_data_ptrs += ptrs
            kv_args.state_data_lens += lens
            kv_args.state_item_lens += item_lens
            if hasattr(pool, "get_state_dim_per_tensor"):
                kv_args.state_dim_per_tensor += pool.get_state_dim_per_tensor()
