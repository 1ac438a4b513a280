"""Notifies decode of requests that prefill refuses for their priority."""

from typing import TYPE_CHECKING

from sglang.srt.disaggregation.pd.refused_requests import notify_refused
from sglang.srt.disaggregation.utils import DisaggregationMode

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import EngineScheduler, Req

RENAMED = (("Scheduler", "EngineScheduler"),)


class Scheduler(EngineScheduler):
    def _set_or_validate_priority(self, req: Req) -> bool:
        """Returns whether a request may have its priority.

        Extends the engine's: on prefill, notifies decode if it may not.
        """
        is_taken = super()._set_or_validate_priority(req)
        if not is_taken and self.disaggregation_mode == DisaggregationMode.PREFILL:
            manager = self.disagg_prefill_bootstrap_queue.kv_manager
            notify_refused(manager, req, "this server does not accept priorities")
        return is_taken
