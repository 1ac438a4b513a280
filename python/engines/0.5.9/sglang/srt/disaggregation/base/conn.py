"""What a rank passes to its KV manager about its buffers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.disaggregation.kv_layout import RankLayout

if TYPE_CHECKING:
    from sglang.srt.disaggregation.pd.packing import PackingBuffers
    from sglang.srt.disaggregation.pd.pool_views import PoolViews
    from sglang.srt.disaggregation.pd.verify import Verifier


class KVArgs:
    # NPU only: components of a layer's KV (MLA: k, v and, with an indexer, index_k), and layers of
    # the whole target model. PR #23893 uses both to find a layer in a peer's pointers.
    kv_buf_groups: int
    total_kv_layers: int
    # What each registered buffer holds; the decode rank sends it to the prefill rank.
    layout: RankLayout
    # The buffers as tensors; None of pools that nobody knows.
    views: PoolViews | None = None
    # A prefill rank's memory for packed rows; None if it packs nothing.
    packing: PackingBuffers | None = None
    # Compares digests of what is sent; None without comparison.
    verifier: Verifier | None = None
