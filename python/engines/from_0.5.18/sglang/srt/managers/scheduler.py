"""Notes when the scheduler takes long for the transfers under way."""

import time
from typing import TYPE_CHECKING

from sglang.srt.disaggregation.pd.noted_requests import note_seconds

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import EngineScheduler, Req

RENAMED = (("Scheduler", "EngineScheduler"),)


class Scheduler(EngineScheduler):
    def process_disagg_prefill_inflight_queue(self, *given, **options) -> "list[Req]":
        """Returns requests that are sent. Extends the engine's: notes if that takes long."""
        start = time.monotonic()
        done = super().process_disagg_prefill_inflight_queue(*given, **options)
        note_seconds(self.disagg_prefill_bootstrap_queue.kv_manager, "inflight", start)
        return done
