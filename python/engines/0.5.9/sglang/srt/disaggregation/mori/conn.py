"""Mori has no transfer plans: it pairs its memory descriptors by layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.pd.room_failures import DUPLICATE_ROOM

if TYPE_CHECKING:
    from sglang.srt.disaggregation.mori.conn import CommonKVManager, CommonKVReceiver, MemoryDesc


class MoriKVManager(CommonKVManager):
    def _get_mha_mem_desc_slices(self, dst_mem_descs: list[MemoryDesc]):
        """Returns our K and V descriptors, the peer's for the same layers, and how many of each."""
        return self.get_mha_kv_ptrs_with_pp(self.kv_mem_descs, dst_mem_descs)

    def _get_mla_mem_desc_slices(self, dst_mem_descs: list[MemoryDesc]):
        """Returns our descriptors, the peer's for the same layers, and how many."""
        return self.get_mla_kv_ptrs_with_pp(self.kv_mem_descs, dst_mem_descs)


class MoriKVReceiver(CommonKVReceiver):
    RENAMED = (
        ("poll", "_engine_poll"),
        ("clear", "_engine_clear"),
        ("abort", "_engine_abort"),
        ("failure_exception", "_engine_failure_exception"),
    )
    queries_in_thread = False

    # A request whose room another one has must not touch that one's entries.

    def poll(self) -> KVPoll:
        return KVPoll.Failed if self.is_duplicate_room else self._engine_poll()

    def clear(self) -> None:
        if not self.is_duplicate_room:
            self._engine_clear()

    def abort(self) -> None:
        if not self.is_duplicate_room:
            self._engine_abort()

    def failure_exception(self) -> None:
        if self.is_duplicate_room:
            raise RuntimeError(DUPLICATE_ROOM)
        self._engine_failure_exception()
