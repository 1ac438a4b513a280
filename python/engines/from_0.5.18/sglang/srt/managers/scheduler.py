"""Notifies decode of requests that prefill refuses for their priority, and notes long polls."""

import time
from typing import TYPE_CHECKING

from sglang.srt.disaggregation.pd.noted_requests import note_seconds
from sglang.srt.disaggregation.pd.refused_requests import notify_refused
from sglang.srt.disaggregation.utils import DisaggregationMode

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import EngineScheduler, Req

RENAMED = (("Scheduler", "EngineScheduler"),)


class Scheduler(EngineScheduler):
    def _set_or_validate_priority(self, req: Req) -> bool:
        """Checks a request's priority; returns False if it refuses the request.

        Extends the engine's: on prefill, notifies decode of the refusal.
        """
        is_accepted = super()._set_or_validate_priority(req)
        if not is_accepted and self.disaggregation_mode == DisaggregationMode.PREFILL:
            manager = self.disagg_prefill_bootstrap_queue.kv_manager
            notify_refused(manager, req, "this server does not accept priorities")
        return is_accepted

    def process_disagg_prefill_inflight_queue(self, *given, **options) -> "list[Req]":
        """Returns requests that are sent. Extends the engine's: notes if that takes long."""
        start = time.monotonic()
        done = super().process_disagg_prefill_inflight_queue(*given, **options)
        note_seconds(self.disagg_prefill_bootstrap_queue.kv_manager, "inflight", start)
        return done
