"""Decode: describes buffers at registration, and waits until a server's ranks are known."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Optional

from sglang.srt.disaggregation.pd.local_layout import scheduler_context
from sglang.srt.disaggregation.pd.noted_requests import (
    QueuedRequests,
    note_request,
    note_seconds,
)
from sglang.srt.disaggregation.pd.per_instance import PerInstance

if TYPE_CHECKING:
    from sglang.srt.disaggregation.decode import (
        CommonKVManager,
        DecodeRequest,
        EngineDecodePreallocQueue,
        EngineDecodeTransferQueue,
        Req,
        _bootstrap_addr,
    )

RENAMED = (
    ("DecodePreallocQueue", "EngineDecodePreallocQueue"),
    ("DecodeTransferQueue", "EngineDecodeTransferQueue"),
)


class DecodePreallocQueue(EngineDecodePreallocQueue):
    def _init_kv_manager(self) -> CommonKVManager:
        """Creates the KV manager. Extends the engine's: sets `KVArgs.layout`."""
        with scheduler_context(self.scheduler):
            return super()._init_kv_manager()

    def _ensure_prefill_info(
        self, addr_to_reqs: dict[str, list[DecodeRequest]]
    ) -> tuple[dict[str, list[DecodeRequest]], list[DecodeRequest]]:
        """Returns the requests whose servers are known, by bootstrap address, and those that wait.

        Extends the engine's, which aborts requests after 15 tries: a server that has returned its
        sizes may take longer to return the addresses of its ranks, and is not tried meanwhile.
        A request that it aborts then fails because its server did not answer; the engine would
        say that its client aborted it.
        """
        manager = self.kv_manager
        queries = list(getattr(manager, "pending_queries", {}).items())
        running = {
            a for a, query in queries if a in manager.prefill_info_table and not query.done()
        }
        others = {a: reqs for a, reqs in addr_to_reqs.items() if a not in running}
        known, waiting = super()._ensure_prefill_info(others)
        still = set(map(id, waiting))
        for address, reqs in others.items():
            if address not in known and id(reqs[0]) not in still:
                self._note_unanswered(address, reqs)
        return known, waiting + [
            req for a, reqs in addr_to_reqs.items() if a in running for req in reqs
        ]

    def _note_unanswered(self, address: str, aborted: list[DecodeRequest]) -> None:
        """Records why the engine has aborted these requests."""
        reason = f"Bootstrap server {address} did not return the prefill server's sizes and ranks"
        for request in aborted:
            if request.kv_receiver is not None:
                self.kv_manager.record_failure(request.kv_receiver.bootstrap_room, reason)

    def _resolve_prefill_dp_rank(self, req: Req) -> Optional[int]:
        """Returns the request's prefill DP rank; None if it is not known yet.

        Extends the engine's: None also while the server is queried, which gives its sizes before
        its ranks.
        """
        if _bootstrap_addr(req) in getattr(self.kv_manager, "pending_queries", ()):
            return None
        # Not `super()`: the engine's tests call this on other objects.
        return EngineDecodePreallocQueue._resolve_prefill_dp_rank(self, req)

    def _create_receiver_and_enqueue(self, req: Req, *more, **options) -> DecodeRequest:
        """Starts a request. Extends the engine's: notes it."""
        note_request(self.kv_manager, req, _bootstrap_addr(req))
        return super()._create_receiver_and_enqueue(req, *more, **options)

    def pop_preallocated(self, *given, **options) -> tuple[list[DecodeRequest], list]:
        """Returns requests that were requested from prefill. Extends the engine's: see below."""
        start = time.monotonic()
        found = super().pop_preallocated(*given, **options)
        note_seconds(self.kv_manager, "prealloc", start)
        return found


class DecodeTransferQueue(EngineDecodeTransferQueue):
    queued: QueuedRequests = PerInstance(QueuedRequests)

    def pop_transferred(self, *given, **options) -> list[Req]:
        """Returns requests whose KV has arrived. Extends the engine's: notes if that takes long."""
        start, before = time.monotonic(), list(self.queue)
        done = super().pop_transferred(*given, **options)
        manager = self.scheduler.disagg_decode_prealloc_queue.kv_manager
        note_seconds(manager, "transfer", start)
        self.queued.note(manager, before, self.queue, done, self.scheduler.waiting_queue)
        return done
