"""From two descriptions and two pointer lists to the plans for one peer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Optional, Union

from .aux_buffers import AuxPlan, make_aux_plan
from .edits import TransferPlan, make_plan
from .infer import StockRegistration, infer_layout
from .local_layout import Buffer, LayoutError, RankLayout
from .match import incompatibilities, match_buffers, match_layers


@dataclass(frozen=True)
class Pointers:
    """Base addresses as a rank registers them: `KVArgs.kv_data_ptrs` and `KVArgs.state_data_ptrs`.

    `state` is None where the transport sends state by other means.
    """

    kv: Sequence[int]
    state: Optional[Sequence[int]] = None


@dataclass(frozen=True)
class PeerPlan:
    """What a prefill rank needs to send to one decode rank."""

    layout: RankLayout
    kv: TransferPlan
    state: Optional[TransferPlan]
    aux: AuxPlan


def plan_for_peer(
    own: RankLayout,
    own_pointers: Pointers,
    peer: Union[RankLayout, StockRegistration],
    peer_pointers: Pointers,
) -> PeerPlan:
    """Plans from prefill rank `own` to a decode rank, described or (as `StockRegistration`) stock.

    Raises:
        LayoutError: The two cannot work together; the text holds every reason.
    """
    layout = infer_layout(own, peer) if isinstance(peer, StockRegistration) else peer
    reasons = incompatibilities(own, layout)
    if reasons:
        raise LayoutError("; ".join(reasons))

    def plan(ours: tuple[Buffer, ...], src, theirs: tuple[Buffer, ...], dst) -> TransferPlan:
        _check_count(own, ours, src)
        _check_count(layout, theirs, dst)
        pairs = match_buffers(own, layout, ours, theirs)
        return make_plan(pairs, own.page_size, ours, src, theirs, dst)

    state = None
    if own_pointers.state is not None and peer_pointers.state is not None:
        state = plan(own.state, own_pointers.state, layout.state, peer_pointers.state)
    kv = plan(own.kv, own_pointers.kv, layout.kv, peer_pointers.kv)
    return PeerPlan(layout, kv, state, make_aux_plan(own, layout))


def pair_layers(
    own: RankLayout,
    own_kv: Sequence[int],
    peer: Union[RankLayout, StockRegistration],
    peer_kv: Sequence[int],
) -> list[tuple[Buffer, int, int]]:
    """(our buffer, our pointer, the peer's pointer) of each KV buffer that both sides hold.

    In our order. For callers that copy by themselves; `plan_for_peer` knows of heads, too.

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
            f"{who.name} describes {len(buffers)} buffers and registered {len(pointers)}"
        )
