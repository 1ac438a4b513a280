"""What a rank's KV manager gets to know about its buffers."""

from typing import Optional

from sglang.srt.disaggregation.kv_layout import RankLayout


class KVArgs:
    # Describes each registered buffer; also sent to the peer. None if only the engine knows them.
    layout: Optional[RankLayout] = None
    # Where KV is: `DRAM` on a CPU; set even if `layout` is None.
    memory: str = "VRAM"
    # `pd.pool_views.PoolViews` of the buffers; None if they are not described.
    views: object = None
    # `pd.packing.PackingBuffers` of a prefill rank; None if it packs nothing.
    packing: object = None
    # `pd.verify.Verifier`, which compares digests of what is sent; None if nothing is compared.
    verifier: object = None
