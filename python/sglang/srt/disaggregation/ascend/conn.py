"""Ascend sends as Mooncake does, by the peer's plan; only the transfer engine is another."""

import concurrent.futures
import logging
from typing import TYPE_CHECKING, List

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from sglang.srt.disaggregation.ascend.conn import MooncakeKVManager

logger = logging.getLogger(__name__)


class AscendKVManager(MooncakeKVManager):
    def register_buffer_to_engine(self) -> None:
        """Register all in one batch, in which MemFabric merges small ranges, or else aux apart.

        MemFabric also merges ranges that only touch, and then refuses what lies in two heaps.

        Raises:
            RuntimeError: A buffer cannot be registered; the text names it.
        """
        kv, aux = self._regions()
        if self._is_registered([*kv, *aux]):
            return
        logger.warning("MemFabric did not register KV, state and aux in one batch: aux goes apart")
        super().register_buffer_to_engine()

    def send_kvcache(
        self,
        mooncake_session_id: str,
        prefill_kv_indices: npt.NDArray[np.int32],
        dst_kv_ptrs: List[int],
        dst_kv_indices: npt.NDArray[np.int32],
        executor: concurrent.futures.ThreadPoolExecutor,
    ) -> int:
        """Write these pages of all layers to the peer, in one call. 0, or not 0 if it failed."""
        return super().send_kvcache(
            mooncake_session_id, prefill_kv_indices, dst_kv_ptrs, dst_kv_indices, executor
        )
