"""NIXL over host memory: the engine calls the memory of every pool but HiSparse's `VRAM`.

prefill    decode     a planned write's two kinds
CPU        CPU        `VRAM`, `VRAM`: on both sides it means host memory
GPU        CPU        `VRAM`, `DRAM`: it is registered as that
CPU        GPU        refused: the agent could not name it
"""

from __future__ import annotations

from typing import Any

from sglang.srt.disaggregation.kv_layout import LayoutError, RankLayout


def register_vram_as_dram(agent: Any) -> None:
    """Let an agent's `VRAM` mean host memory, where a CPU's pools lie."""
    agent.nixl_mems["VRAM"] = agent.nixl_mems["DRAM"]


def peer_memory_kind(own: RankLayout, peer: RankLayout) -> str:
    """What this rank's agent calls the memory of a peer's pools.

    Raises:
        LayoutError: It has no name for it.
    """
    if own.memory == "DRAM" != peer.memory:
        raise LayoutError(
            f"KV memory: prefill has {own.memory}, decode has {peer.memory}; NIXL sends from a CPU "
            "to a CPU alone: use one kind of device on both sides"
        )
    return "VRAM" if own.memory == "DRAM" else peer.memory
