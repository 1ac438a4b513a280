"""What one rank's transfer buffers hold, in words that mean the same on every rank."""

from __future__ import annotations

from typing import Optional

import msgspec


class LayoutError(ValueError):
    """Two ranks cannot exchange KV, or a rank's buffers are not what its pools say.

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
    """One registered buffer: a run of pages (or of state slots) of one component of one layer.

    `layer` is the layer's number in its whole model, whatever stage holds it (of recurrent state:
    its number among the layers that have one); `draft` says that this model is the speculative
    draft. `page_bytes` is the distance from one page to the next, `pages` how many there are, 0
    from a peer that does not say. A page of a buffer with `heads` is `[page_size, heads.count,
    head bytes]`; else it is opaque. `idle` is a buffer that the engine sets aside and its rank
    never fills: it is neither sent nor received.
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
        """What must be equal for two buffers to hold the same thing, heads apart."""
        return (self.component, self.draft, self.layer)

    @property
    def name(self) -> str:
        """For messages, such as `draft k, layer 0`."""
        return f"{'draft ' if self.draft else ''}{self.component}, layer {self.layer}"


class RankLayout(msgspec.Struct, frozen=True, omit_defaults=True):
    """All that one rank registers for KV and for state, in the order of its pointer lists.

    Attributes:
        tp_rank, tp_size: Attention TP; `tp_rank` lies in `[0, tp_size)`.
        pp_rank, pp_size: Pipeline stage of this rank.
        page_size: Tokens a page.
        dtype: Element type of the KV pool as torch names it, such as `bfloat16`.
        memory: `DRAM` for host memory, `VRAM` for an accelerator's: NIXL's two segment kinds.
        total_layers: Layers of the whole target model.
        kv: One entry for each pointer in `KVArgs.kv_data_ptrs`.
        state: One entry for each pointer in `KVArgs.state_data_ptrs`.
        aux: Bytes a row of each metadata buffer in `KVArgs.aux_data_ptrs`, 0 where this rank has no
            use for them; empty from a peer that does not say.
        aux_slots: Rows of each of them; 0 likewise.
        verifies: This rank compares digests of what arrives (`SGLANG_PD_VERIFY`).
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

    @property
    def name(self) -> str:
        """For messages, such as `TP 1/2 PP 0/1`."""
        return f"TP {self.tp_rank}/{self.tp_size} PP {self.pp_rank}/{self.pp_size}"


# Of a buffer of a pool that is not known: its number is its place among those of its rank.
OPAQUE = "opaque"


def is_opaque(layout: RankLayout) -> bool:
    """What the rank's buffers hold is not known: pages go, whole, to the buffer in that place."""
    return any(buffer.component == OPAQUE for buffer in layout.kv)


def is_recurrent(layout: RankLayout) -> bool:
    """The model keeps recurrent (Mamba) state, one slot a request, which no TP rank can split."""
    return any(buffer.component.startswith("mamba") for buffer in layout.state)


def has_fused_conv_state(layout: RankLayout) -> bool:
    """The recurrent state has one window for several convolutions, one after the other.

        TP 1    x0 x1 B0 B1 C0 C1        TP 2    x0 B0 C0  and  x1 B1 C1

    So has each model with a window and a state, but those with a buffer for each convolution.
    """
    sizes = {buffer.component: buffer.page_bytes for buffer in layout.state}
    return sizes.keys() == {"mamba_0", "mamba_1"} and all(sizes.values())
