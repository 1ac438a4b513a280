"""Prefill: makes the queue's KV manager, and notifies decode of requests that it does not send."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from sglang.srt.disaggregation.base import BaseKVManager
from sglang.srt.disaggregation.pd.local_layout import make_kv_manager
from sglang.srt.disaggregation.pd.noted_requests import note_request, note_seconds
from sglang.srt.disaggregation.pd.refused_requests import answer_rejected, notify_refused
from sglang.srt.disaggregation.utils import DisaggregationMode, KVClassType, get_kv_class

if TYPE_CHECKING:
    from sglang.srt.disaggregation.prefill import (
        EnginePrefillBootstrapQueue,
        EngineSchedulerDisaggregationPrefillMixin,
        Req,
        ReqToMetadataIdxAllocator,
    )

RENAMED = (
    ("PrefillBootstrapQueue", "EnginePrefillBootstrapQueue"),
    ("SchedulerDisaggregationPrefillMixin", "EngineSchedulerDisaggregationPrefillMixin"),
)


def release_req_to_metadata_buffer(req: Req, allocator: ReqToMetadataIdxAllocator) -> None:
    """Frees the request's metadata slot; if the request was not sent, aborts its room."""
    slot = getattr(req, "metadata_buffer_index", None)
    if slot is not None and slot >= 0:
        allocator.free(slot)
        req.metadata_buffer_index = -1
    if hasattr(req.disagg_kv_sender, "abandon"):
        req.disagg_kv_sender.abandon()


class PrefillBootstrapQueue(EnginePrefillBootstrapQueue):
    def _init_kv_manager(self) -> BaseKVManager:
        """Registers this rank's pools with the transfer backend and starts its KV manager."""
        kv_args = get_kv_class(self.transfer_backend, KVClassType.KVARGS)()
        kv_args.engine_rank = self.tp_rank
        kv_args.decode_tp_size = self.decode_tp_size // self.decode_dp_size
        kv_args.prefill_pp_size = self.pp_size
        kv_args.prefill_start_layer = self.token_to_kv_pool.start_layer
        return make_kv_manager(self, kv_args, DisaggregationMode.PREFILL)

    def add(self, req: Req, num_kv_heads: int) -> None:
        """Queues a request. Extends the engine's: notifies decode of a request that is refused.

        Also ends a request that has been rejected already, see `answer_rejected`.
        """
        if not answer_rejected(self.scheduler, req):
            super().add(req, num_kv_heads)
        note_request(self.kv_manager, req)
        if hasattr(self.kv_manager, "close_failed_room"):  # not Mori's, which cannot notify decode
            notify_refused(self.kv_manager, req)

    def pop_bootstrapped(self, *given, **options):
        """Returns requests that may start. Extends the engine's: notes if that takes long."""
        start = time.monotonic()
        found = super().pop_bootstrapped(*given, **options)
        note_seconds(self.kv_manager, "bootstrap", start)
        return found


class SchedulerDisaggregationPrefillMixin(EngineSchedulerDisaggregationPrefillMixin):
    def process_disagg_prefill_inflight_queue(self, *given, **options) -> list[Req]:
        """Returns requests that are sent. Extends the engine's: notes if that takes long."""
        start = time.monotonic()
        done = super().process_disagg_prefill_inflight_queue(*given, **options)
        note_seconds(self.disagg_prefill_bootstrap_queue.kv_manager, "inflight", start)
        return done
