"""Ascend: sends by each peer's plan, as Mooncake does, with another transfer engine."""

from typing import TYPE_CHECKING

from sglang.srt.disaggregation.pd.memory_registration import register_after_pause, register_ranges

if TYPE_CHECKING:
    from sglang.srt.disaggregation.ascend.conn import EngineAscendKVManager

RENAMED = (("AscendKVManager", "EngineAscendKVManager"),)


class AscendKVManager(EngineAscendKVManager):
    backend_name = "ascend"
    register_memory = staticmethod(register_ranges)

    def register_buffer_to_engine(self) -> None:
        """Registers all buffers in one batch, or else range by range.

        Raises:
            RuntimeError: A buffer cannot be registered; the text names it. Never after a pause.
        """
        if self.has_registered:
            register_after_pause(self.kv_args, self.engine.batch_register)
        else:
            super(EngineAscendKVManager, self).register_buffer_to_engine()

    def send_kvcache(self, mooncake_session_id: str, *sent, **more) -> int:
        """Writes these pages of all layers to the peer. Returns the transfer engine's status."""
        session = mooncake_session_id
        if self.plan_for(session) is None:
            return super().send_kvcache(session, *sent, **more)
        return super(EngineAscendKVManager, self).send_kvcache(session, *sent, **more)
