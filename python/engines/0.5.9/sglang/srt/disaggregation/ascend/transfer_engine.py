"""A failed registration is told to the caller; the session id has the port that peers reach."""

import logging
from typing import TYPE_CHECKING, List

if TYPE_CHECKING:
    from sglang.srt.disaggregation.ascend.transfer_engine import MooncakeTransferEngine

logger = logging.getLogger(__name__)


class AscendTransferEngine(MooncakeTransferEngine):
    RENAMED = (("initialize", "_initialize"),)

    def initialize(self) -> None:
        """As the engine's; MemFabric from 1.1.3 on chooses its port there, and has none before.

        Raises:
            RuntimeError: MemFabric could not be initialised.
        """
        self._initialize()
        if self.session_id.endswith(":0"):
            self.session_id = f"{self.hostname}:{self.engine.get_rpc_port()}"

    def batch_register(self, ptrs: List[int], lengths: List[int]) -> int:
        """Register memory with MemFabric. Returns 0, or not 0 if it failed."""
        try:
            return self.engine.batch_register_memory(ptrs, lengths)
        except Exception:
            logger.exception(f"MemFabric did not register {len(ptrs)} buffers")
            return -1
