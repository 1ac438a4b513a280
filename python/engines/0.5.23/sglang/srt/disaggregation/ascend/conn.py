"""Ascend sends as Mooncake does, by the peer's plan; only the transfer engine is another."""

import logging
from typing import TYPE_CHECKING

from sglang.srt.disaggregation.pd.memory import is_registered, regions

if TYPE_CHECKING:
    from sglang.srt.disaggregation.ascend.conn import EngineAscendKVManager

logger = logging.getLogger(__name__)

RENAMED = (("AscendKVManager", "EngineAscendKVManager"),)


class AscendKVManager(EngineAscendKVManager):
    def register_buffer_to_engine(self) -> None:
        """Register all in one batch, in which MemFabric merges small ranges, or else aux apart.

        MemFabric also merges ranges that only touch, and then refuses what lies in two heaps.

        Raises:
            RuntimeError: A buffer cannot be registered; the text names it.
        """
        kv, aux = regions(self.kv_args)
        if is_registered(self.engine.batch_register, [*kv, *aux]):
            self.has_registered = True
            return
        logger.warning("MemFabric did not register KV, state and aux in one batch: aux goes apart")
        super(EngineAscendKVManager, self).register_buffer_to_engine()

    def send_kvcache(self, session: str, *sent, **more) -> int:
        """Write these pages of all layers to the peer. Returns the transfer engine's status."""
        if self.plan_of(session) is None:
            return super().send_kvcache(session, *sent, **more)
        return super(EngineAscendKVManager, self).send_kvcache(session, *sent, **more)
