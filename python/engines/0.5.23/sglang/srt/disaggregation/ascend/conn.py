"""Ascend sends as Mooncake does, by the peer's plan; only the transfer engine is another."""

import concurrent.futures
import logging
from typing import TYPE_CHECKING, List, Optional

import numpy as np
import numpy.typing as npt
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
            return
        logger.warning("MemFabric did not register KV, state and aux in one batch: aux goes apart")
        super(EngineAscendKVManager, self).register_buffer_to_engine()

    def send_kvcache(
        self,
        mooncake_session_id: str,
        prefill_kv_indices: npt.NDArray[np.int32],
        dst_kv_ptrs: list[int],
        dst_kv_indices: npt.NDArray[np.int32],
        executor: concurrent.futures.ThreadPoolExecutor,
        dst_layer_ids: Optional[List[int]] = None,
        dst_device_kv_indices: Optional[npt.NDArray[np.int32]] = None,
        dst_kv_item_len: Optional[int] = None,
        dst_attn_tp_size: Optional[int] = None,
    ):
        """Write these pages of all layers to the peer. Returns the transfer engine's status."""
        sent = (
            mooncake_session_id,
            prefill_kv_indices,
            dst_kv_ptrs,
            dst_kv_indices,
            executor,
            dst_layer_ids,
            dst_device_kv_indices,
            dst_kv_item_len,
            dst_attn_tp_size,
        )
        if self.plan_of(mooncake_session_id) is None:
            return super().send_kvcache(*sent)
        return super(EngineAscendKVManager, self).send_kvcache(*sent)
