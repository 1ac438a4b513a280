"""The prefill queue's KV manager, wired through `setup_kv_args`."""

from __future__ import annotations

from sglang.srt.disaggregation.base import BaseKVManager
from sglang.srt.disaggregation.utils import (
    DisaggregationMode,
    KVClassType,
    get_kv_class,
    setup_kv_args,
)


class PrefillBootstrapQueue:
    def _init_kv_manager(self) -> BaseKVManager:
        """Register this rank's pools with the transfer backend and start its KV manager."""
        kv_args = get_kv_class(self.transfer_backend, KVClassType.KVARGS)()
        kv_args.engine_rank = self.tp_rank
        kv_args.decode_tp_size = self.decode_tp_size // self.decode_dp_size
        kv_args.prefill_pp_size = self.pp_size
        kv_args.prefill_start_layer = self.token_to_kv_pool.start_layer
        setup_kv_args(
            kv_args,
            self.scheduler,
            self.token_to_kv_pool,
            self.draft_token_to_kv_pool,
            self.metadata_buffers,
            self.pp_rank,
        )
        manager_class = get_kv_class(self.transfer_backend, KVClassType.MANAGER)
        server_args = self.scheduler.server_args
        return manager_class(kv_args, DisaggregationMode.PREFILL, server_args, self.is_mla_backend)
