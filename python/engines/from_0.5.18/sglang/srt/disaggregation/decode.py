"""Decode: describes buffers at registration, and waits until a server's ranks are known."""

from __future__ import annotations

from typing import TYPE_CHECKING, Optional

from sglang.srt.disaggregation.pd.local_layout import scheduler_context

if TYPE_CHECKING:
    from sglang.srt.disaggregation.decode import (
        CommonKVManager,
        DecodeRequest,
        EngineDecodePreallocQueue,
        Req,
        _bootstrap_addr,
    )

RENAMED = (("DecodePreallocQueue", "EngineDecodePreallocQueue"),)


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
