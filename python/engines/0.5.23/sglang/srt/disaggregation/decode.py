"""The scheduler, which knows the model, is known while buffers are registered."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.disaggregation.pd.registered import describing

if TYPE_CHECKING:
    from sglang.srt.disaggregation.decode import CommonKVManager, EngineDecodePreallocQueue

RENAMED = (("DecodePreallocQueue", "EngineDecodePreallocQueue"),)


class DecodePreallocQueue(EngineDecodePreallocQueue):
    def _init_kv_manager(self) -> CommonKVManager:
        """As the engine's, whose buffers are described (`KVArgs.layout`)."""
        with describing(self.scheduler):
            return super()._init_kv_manager()
