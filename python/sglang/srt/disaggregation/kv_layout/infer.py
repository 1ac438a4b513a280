"""Infers what a peer's buffers hold if the peer does not describe them.

A stock peer sends only pointers. They are component-major, target before draft, as ours are:

    [k 0..L, v 0..L, (index_k 0..L), draft k 0..d, draft v 0..d, (draft index_k 0..d)]

Their number therefore gives the draft's layers, because the peer has our pools' components.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

from .heads import heads_of_rank
from .layout import Buffer, Heads, LayoutError, RankLayout, is_recurrent
from .match import is_elided


@dataclass(frozen=True)
class StockRegistration:
    """What every release registers: attention TP, and numbers of pointers.

    Attributes:
        state_pointers: None if the transport sends state by other means.
        page_bytes: Bytes per page of the first KV buffer; None if unknown.
    """

    tp_rank: int
    tp_size: int
    kv_pointers: int
    state_pointers: Optional[int] = 0
    page_bytes: Optional[int] = None


def infer_layout(own: RankLayout, peer: StockRegistration) -> RankLayout:
    """Returns the layout of a decode rank that describes nothing, inferred by prefill rank `own`.

    Assumes that the peer serves the same model, holds all layers or the same stage as `own`, and
    has the same components in its pool. Pointers beyond the target's count the draft's layers.

    Raises:
        LayoutError: The peer's numbers fit no such layout.
    """
    kv = _infer_kv(own, peer)
    if peer.page_bytes not in (None, kv[0].page_bytes):
        raise LayoutError(
            f"{kv[0].name}: decode registered {peer.page_bytes} bytes per page, prefill expects "
            f"{kv[0].page_bytes} on TP {peer.tp_rank}/{peer.tp_size}; start both servers with the "
            "same model, KV dtype and page size"
        )
    # For a hybrid the peer must hold the same stage, see `_infer_kv`.
    stage = (own.pp_rank, own.pp_size) if is_recurrent(own) else (0, 1)
    return RankLayout(
        tp_rank=peer.tp_rank,
        tp_size=peer.tp_size,
        pp_rank=stage[0],
        pp_size=stage[1],
        page_size=own.page_size,
        dtype=own.dtype,
        memory=own.memory,
        total_layers=own.total_layers,
        kv=kv,
        state=_infer_state(own, peer),
    )


def layout_from_counts(
    components: tuple[str, ...], start_layer: int, total_layers: int, kv_pointers: int
) -> RankLayout:
    """Returns the layout of a prefill rank whose first layer and counts alone are known.

    Layers beyond the model's `total_layers` are the draft's. The layout is enough to pair layers,
    but not to copy, because it lacks bytes and heads.

    Raises:
        LayoutError: The number of pointers is not a multiple of the number of components.
    """
    held, rest = divmod(kv_pointers, len(components))
    if rest:
        raise LayoutError(
            f"{kv_pointers} KV buffers cannot be {len(components)} ({', '.join(components)}) per "
            "layer"
        )
    layers = range(start_layer, min(start_layer + held, total_layers))
    numbers = {False: layers, True: range(held - len(layers))}
    kv = [Buffer(c, d, n, 1) for d in numbers for c in components for n in numbers[d]]
    stages = 1 if len(layers) == total_layers else 2  # any number above 1 will do
    return RankLayout(0, 1, 0, stages, 1, "", "", total_layers, tuple(kv))


def _infer_kv(own: RankLayout, peer: StockRegistration) -> tuple[Buffer, ...]:
    ours = [buffer for buffer in own.kv if not buffer.draft]
    if own.pp_size == 1:  # then the peer has the same layers in the same order
        held = [_rescaled_for(peer, buffer, False, buffer.layer) for buffer in ours]
        return (*held, *_infer_drafts(own, peer, len(held)))
    target = _first_layers(own.kv, draft=False)
    layers = [buffer.layer for buffer in ours if buffer.key[:2] == target[0].key[:2]]
    same_stage = peer.kv_pointers == len(own.kv)
    uneven = len(ours) != len(target) * len(layers)
    if uneven or not same_stage and (_is_hybrid(own) or not target):
        raise LayoutError(
            f"decode registered {peer.kv_pointers} KV buffers without layer numbers; prefill "
            f"({own.name}) holds {len(own.kv)} of a model with several kinds of layers; "
            "apply the patch set to decode, too, or use PP 1"
        )
    if peer.kv_pointers >= len(target) * own.total_layers:
        layers = list(range(own.total_layers))
    held = [_rescaled_for(peer, one, False, layer) for one in target for layer in layers]
    return (*held, *_infer_drafts(own, peer, len(held)))


def _infer_drafts(own: RankLayout, peer: StockRegistration, targets: int) -> list[Buffer]:
    """Returns what follows the target's buffers; placeholders if we have no draft to send."""
    left = peer.kv_pointers - targets
    ours = [buffer for buffer in own.kv if buffer.draft]
    if left == len(ours):
        return [_rescaled_for(peer, buffer, True, buffer.layer) for buffer in ours]
    draft = _first_layers(own.kv, draft=True)
    if left < 0 or (draft and (left % len(draft) or len(ours) % len(draft))):
        raise LayoutError(
            f"decode registered {peer.kv_pointers} KV buffers where prefill ({own.name}) expects "
            f"{targets} for the target model and {len(draft)} for each draft layer; "
            "serve the same model on both sides"
        )
    if not draft:
        return [Buffer("undescribed", True, n, 0) for n in range(left)]
    return [_rescaled_for(peer, one, True, n) for one in draft for n in range(left // len(draft))]


def _infer_state(own: RankLayout, peer: StockRegistration) -> tuple[Buffer, ...]:
    """Returns state by position: our buffers, or each component's layers counted from 0."""
    if peer.state_pointers is None:
        return ()
    if is_recurrent(own) and peer.tp_size != own.tp_size:
        raise LayoutError(
            f"recurrent state of prefill TP size {own.tp_size} cannot be split for decode TP size "
            f"{peer.tp_size}; use the same TP size for hybrid models"
        )
    target = [buffer for buffer in own.state if not buffer.draft]
    drafts = [buffer for buffer in own.state if buffer.draft]
    first = _first_layers(own.state, draft=False)
    more = peer.state_pointers - len(first) * own.total_layers  # beyond the whole model's
    # A stage and its draft may have as many buffers as the whole model has on decode with PP 1.
    whole_model = first and own.pp_size > 1 and more == 0
    for held in () if whole_model else (own.state, target):  # stock may lack the draft's state
        if peer.state_pointers == len(held):
            return tuple(_rescaled_for(peer, one, one.draft, one.layer) for one in held)
    if not first or more < 0:
        raise LayoutError(
            f"decode registered {peer.state_pointers} state buffers, prefill ({own.name}) holds "
            f"{len(own.state)}; serve the same model on both sides"
        )
    if any(is_elided(buffer) for buffer in target):
        raise LayoutError(
            "decode does not report which of its layers have index keys, and some layers on "
            f"prefill ({own.name}) have none; apply the patch set to decode, too, or use PP 1"
        )
    layers = range(own.total_layers)
    held = [_rescaled_for(peer, one, False, layer) for one in first for layer in layers]
    if more == len(drafts):
        return (*held, *(_rescaled_for(peer, one, True, one.layer) for one in drafts))
    return (*held, *(Buffer("undescribed", True, n, 0) for n in range(more)))


def _is_hybrid(own: RankLayout) -> bool:
    """Whether only some layers have full attention, judging by state or by layer numbers."""
    layers = {buffer.layer for buffer in own.kv if not buffer.draft}
    return len(layers) <= max(layers, default=0) - min(layers, default=0) or any(
        buffer.component != "index_k" for buffer in own.state
    )


def _first_layers(buffers: tuple[Buffer, ...], draft: bool) -> list[Buffer]:
    """Returns the first buffer of each component, in order."""
    first: dict[str, Buffer] = {}
    for buffer in buffers:
        if buffer.draft is draft:
            first.setdefault(buffer.component, buffer)
    return list(first.values())


def _rescaled_for(peer: StockRegistration, ours: Buffer, draft: bool, layer: int) -> Buffer:
    if ours.heads is None:
        return Buffer(ours.component, draft, layer, ours.page_bytes)
    heads: Heads = heads_of_rank(peer.tp_rank, peer.tp_size, ours.heads.total)
    page_bytes = ours.page_bytes // ours.heads.count * heads.count
    return Buffer(ours.component, draft, layer, page_bytes, heads)
