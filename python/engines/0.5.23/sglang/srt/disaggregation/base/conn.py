"""What a rank tells its KV manager about its buffers."""

from typing import Optional

from sglang.srt.disaggregation.kv_layout import RankLayout


class KVArgs:
    # What each registered buffer holds; travels to the peer. None where the engine alone knows.
    layout: Optional[RankLayout] = None
    # Where KV lies, `DRAM` on the CPU, also where nothing is described.
    memory: str = "VRAM"
    # `pd.verify.Verifier`, which compares digests of what is sent; None where nothing is compared.
    verifier: object = None
