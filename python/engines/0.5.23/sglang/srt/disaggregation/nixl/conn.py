"""NIXL: entries of stages are paired with decode's by what they hold."""

from __future__ import annotations

from typing import TYPE_CHECKING, List

from sglang.srt.disaggregation.pd.pairs import same_entries

if TYPE_CHECKING:
    from sglang.srt.disaggregation.nixl.conn import EngineNixlKVManager, KVArgsRegisterInfo

RENAMED = (("NixlKVManager", "EngineNixlKVManager"),)


class NixlKVManager(EngineNixlKVManager):
    def _build_transfer_dst_indices(
        self, *, peer_info: KVArgsRegisterInfo, n_src: int, n_dst: int
    ) -> List[int]:
        """The peer's entry for each of ours.

        Raises:
            LayoutError: The peer lacks a layer.
        """
        layout = getattr(self.kv_args, "layout", None)
        if layout is None or n_src != len(layout.kv):
            return super()._build_transfer_dst_indices(
                peer_info=peer_info, n_src=n_src, n_dst=n_dst
            )
        return same_entries(self, n_dst)
