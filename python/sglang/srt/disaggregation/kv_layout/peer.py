"""Turns two descriptions and two pointer lists into the plans for one peer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Optional, Union

from .aux_buffers import AuxPlan, make_aux_plan
from .infer import StockRegistration, infer_layout
from .layout import Buffer, LayoutError, RankLayout, is_split_by_heads
from .match import incompatibilities, match_buffers, match_layers
from .packed import make_packed_plan
from .permutation import unpacked_reason
from .plan import TransferPlan, make_plan


@dataclass(frozen=True)
class Pointers:
    """Base addresses that a rank registers: `KVArgs.kv_data_ptrs` and `KVArgs.state_data_ptrs`.

    `state` is None if the transport sends state by other means.
    """

    kv: Sequence[int]
    state: Optional[Sequence[int]] = None


@dataclass(frozen=True)
class PeerPlan:
    """What a prefill rank needs to know in order to send to one decode rank.

    Attributes:
        layout: The decode rank's, as described or inferred.
        state: None if the transport sends state by other means.
        needs_interleaving: Whether decode must interleave what the ranks of this prefill server
            send, and so be notified of the units by each, also by one that only has copies of
            others' heads.
    """

    layout: RankLayout
    kv: TransferPlan
    state: Optional[TransferPlan]
    aux: AuxPlan
    needs_interleaving: bool = False


def plan_for_peer(
    own: RankLayout,
    own_pointers: Pointers,
    peer: Union[RankLayout, StockRegistration],
    peer_pointers: Pointers,
    can_pack: bool = False,
) -> PeerPlan:
    """Returns the plans from prefill rank `own` to a decode rank.

    Args:
        peer: The decode rank's description; a stock rank, which has none, is a
            `StockRegistration`.
        can_pack: Whether this rank has a packing buffer (`packed`).

    Raises:
        LayoutError: The two cannot work together; the text gives every reason.
    """
    layout = infer_layout(own, peer) if isinstance(peer, StockRegistration) else peer
    reasons = incompatibilities(own, layout)
    if reasons:
        raise LayoutError("; ".join(reasons))

    def plan(ours: tuple[Buffer, ...], src, theirs: tuple[Buffer, ...], dst) -> TransferPlan:
        _check_count(own, ours, src)
        _check_count(layout, theirs, dst)
        if sends_whole_rows(own, layout, can_pack):
            return make_packed_plan(own, layout, ours, src, theirs, dst)
        pairs = match_buffers(own, layout, ours, theirs)
        return make_plan(pairs, own.page_size, ours, src, theirs, dst)

    state = None
    if own_pointers.state is not None and peer_pointers.state is not None:
        state = plan(own.state, own_pointers.state, layout.state, peer_pointers.state)
    kv = plan(own.kv, own_pointers.kv, layout.kv, peer_pointers.kv)
    # From decode's buffers alone, so that all prefill ranks come to the same answer: also a stage
    # without sliding windows, if these are all that decode interleaves.
    needs_interleaving = (
        own.tp_size > layout.tp_size
        and sends_whole_rows(own, layout, can_pack)
        and any(
            unpacked_reason(buffer, layout, own.tp_size) is None
            for buffer in (*layout.kv, *layout.state)
        )
    )
    return PeerPlan(layout, kv, state, make_aux_plan(own, layout), needs_interleaving)


def sends_whole_rows(own: RankLayout, decode: RankLayout, can_pack: bool) -> bool:
    """Whether prefill rank `own` sends head slices as whole rows to this decode rank.

    With MLA only one TP rank of a stage sends, so that a draft's heads cannot come from several.

    Args:
        can_pack: Whether prefill has a packing buffer, which it needs if its TP size is smaller.
    """
    if own.tp_size == decode.tp_size or not is_split_by_heads(own):
        return False
    if own.tp_size < decode.tp_size:
        return can_pack
    return own.whole_rows and decode.whole_rows


def pair_layers(
    own: RankLayout,
    own_kv: Sequence[int],
    peer: Union[RankLayout, StockRegistration],
    peer_kv: Sequence[int],
) -> list[tuple[Buffer, int, int]]:
    """Returns (our buffer, our pointer, the peer's) for each KV buffer that both sides hold.

    The order is ours. This is for callers that plan their own copies: it ignores heads, which
    `plan_for_peer` considers.

    Raises:
        LayoutError: The peer lacks a layer of the target model, or describes other buffers than it
            registered.
    """
    layout = infer_layout(own, peer) if isinstance(peer, StockRegistration) else peer
    _check_count(own, own.kv, own_kv)
    _check_count(layout, layout.kv, peer_kv)
    return [
        (own.kv[i], own_kv[i], peer_kv[j]) for i, j in match_layers(own, layout, own.kv, layout.kv)
    ]


def _check_count(who: RankLayout, buffers: Sequence[Buffer], pointers: Sequence[int]) -> None:
    if len(buffers) != len(pointers):
        raise LayoutError(
            f"{who.name} describes {len(buffers)} buffers but registered {len(pointers)}"
        )
