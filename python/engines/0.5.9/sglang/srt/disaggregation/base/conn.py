"""What a rank passes to its KV manager about its buffers."""

from sglang.srt.disaggregation.kv_layout import RankLayout


class KVArgs:
    # KV heads of the whole model without replicas (0.5.11 has the same name).
    total_kv_head_num: int
    # NPU only: components of a layer's KV (MLA: k, v and, with an indexer, index_k), and layers of
    # the whole target model. PR #23893 uses both to find a layer in a peer's pointers.
    kv_buf_groups: int
    total_kv_layers: int
    # What each registered buffer holds; the decode rank sends it to the prefill rank.
    layout: RankLayout
    # `pd.verify.Verifier`, which compares digests of what is sent; None without comparison.
    verifier: object = None
