"""The decode queue's KV manager, set up through `utils`."""

from __future__ import annotations

from sglang.srt.disaggregation.base import BaseKVManager
from sglang.srt.disaggregation.pd.local_layout import make_kv_manager
from sglang.srt.disaggregation.utils import (
    DisaggregationMode,
    KVClassType,
    get_kv_class,
)
from sglang.srt.layers.dp_attention import get_attention_tp_size


class DecodePreallocQueue:
    def _init_kv_manager(self) -> BaseKVManager:
        """Registers this rank's pools with the transfer backend and starts its KV manager."""
        kv_args = get_kv_class(self.transfer_backend, KVClassType.KVARGS)()
        kv_args.decode_tp_size = get_attention_tp_size()
        kv_args.engine_rank = self.tp_rank % kv_args.decode_tp_size
        kv_args.prefill_pp_size = self.prefill_pp_size
        return make_kv_manager(self, kv_args, DisaggregationMode.DECODE)
