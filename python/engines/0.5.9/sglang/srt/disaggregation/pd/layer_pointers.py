"""Pairs pointers of the same layers on both sides, in the form the engine's methods use."""

from __future__ import annotations

from sglang.srt.disaggregation.kv_layout import (
    OPAQUE,
    Buffer,
    StockRegistration,
    layout_from_counts,
    pair_layers,
)


class LayerPointers:
    """Pairs layers by the two sides' descriptions, or by pointer counts where there is none."""

    def get_mha_kv_ptrs_with_pp(
        self, src_kv_ptrs: list[int], dst_kv_ptrs: list[int]
    ) -> tuple[list[int], list[int], list[int], list[int], int]:
        """Returns our K and V pointers, the peer's for the same layers, and how many of each.

        Target layers come first, then those of a draft model that both sides have. In a pool of
        unknown kind the first half is K, as in stock.

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
        self, src_kv_ptrs: list[int], dst_kv_ptrs: list[int]
    ) -> tuple[list[int], list[int], int]:
        """Returns our pointers, the peer's for the same components and layers, and their count.

        On an NPU a layer has `kv_buf_groups` pointers (PR #23893).

        Raises:
            LayoutError: The peer lacks one of our target layers.
        """
        groups = getattr(self.kv_args, "kv_buf_groups", 1)
        components = ("kv",) if groups == 1 else ("k", "v", "index_k")[:groups]
        pairs = self._pair_layers(src_kv_ptrs, dst_kv_ptrs, components)
        return [src for _, src, _ in pairs], [dst for _, _, dst in pairs], len(pairs)

    def _pair_layers(
        self, src: list[int], dst: list[int], components: tuple[str, ...]
    ) -> list[tuple[Buffer, int, int]]:
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
