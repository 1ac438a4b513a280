"""Ascend sends as Mooncake does, by the peer's plan, over MemFabric, which registers ranges."""

from typing import TYPE_CHECKING

from sglang.srt.disaggregation.pd.memory_registration import register_ranges

if TYPE_CHECKING:
    from sglang.srt.disaggregation.ascend.conn import MooncakeKVManager


class AscendKVManager(MooncakeKVManager):
    REMOVED = ("register_buffer_to_engine", "send_kvcache")
    backend_name = "ascend"
    register_memory = staticmethod(register_ranges)
