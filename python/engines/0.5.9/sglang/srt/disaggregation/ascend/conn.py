"""Ascend sends as Mooncake does, by the peer's plan; only the transfer engine is another."""

from typing import TYPE_CHECKING

from sglang.srt.disaggregation.pd import device_rdma
from sglang.srt.disaggregation.pd.memory import registered_together

if TYPE_CHECKING:
    from sglang.srt.disaggregation.ascend.conn import MooncakeKVManager


class AscendKVManager(MooncakeKVManager):
    REMOVED = ("send_kvcache",)

    @property
    def unsettled_seconds(self) -> float:
        """For how long a failed write may go on; decode's pages are not freed meanwhile."""
        return device_rdma.unsettled_seconds()

    def register_buffer_to_engine(self) -> None:
        """Register all in one batch, or else aux apart.

        Raises:
            RuntimeError: A buffer cannot be registered; the text names it.
        """
        if not registered_together(self.kv_args, self.engine.batch_register):
            super().register_buffer_to_engine()
