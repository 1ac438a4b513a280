"""NIXL over host memory: the engine calls the memory of every pool `VRAM`, except HiSparse's.

prefill    decode     memory kinds in a planned write
CPU        CPU        `VRAM`, `VRAM`: on both sides it means host memory
GPU        CPU        `VRAM`, `DRAM`: decode registers its memory as that
CPU        GPU        refused: prefill's agent has no name for decode's memory
"""

from __future__ import annotations

from typing import Any

from sglang.srt.disaggregation.kv_layout import LayoutError, RankLayout


def register_vram_as_dram(agent: Any) -> None:
    """Makes an agent's `VRAM` mean host memory, where a CPU's pools are."""
    agent.nixl_mems["VRAM"] = agent.nixl_mems["DRAM"]


def peer_memory_kind(own: RankLayout, peer: RankLayout) -> str:
    """Returns what this rank's agent calls the memory of a peer's pools.

    Raises:
        LayoutError: The agent has no name for that memory.
    """
    if own.memory == "DRAM" != peer.memory:
        raise LayoutError(
            f"KV memory: prefill has {own.memory}, decode has {peer.memory}; NIXL sends from a CPU "
            "only to a CPU; use the same kind of device on both sides"
        )
    return "VRAM" if own.memory == "DRAM" else peer.memory
