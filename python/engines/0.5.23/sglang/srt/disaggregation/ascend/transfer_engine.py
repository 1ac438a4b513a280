"""A failed registration is told to the caller."""

import logging
from typing import TYPE_CHECKING, List

if TYPE_CHECKING:
    from sglang.srt.disaggregation.ascend.transfer_engine import MooncakeTransferEngine

logger = logging.getLogger(__name__)


class AscendTransferEngine(MooncakeTransferEngine):
    def batch_register(self, ptrs: List[int], lengths: List[int]) -> int:
        """Register memory with MemFabric. Returns 0, or not 0 if it failed."""
        try:
            return self.engine.batch_register_memory(ptrs, lengths)
        except Exception:
            logger.exception(f"MemFabric did not register {len(ptrs)} buffers")
            return -1
