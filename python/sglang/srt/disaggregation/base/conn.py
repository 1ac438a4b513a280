"""What a rank tells its KV manager about its buffers."""

from sglang.srt.disaggregation.kv_layout import RankLayout


class KVArgs:
    # KV heads of the whole model, replicas not counted (0.5.11 has it under this name).
    total_kv_head_num: int
    # What each registered buffer holds; travels to the peer.
    layout: RankLayout
