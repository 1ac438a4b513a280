"""What one rank's transfer buffers hold, in terms that mean the same on every rank."""

from __future__ import annotations

from typing import Optional

import msgspec


class LayoutError(ValueError):
    """Two ranks cannot exchange KV, or a rank's buffers do not match its pools.

    The text names both sides' values and what to change.
    """


class Heads(msgspec.Struct, frozen=True, array_like=True):
    """KV heads `[start, stop)` out of the model's `total`, counted without replicas."""

    start: int
    stop: int
    total: int

    @property
    def count(self) -> int:
        return self.stop - self.start

    def __and__(self, other: Heads) -> Heads:
        start = max(self.start, other.start)
        return Heads(start, max(start, min(self.stop, other.stop)), self.total)

    def __str__(self) -> str:
        return f"[{self.start},{self.stop}) of {self.total}"


class Buffer(msgspec.Struct, frozen=True, array_like=True):
    """One registered buffer: consecutive pages (or state slots) of one component of one layer.

    Attributes:
        component: Its name, such as `k`, `v` or `index_k`.
        draft: Whether the layer is the speculative draft's.
        layer: Its number in its whole model, on every stage. For recurrent state whose pool does
            not know that number: its number among the layers with recurrent state.
        page_bytes: Bytes from one page to the next.
        heads: A page with heads is `[page_size, heads.count, head bytes]`; without, it is opaque.
        pages: Number of pages; 0 from a peer that does not report it.
        unused: The engine allocates the buffer and its rank never fills it, so that it is neither
            sent nor received.
    """

    component: str
    draft: bool
    layer: int
    page_bytes: int
    heads: Optional[Heads] = None
    pages: int = 0
    unused: bool = False

    @property
    def key(self) -> tuple[str, bool, int]:
        """Identifies what the buffer holds, apart from heads: component, draft and layer."""
        return (self.component, self.draft, self.layer)

    @property
    def name(self) -> str:
        """The buffer's name in messages, such as `draft k, layer 0`."""
        return f"{'draft ' if self.draft else ''}{self.component}, layer {self.layer}"


class RankLayout(msgspec.Struct, frozen=True, omit_defaults=True):
    """All buffers that one rank registers for KV and state, in the order of its pointer lists.

    Attributes:
        tp_rank, tp_size: Attention TP; `tp_rank` lies in `[0, tp_size)`.
        pp_rank, pp_size: This rank's pipeline stage, and the number of stages.
        page_size: Tokens per page.
        dtype: Element type of the KV pool as torch names it, such as `bfloat16`.
        memory: `DRAM` for host memory, `VRAM` for an accelerator's, as NIXL names them.
        total_layers: Layers of the whole target model.
        kv: One entry for each pointer in `KVArgs.kv_data_ptrs`.
        state: One entry for each pointer in `KVArgs.state_data_ptrs`.
        aux: Bytes per row of each metadata buffer in `KVArgs.aux_data_ptrs`, 0 where this rank does
            not use the buffer; empty from a peer that does not report them.
        aux_slots: Rows of each metadata buffer; 0 from a peer that does not report them.
        verifies: Whether this rank compares digests of what arrives (`SGLANG_PD_VERIFY`).
        whole_rows: Whether this rank sends head slices as whole rows, or interleaves those that
            arrive (`packed`).
        server: The server's name for metrics, such as `10.0.0.2:30000`; without a host, that where
            this rank reads messages.
    """

    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    page_size: int
    dtype: str
    memory: str
    total_layers: int
    kv: tuple[Buffer, ...]
    state: tuple[Buffer, ...] = ()
    aux: tuple[int, ...] = ()
    aux_slots: int = 0
    verifies: bool = False
    whole_rows: bool = False
    server: str = ""

    @property
    def name(self) -> str:
        """The rank's name in messages, such as `TP 1/2 PP 0/1`."""
        return f"TP {self.tp_rank}/{self.tp_size} PP {self.pp_rank}/{self.pp_size}"


# Component of a buffer of an unknown pool; its layer is its index among its rank's buffers.
OPAQUE = "opaque"


def is_opaque(layout: RankLayout) -> bool:
    """Whether the contents are unknown; whole pages then go to the buffer of the same index."""
    return any(buffer.component == OPAQUE for buffer in layout.kv)


def is_split_by_heads(layout: RankLayout) -> bool:
    """Whether all of the target's KV is split by heads; False for MLA and for unknown pools."""
    return all(buffer.heads is not None for buffer in layout.kv if not buffer.draft)


def is_recurrent(layout: RankLayout) -> bool:
    """Whether the model keeps recurrent (Mamba) state: a slot per request, which no plan splits."""
    return any(buffer.component.startswith("mamba") for buffer in layout.state)


def has_fused_conv_state(layout: RankLayout) -> bool:
    """Whether one window of the recurrent state holds several convolutions in sequence.

        TP 1    x0 x1 B0 B1 C0 C1        TP 2    x0 B0 C0  and  x1 B1 C1

    True for models with a window and a state, except those with a buffer per convolution.
    """
    sizes = {buffer.component: buffer.page_bytes for buffer in layout.state}
    return sizes.keys() == {"mamba_0", "mamba_1"} and all(sizes.values())
