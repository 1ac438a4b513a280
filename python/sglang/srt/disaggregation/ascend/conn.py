"""Ascend sends as Mooncake does, by the peer's plan; only the transfer engine is another."""

import concurrent.futures
from typing import TYPE_CHECKING, List

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from sglang.srt.disaggregation.ascend.conn import MooncakeKVManager


class AscendKVManager(MooncakeKVManager):
    def register_buffer_to_engine(self) -> None:
        """Register KV, aux and state in one batch, so that MemFabric can merge small ranges.

        Raises:
            RuntimeError: A buffer cannot be registered; the text names it.
        """
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
