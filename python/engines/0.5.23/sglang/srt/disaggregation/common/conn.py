"""Every backend pairs K and V of the same layers, also where stages are of unequal length."""

from __future__ import annotations

from typing import TYPE_CHECKING, List, Tuple

from sglang.srt.disaggregation.pd.pairs import mha_pairs

if TYPE_CHECKING:
    from sglang.srt.disaggregation.common.conn import EngineCommonKVManager

RENAMED = (("CommonKVManager", "EngineCommonKVManager"),)


class CommonKVManager(EngineCommonKVManager):
    def get_mha_kv_ptrs_with_pp(
        self, src_kv_ptrs: List[int], dst_kv_ptrs: List[int]
    ) -> Tuple[List[int], List[int], List[int], List[int], int]:
        """Our K and V pointers, the peer's of the same layers, and how many of each.

        Of KV whose buffers are described; state has the engine's pairing.
        """
        args, layout = self.kv_args, getattr(self.kv_args, "layout", None)
        if layout is None or src_kv_ptrs not in (args.kv_data_ptrs, args.kv_item_lens):
            return super().get_mha_kv_ptrs_with_pp(src_kv_ptrs, dst_kv_ptrs)
        return mha_pairs(self, src_kv_ptrs, dst_kv_ptrs)
