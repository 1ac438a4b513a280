"""NIXL over host memory: the engine calls the memory of every pool but HiSparse's `VRAM`."""

from __future__ import annotations

from typing import Any

from sglang.srt.disaggregation.kv_layout import LayoutError, RankLayout


def use_host_memory(agent: Any) -> None:
    """Let an agent's `VRAM` mean host memory, where a CPU's pools lie."""
    agent.nixl_mems["VRAM"] = agent.nixl_mems["DRAM"]


def check_memory(own: RankLayout, peer: RankLayout) -> None:
    """Raises LayoutError for a peer whose memory this rank cannot name."""
    if own.memory == "DRAM" != peer.memory:
        raise LayoutError(
            f"KV memory: prefill has {own.memory}, decode has {peer.memory}; NIXL sends from a CPU "
            "to a CPU alone: use one kind of device on both sides"
        )
