"""Reports a failed registration to the caller, and puts the reachable port into the session id.

Keeps a `device_rdma` call within its send queue.
"""

import logging
from typing import TYPE_CHECKING

from sglang.srt.disaggregation.pd import device_rdma

if TYPE_CHECKING:
    from sglang.srt.disaggregation.ascend.transfer_engine import MooncakeTransferEngine

logger = logging.getLogger(__name__)


class AscendTransferEngine(MooncakeTransferEngine):
    RENAMED = (("initialize", "_engine_initialize"),)

    def initialize(self) -> None:
        """Initialises MemFabric. Extends the engine's: then puts the port into the session id.

        MemFabric 1.1.3 and later choose the port only in this call.

        Raises:
            RuntimeError: MemFabric could not be initialised.
        """
        self._engine_initialize()
        if self.session_id.endswith(":0"):
            self.session_id = f"{self.hostname}:{self.engine.get_rpc_port()}"

    def batch_register(self, ptrs: list[int], lengths: list[int]) -> int:
        """Registers memory (addresses, bytes) with MemFabric. Returns 0 on success only."""
        try:
            return self.engine.batch_register_memory(ptrs, lengths)
        except Exception:
            logger.exception(f"MemFabric did not register {len(ptrs)} buffers")
            return -1

    def batch_transfer_sync(
        self,
        session_id: str,
        buffers: list[int],
        peer_buffer_addresses: list[int],
        lengths: list[int],
    ) -> int:
        """Writes copies to a decode session. Returns MemFabric's status, 0 if all are written.

        `buffers` and `peer_buffer_addresses` are addresses, `lengths` are bytes.
        """
        transfer, copies = super().batch_transfer_sync, (buffers, peer_buffer_addresses, lengths)
        if device_rdma.is_used():
            return device_rdma.transfer_serialized(transfer, session_id, *copies)
        return transfer(session_id, *copies)
