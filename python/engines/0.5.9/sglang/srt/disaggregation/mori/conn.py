"""Mori pairs its memory descriptors by layer, as every backend pairs pointers."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang.srt.disaggregation.mori.conn import CommonKVManager, MemoryDesc


class MoriKVManager(CommonKVManager):
    def _get_mha_mem_desc_slices(self, dst_mem_descs: list[MemoryDesc]):
        """Returns our K and V descriptors, the peer's for the same layers, and how many of each."""
        return self.get_mha_kv_ptrs_with_pp(self.kv_mem_descs, dst_mem_descs)

    def _get_mla_mem_desc_slices(self, dst_mem_descs: list[MemoryDesc]):
        """Returns our descriptors, the peer's for the same layers, and how many."""
        return self.get_mla_kv_ptrs_with_pp(self.kv_mem_descs, dst_mem_descs)
