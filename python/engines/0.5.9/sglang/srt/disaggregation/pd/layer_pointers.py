"""Pointers of the same layers on both sides, as the engine's own methods ask for them."""

from __future__ import annotations

from typing import List, Tuple

from sglang.srt.disaggregation.kv_layout import (
    OPAQUE,
    Buffer,
    StockRegistration,
    layout_from_counts,
    pair_layers,
)


class LayerPointers:
    """By the two sides' descriptions; where there is none, by what the numbers tell."""

    def get_mha_kv_ptrs_with_pp(
        self, src_kv_ptrs: List[int], dst_kv_ptrs: List[int]
    ) -> Tuple[List[int], List[int], List[int], List[int], int]:
        """Our K and V pointers, the peer's of the same layers, and how many of each.

        Target layers first, then those of a draft that both sides have. Of a pool that is not known
        the first half is taken for K, as stock has it.

        Raises:
            LayoutError: The peer lacks one of our target layers.
        """
        pairs = self._pair_layers(src_kv_ptrs, dst_kv_ptrs, ("k", "v"))
        k_and_v = [[pair for pair in pairs if pair[0].component == name] for name in ("k", "v")]
        if pairs and pairs[0][0].component == OPAQUE:
            k_and_v = [pairs[: len(pairs) // 2], pairs[len(pairs) // 2 :]]
        src_k, src_v = ([src for _, src, _ in part] for part in k_and_v)
        dst_k, dst_v = ([dst for _, _, dst in part] for part in k_and_v)
        return src_k, src_v, dst_k, dst_v, len(src_k)

    def get_mla_kv_ptrs_with_pp(
        self, src_kv_ptrs: List[int], dst_kv_ptrs: List[int]
    ) -> Tuple[List[int], List[int], int]:
        """Our pointers, the peer's of the same components and layers, and how many of each.

        On an NPU a layer has `kv_buf_groups` pointers (PR #23893). Raises as for MHA.
        """
        groups = getattr(self.kv_args, "kv_buf_groups", 1)
        components = ("kv",) if groups == 1 else ("k", "v", "index_k")[:groups]
        pairs = self._pair_layers(src_kv_ptrs, dst_kv_ptrs, components)
        return [src for _, src, _ in pairs], [dst for _, _, dst in pairs], len(pairs)

    def _pair_layers(
        self, src: List[int], dst: List[int], components: Tuple[str, ...]
    ) -> List[Tuple[Buffer, int, int]]:
        args = self.kv_args
        own = getattr(args, "layout", None)
        if own is None:
            start, held = args.prefill_start_layer, len(src) // len(components)
            total = getattr(args, "total_kv_layers", None)
            total = total or max(start + held, len(dst) // len(components))
            own = layout_from_counts(components, start, total, len(src))
        known = list(getattr(self, "decode_kv_args_table", {}).values())
        described = (
            info.plan.layout
            for info in known
            if getattr(info, "plan", None) and info.dst_kv_ptrs == dst
        )
        facts = StockRegistration(own.tp_rank, own.tp_size, len(dst), state_pointers=None)
        return pair_layers(own, src, next(described, None) or facts, dst)
