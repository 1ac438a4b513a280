"""The prefill queue: its KV manager, wired through `utils`, and requests that it does not send."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.disaggregation.base import BaseKVManager
from sglang.srt.disaggregation.pd.local_layout import make_kv_manager
from sglang.srt.disaggregation.pd.refused_requests import notify_refused
from sglang.srt.disaggregation.utils import (
    DisaggregationMode,
    KVClassType,
    get_kv_class,
    prepare_abort,
)
from sglang.srt.managers.schedule_batch import FINISH_ABORT

if TYPE_CHECKING:
    from sglang.srt.disaggregation.prefill import (
        EnginePrefillBootstrapQueue,
        Req,
        ReqToMetadataIdxAllocator,
    )

RENAMED = (("PrefillBootstrapQueue", "EnginePrefillBootstrapQueue"),)


def release_req_to_metadata_buffer(req: Req, allocator: ReqToMetadataIdxAllocator) -> None:
    """Free the request's metadata slot; one that leaves unsent ends its room."""
    slot = getattr(req, "metadata_buffer_index", None)
    if slot is not None and slot >= 0:
        allocator.free(slot)
        req.metadata_buffer_index = -1
    if hasattr(req.disagg_kv_sender, "abandon"):
        req.disagg_kv_sender.abandon()


class PrefillBootstrapQueue(EnginePrefillBootstrapQueue):
    def _init_kv_manager(self) -> BaseKVManager:
        """Register this rank's pools with the transfer backend and start its KV manager."""
        kv_args = get_kv_class(self.transfer_backend, KVClassType.KVARGS)()
        kv_args.engine_rank = self.tp_rank
        kv_args.decode_tp_size = self.decode_tp_size // self.decode_dp_size
        kv_args.prefill_pp_size = self.pp_size
        kv_args.prefill_start_layer = self.token_to_kv_pool.start_layer
        return make_kv_manager(self, kv_args, DisaggregationMode.PREFILL)

    def add(self, req: Req, num_kv_heads: int) -> None:
        """As the engine's; decode hears of one that is refused.

        The engine computes one token for a request that is too long, and sends its KV to decode.
        """
        end = req.to_finish
        if isinstance(end, FINISH_ABORT):
            prepare_abort(req, end.message, status_code=end.status_code)
            self.scheduler.stream_output([req], req.return_logprob)
        else:
            super().add(req, num_kv_heads)
        notify_refused(self.kv_manager, req)
