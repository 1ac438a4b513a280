"""Reports failed registrations to the caller; keeps `device_rdma` calls within its send queue."""

import logging
from typing import TYPE_CHECKING, List

from sglang.srt.disaggregation.pd import device_rdma

if TYPE_CHECKING:
    from sglang.srt.disaggregation.ascend.transfer_engine import MooncakeTransferEngine

logger = logging.getLogger(__name__)


class AscendTransferEngine(MooncakeTransferEngine):
    def batch_register(self, ptrs: List[int], lengths: List[int]) -> int:
        """Registers memory, lengths in bytes, with MemFabric. Returns 0 only on success."""
        try:
            return self.engine.batch_register_memory(ptrs, lengths)
        except Exception:
            logger.exception(f"MemFabric did not register {len(ptrs)} buffers")
            return -1

    def batch_transfer_sync(
        self,
        session_id: str,
        buffers: List[int],
        peer_buffer_addresses: List[int],
        lengths: List[int],
    ) -> int:
        """Writes copies to a decode session. Returns MemFabric's status, 0 if all are written."""
        transfer, copies = super().batch_transfer_sync, (buffers, peer_buffer_addresses, lengths)
        if device_rdma.is_used():
            return device_rdma.transfer_serialized(transfer, session_id, *copies)
        return transfer(session_id, *copies)

    def send_probe(self, peer_session_id: str) -> int:
        """Returns 0 if the peer answers a probe; -1 also if MemFabric has no probe."""
        probes = hasattr(self.engine, "send_probe")
        return super().send_probe(peer_session_id) if probes else -1
