"""What a rank tells its KV manager about its buffers."""

from sglang.srt.disaggregation.kv_layout import RankLayout


class KVArgs:
    # KV heads of the whole model, replicas not counted (0.5.11 has it under this name).
    total_kv_head_num: int
    # NPU only: components of a layer's KV (MLA: k, v and, with an indexer, index_k), and layers of
    # the whole target model. With them PR #23893 finds a layer in a peer's pointers.
    kv_buf_groups: int
    total_kv_layers: int
    # What each registered buffer holds; travels to the peer.
    layout: RankLayout
    # `pd.verify.Verifier`, which compares digests of what is sent; None where nothing is compared.
    verifier: object = None
