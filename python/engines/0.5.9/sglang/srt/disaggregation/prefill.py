"""The prefill queue: its KV manager, wired through `utils`, and requests that leave it unsent."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.disaggregation.base import BaseKVManager
from sglang.srt.disaggregation.pd.describe import make_kv_manager
from sglang.srt.disaggregation.utils import (
    DisaggregationMode,
    KVClassType,
    get_kv_class,
)

if TYPE_CHECKING:
    from sglang.srt.disaggregation.prefill import Req, ReqToMetadataIdxAllocator


def release_req_to_metadata_buffer(req: Req, allocator: ReqToMetadataIdxAllocator) -> None:
    """Free the request's metadata slot; one that leaves unsent ends its room."""
    slot = getattr(req, "metadata_buffer_index", None)
    if slot is not None and slot >= 0:
        allocator.free(slot)
        req.metadata_buffer_index = -1
    if hasattr(req.disagg_kv_sender, "leave"):
        req.disagg_kv_sender.leave()


class PrefillBootstrapQueue:
    def _init_kv_manager(self) -> BaseKVManager:
        """Register this rank's pools with the transfer backend and start its KV manager."""
        kv_args = get_kv_class(self.transfer_backend, KVClassType.KVARGS)()
        kv_args.engine_rank = self.tp_rank
        kv_args.decode_tp_size = self.decode_tp_size // self.decode_dp_size
        kv_args.prefill_pp_size = self.pp_size
        kv_args.prefill_start_layer = self.token_to_kv_pool.start_layer
        return make_kv_manager(self, kv_args, DisaggregationMode.PREFILL)
