"""Prefill: describes buffers at registration, and notifies decode of refused requests."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from sglang.srt.disaggregation.pd.local_layout import scheduler_context
from sglang.srt.disaggregation.pd.noted_requests import note_request, note_seconds
from sglang.srt.disaggregation.pd.refused_requests import answer_rejected, notify_refused

if TYPE_CHECKING:
    from sglang.srt.disaggregation.prefill import CommonKVManager, EnginePrefillBootstrapQueue, Req

RENAMED = (("PrefillBootstrapQueue", "EnginePrefillBootstrapQueue"),)


class PrefillBootstrapQueue(EnginePrefillBootstrapQueue):
    def _init_kv_manager(self) -> CommonKVManager:
        """Creates the KV manager. Extends the engine's: sets `KVArgs.layout`."""
        with scheduler_context(self.scheduler):
            return super()._init_kv_manager()

    def add(self, req: Req, num_kv_heads: int) -> None:
        """Queues a request. Extends the engine's: notifies decode if it is refused.

        Also ends a request that has been rejected already, see `answer_rejected`.
        """
        if not answer_rejected(getattr(self, "scheduler", None), req):
            # Not `super()`: the engine's tests call this on other objects.
            EnginePrefillBootstrapQueue.add(self, req, num_kv_heads)
        manager = getattr(self, "kv_manager", None)
        note_request(manager, req)
        notify_refused(manager, req)

    def pop_bootstrapped(self, *given, **options) -> list[Req]:
        """Returns requests that may start. Extends the engine's: notes if that takes long."""
        start = time.monotonic()
        found = EnginePrefillBootstrapQueue.pop_bootstrapped(self, *given, **options)
        note_seconds(getattr(self, "kv_manager", None), "bootstrap", start)
        return found
