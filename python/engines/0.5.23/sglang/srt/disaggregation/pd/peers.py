"""Prefill: what is sent to each decode rank, by plan, and why a request to it fails.

registration     makes a plan, refuses the decode rank, or leaves it to the engine
a chunk          is checked before it is queued: incompatibilities, too few pages
the queue        writes by plan; without a plan, as the engine does
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Optional

from msgspec.structs import replace
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.kv_layout import (
    AuxPlan,
    LayoutError,
    PeerPlan,
    Pointers,
    RankLayout,
    StockRegistration,
    decode_layout,
)
from sglang.srt.disaggregation.pd.peer_plans import plan_registered

logger = logging.getLogger(__name__)


def check_state_pages(kind: Any, ours: Sequence[int], theirs: Sequence[int]) -> None:
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


class PlannedTransfers:
    """Mixin for a prefill rank's KV manager.

    `decode_kv_args_table` has each registered decode rank; its registration has `plan`, None if
    the engine sends its own way, and `refusal`, empty unless the rank is refused. `sent_pages`
    comes from `CommonKVManager`, `silence_reason` from `pd.peer_silence`.
    """

    def set_plan(self, name: str, info: Any, tp: tuple[int, int], page_bytes: int) -> None:
        """Sets the `plan` or the `refusal` of a decode rank's registration.

        Leaves a rank to the engine if it neither describes itself nor looks like a stock one.

        Args:
            name: The decode rank's session id or NIXL agent name.
            info: Its registration; `layout_frame` is empty if it does not describe itself.
            tp: Its attention TP rank and size.
            page_bytes: Bytes per page of its first buffer.
        """
        info.plan, info.refusal = None, ""
        if self.layout is None or info.requires_dcp_relayout:
            return
        frame = info.layout_frame
        try:
            plan = self._make_plan(name, info, decode_layout(frame), tp, page_bytes)
            if frame or self.matches_inferred_layout(info, plan.layout):
                info.plan = plan
                return
            why = "its buffers do not match those of a stock rank with this model"
        except LayoutError as error:
            why = str(error)
        except Exception as error:
            # Such as addresses above the signed range, which the engine may handle.
            logger.warning(
                f"No transfer plan for decode {name}: {error!r}. "
                "Transfers use the engine's own code."
            )
            return
        if frame:
            info.refusal = why
            logger.error(f"Refusing decode {name}: {why}")
        else:
            logger.warning(
                f"Decode {name} does not describe its KV buffers, and they cannot be inferred: "
                f"{why}. Transfers use the engine's own code."
            )

    def _make_plan(
        self,
        name: str,
        info: Any,
        layout: Optional[RankLayout],
        tp: tuple[int, int],
        page_bytes: int,
    ) -> PeerPlan:
        args, own, state = self.kv_args, self.layout, None
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
            page_bytes=page_bytes,
        )
        pointers = Pointers(args.kv_data_ptrs, args.state_data_ptrs[0] if own.state else None)
        return plan_registered(
            name, own, pointers, layout, facts, Pointers(info.dst_kv_ptrs, state)
        )

    def matches_inferred_layout(self, info: Any, layout: RankLayout) -> bool:
        """Returns whether a peer's page sizes match the layout that was inferred for it."""
        known = list(zip(layout.kv, info.dst_kv_item_lens))
        if len(info.dst_state_item_lens) == 1:
            known += zip(layout.state, info.dst_state_item_lens[0])
        return all(length == buffer.page_bytes for buffer, length in known if buffer.page_bytes)

    def plan_for(self, peer: str) -> Optional[PeerPlan]:
        """Returns the plan for a decode rank; None if the engine sends its own way."""
        info = self.decode_kv_args_table.get(peer)
        return None if info is None else info.plan

    def aux_plan_for(self, peer: str) -> Optional[AuxPlan]:
        """Returns the plan for a decode rank's metadata; None if the engine sends them."""
        plan = self.plan_for(peer)
        return plan.aux if plan is not None and plan.aux.widths else None

    def pair_state_pages(self, src: Sequence, dst: Sequence) -> tuple[Sequence[int], Sequence[int]]:
        """Returns the source and destination pages of the one kind of state sent by plan.

        Args:
            src, dst: Each side's pages, by kind of state.

        Raises:
            LayoutError: The two lists differ in length.
        """
        ours, theirs = (side[0] if len(side) and side[0] is not None else () for side in (src, dst))
        check_state_pages(self.kv_args.state_types[0], ours, theirs)
        return ours, theirs

    def add_transfer_request(
        self,
        bootstrap_room: int,
        kv_indices: Any,
        index_slice: Any,
        is_last_chunk: bool,
        *more,
        **options,
    ) -> None:
        """Queues one chunk. Extends the engine's: an error only fails its room, on both sides."""
        try:
            reason = self._refusal_reason(bootstrap_room, index_slice)
            if not reason:
                if self.verifier is not None and bootstrap_room in self.transfer_infos:
                    self.sent_pages.note(
                        bootstrap_room, index_slice, kv_indices, options.get("state_indices")
                    )
                chunk = (bootstrap_room, kv_indices, index_slice, is_last_chunk)
                super().add_transfer_request(*chunk, *more, **options)
                return
        except Exception as error:
            logger.exception(f"Room {bootstrap_room}: a chunk could not be queued")
            reason = f"Prefill could not send KV: {error!r}"
        self.conclude_failure(bootstrap_room=bootstrap_room, failure_reason=reason)

    def _refusal_reason(self, room: int, index_slice: Any) -> str:
        if self.request_status.get(room, KVPoll.Failed) == KVPoll.Failed:
            return ""  # the room is over: none of its chunks is sent
        silent = self.silence_reason(room)
        if silent:
            return silent
        for peer, info in list(self.transfer_infos.get(room, {}).items()):
            if info.is_dummy:
                continue
            known = self.decode_kv_args_table.get(peer)
            if known is None:
                return (
                    f"decode {peer} requested room {room} and is not registered with this prefill "
                    "rank"
                )
            if known.refusal:
                return f"Prefill cannot serve this decode server: {known.refusal}"
            held = len(info.dst_kv_indices)
            if (
                known.plan is not None
                and isinstance(index_slice, slice)
                and index_slice.stop > held
            ):
                return (
                    f"prefill sends {index_slice.stop} pages where decode has set aside {held}; "
                    "the two servers disagree about this request's length"
                )
        return ""
