"""The scheduler, which knows the model, is known while buffers are registered; decode hears of
requests that are refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.disaggregation.pd.local_layout import scheduler_context
from sglang.srt.disaggregation.pd.refused_requests import notify_refused

if TYPE_CHECKING:
    from sglang.srt.disaggregation.prefill import CommonKVManager, EnginePrefillBootstrapQueue, Req

RENAMED = (("PrefillBootstrapQueue", "EnginePrefillBootstrapQueue"),)


class PrefillBootstrapQueue(EnginePrefillBootstrapQueue):
    def _init_kv_manager(self) -> CommonKVManager:
        """As the engine's, whose buffers are described (`KVArgs.layout`)."""
        with scheduler_context(self.scheduler):
            return super()._init_kv_manager()

    def add(self, req: Req, num_kv_heads: int) -> None:
        """As the engine's; decode hears of one that is refused."""
        super().add(req, num_kv_heads)
        notify_refused(self.kv_manager, req)
