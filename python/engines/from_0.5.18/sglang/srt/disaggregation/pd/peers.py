"""Prefill: what is sent to each decode rank, by plan, and why a request to it fails.

registration     makes a plan, refuses the decode rank, or leaves it to the engine
a chunk          is checked before it is queued: incompatibilities, too few pages
the queue        writes by plan; without a plan, as the engine does
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace
from sglang.srt.disaggregation.base.conn import KVArgs, StateType
from sglang.srt.disaggregation.kv_layout import (
    LayoutError,
    PeerPlan,
    Pointers,
    RankLayout,
    StockRegistration,
    decode_layout,
    find_layout_frame,
)
from sglang.srt.disaggregation.pd.peer_plans import plan_registered
from sglang.srt.disaggregation.pd.server_names import server_name

logger = logging.getLogger(__name__)


class PeerRegistration:
    """What the patch set adds to an engine's registration of a decode rank."""

    # The description of its buffers; empty if it sends none.
    layout_frame: bytes = b""
    # The server it belongs to, see `pd.server_names`.
    server: str = ""
    # How it is served: by this plan, or not at all, for this reason; else by the engine's own code.
    plan: PeerPlan | None = None
    refusal: str = ""
    # Whether it waits to be told which chunks it must interleave, if any.
    awaits_units: bool = False

    def read_own_frames(self, msg: list[bytes]) -> None:
        """Reads the frame of a registration that describes buffers."""
        self.layout_frame = find_layout_frame(msg)
        self.server = server_name(self.layout_frame, getattr(self, "endpoint", ""))


def is_dummy(info: Any) -> bool:
    """Whether a decode rank requests a room without pages, since others serve it."""
    value = info.is_dummy
    return value() if callable(value) else value  # a method in 0.5.18's NIXL


def awaits_units(layout_frame: bytes, prefill_tp: int) -> bool:
    """Whether a decode rank waits to be told which chunks it must interleave, if any.

    Args:
        layout_frame: The description of its buffers; empty if it sends none.
        prefill_tp: Prefill's attention TP size.
    """
    try:
        layout = decode_layout(layout_frame)
    except LayoutError:  # its refusal says why
        return False
    return layout is not None and layout.whole_rows and layout.tp_size < prefill_tp


def plan_or_refusal(
    name: str,
    args: KVArgs,
    own: RankLayout | None,
    info: PeerRegistration,
    tp: tuple[int, int],
    is_on_device: bool = True,
) -> tuple[PeerPlan | None, str]:
    """Returns the plan for a decode rank that registers, or why it is refused.

    With neither, the engine's own code serves the rank: this rank's buffers are not described, no
    plan could be made, decode uses context parallelism, or the rank neither describes itself nor
    looks like a stock rank.

    Args:
        name: The decode rank's session id or NIXL agent name.
        args, own: This prefill rank's buffers, and their layout.
        info: The decode rank's registration.
        tp: Its attention TP rank and size.
        is_on_device: Whether it registered all of its KV as `VRAM`, as stock ranks do.
    """
    if own is None or info.requires_dcp_relayout:
        return None, ""
    try:
        plan = _make_plan(name, args, own, info, tp)
        if info.layout_frame or (is_on_device and _has_page_sizes_of(plan.layout, info)):
            return plan, ""
        why = "its buffers do not match those of a stock rank with this model"
    except LayoutError as error:
        why = str(error)
    except Exception as error:
        # Such as addresses above the signed range, which the engine may handle.
        logger.warning(
            f"No transfer plan for decode {name}: {error!r}. Transfers use the engine's own code."
        )
        return None, ""
    if info.layout_frame:
        logger.error(f"Refusing decode {name}: {why}")
        return None, why
    logger.warning(
        f"Decode {name} does not describe its KV buffers, and they cannot be inferred: {why}. "
        "Transfers use the engine's own code."
    )
    return None, ""


def _make_plan(
    name: str, args: KVArgs, own: RankLayout, info: PeerRegistration, tp: tuple[int, int]
) -> PeerPlan:
    layout, state = decode_layout(info.layout_frame), None
    rows = len(info.dst_aux_ptrs) if layout is None else len(layout.aux)
    if rows != len(own.aux):  # some rows are optional: left to the engine
        own = replace(own, aux=(), aux_slots=0)
        layout = layout and replace(layout, aux=(), aux_slots=0)
    if own.state and len(info.dst_state_data_ptrs) == 1:
        state = info.dst_state_data_ptrs[0]
    facts = StockRegistration(
        tp_rank=tp[0] % tp[1],
        tp_size=tp[1],
        kv_pointers=len(info.dst_kv_ptrs),
        state_pointers=None if state is None else len(state),
        page_bytes=info.dst_kv_item_len,
    )
    pointers = Pointers(args.kv_data_ptrs, args.state_data_ptrs[0] if own.state else None)
    theirs = Pointers(info.dst_kv_ptrs, state)
    can_pack = args.packing is not None
    return plan_registered(name, own, pointers, layout, facts, theirs, can_pack)


def _has_page_sizes_of(layout: RankLayout, info: PeerRegistration) -> bool:
    """Whether a registration has the page sizes of the layout that was inferred for it."""
    # 0.5.18's Mooncake tells only that of the first buffer.
    lengths = getattr(info, "dst_kv_item_lens", [info.dst_kv_item_len])
    known = list(zip(layout.kv, lengths))
    if len(info.dst_state_item_lens) == 1:
        known += zip(layout.state, info.dst_state_item_lens[0])
    return all(length == buffer.page_bytes for buffer, length in known if buffer.page_bytes)


def chunk_refusal(known: PeerRegistration, index_slice: slice, held: int) -> str:
    """Returns why a chunk cannot be sent to a decode rank that requested its room; "" if it can.

    Args:
        known: The rank's registration.
        index_slice: The chunk's place among the request's pages.
        held: Pages that the rank has set aside for the request.
    """
    if known.refusal:
        return f"Prefill cannot serve this decode server: {known.refusal}"
    is_planned = known.plan is not None and isinstance(index_slice, slice)
    if is_planned and index_slice.stop > held:
        return (
            f"prefill sends {index_slice.stop} pages where decode has set aside {held}; "
            "the two servers disagree about this request's length"
        )
    return ""


def pair_state_pages(
    kind: StateType,
    src: Sequence[Sequence[int] | None],
    dst: Sequence[Sequence[int] | None],
) -> tuple[Sequence[int], Sequence[int]]:
    """Returns the source and destination pages of the one kind of state sent by plan.

    Args:
        src, dst: Each side's pages, by kind of state.

    Raises:
        LayoutError: The two lists differ in length.
    """
    ours, theirs = (side[0] if len(side) and side[0] is not None else () for side in (src, dst))
    check_state_pages(kind, ours, theirs)
    return ours, theirs


def check_state_pages(kind: StateType, ours: Sequence[int], theirs: Sequence[int]) -> None:
    """Checks that both sides list the same number of pages, which pair by position.

    Both list pages by the same rule, from decode's prefix or the window's first page on. If one
    list is shorter, nothing says which of its ends is missing.

    Raises:
        LayoutError: The two lists differ in length.
    """
    if len(ours) != len(theirs):
        raise LayoutError(
            f"prefill sends {len(ours)} pages of {kind.value} state where decode has set aside "
            f"{len(theirs)}; the two servers disagree about this request's length, its cached "
            "prefix or the window: start both with the same model and configuration"
        )
