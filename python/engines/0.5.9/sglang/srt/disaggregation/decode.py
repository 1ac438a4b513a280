"""The decode queue's KV manager, wired through `utils`."""

from __future__ import annotations

from sglang.srt.disaggregation.base import BaseKVManager
from sglang.srt.disaggregation.pd.describe import describe_kv_args, setup_kv_args
from sglang.srt.disaggregation.utils import (
    DisaggregationMode,
    KVClassType,
    get_kv_class,
    setup_state_kv_args,
)
from sglang.srt.layers.dp_attention import get_attention_tp_size


class DecodePreallocQueue:
    def _init_kv_manager(self) -> BaseKVManager:
        """Register this rank's pools with the transfer backend and start its KV manager."""
        kv_args = get_kv_class(self.transfer_backend, KVClassType.KVARGS)()
        kv_args.decode_tp_size = get_attention_tp_size()
        kv_args.engine_rank = self.tp_rank % kv_args.decode_tp_size
        kv_args.prefill_pp_size = self.prefill_pp_size
        pools = self.token_to_kv_pool, self.draft_token_to_kv_pool
        total_kv_layers = self.scheduler.model_config.num_hidden_layers
        setup_kv_args(kv_args, self.scheduler, *pools, self.metadata_buffers, self.pp_rank)
        setup_state_kv_args(kv_args, *pools, total_kv_layers)
        describe_kv_args(kv_args, self.scheduler, *pools)
        manager_class = get_kv_class(self.transfer_backend, KVClassType.MANAGER)
        server_args = self.scheduler.server_args
        return manager_class(kv_args, DisaggregationMode.DECODE, server_args, self.is_mla_backend)
