"""The scheduler, which knows the model, is known while buffers are registered; it asks no server
whose ranks are not known yet.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Optional

from sglang.srt.disaggregation.pd.local_layout import scheduler_context

if TYPE_CHECKING:
    from sglang.srt.disaggregation.decode import (
        CommonKVManager,
        EngineDecodePreallocQueue,
        Req,
        _bootstrap_addr,
    )

RENAMED = (("DecodePreallocQueue", "EngineDecodePreallocQueue"),)


class DecodePreallocQueue(EngineDecodePreallocQueue):
    def _init_kv_manager(self) -> CommonKVManager:
        """As the engine's, whose buffers are described (`KVArgs.layout`)."""
        with scheduler_context(self.scheduler):
            return super()._init_kv_manager()

    def _resolve_prefill_dp_rank(self, req: Req) -> Optional[int]:
        """As the engine's; None while the server is asked: its sizes are known before its ranks."""
        if _bootstrap_addr(req) in self.kv_manager.pending_queries:
            return None
        return super()._resolve_prefill_dp_rank(req)
