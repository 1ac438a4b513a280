"""Mooncake and its derivatives: send by each peer's plan, whatever the TP sizes."""

from __future__ import annotations

import concurrent.futures
import contextlib
import struct
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Literal

import numpy.typing as npt
from sglang.srt.disaggregation.base.conn import StateType
from sglang.srt.disaggregation.common.utils import AuxDataCodec
from sglang.srt.disaggregation.kv_layout import (
    Bounds,
    Copies,
    LayoutError,
    PackedPlan,
    Sizes,
    TransferPlan,
    decode_layout,
    find_sizes,
)
from sglang.srt.disaggregation.pd.copy_batches import write_copies
from sglang.srt.disaggregation.pd.memory_registration import (
    raise_only_at_startup,
    register_kv_then_aux,
)
from sglang.srt.disaggregation.pd.packing import copies_of_unit
from sglang.srt.disaggregation.pd.peers import (
    PeerRegistration,
    awaits_units,
    check_state_pages,
    pair_state_pages,
    plan_or_refusal,
)
from sglang.srt.disaggregation.pd.prefill_manager import PrefillManager
from sglang.srt.disaggregation.pd.session_ids import unreachable_reason
from sglang.srt.disaggregation.pd.write_bounds import BoundedWrites, lowest_and_highest
from sglang.srt.environ import envs

if TYPE_CHECKING:
    import numpy as np

DSA_TAIL = getattr(StateType, "DSA_TAIL", None)  # after 0.5.18
# Kinds of state of which the two sides may list different numbers of slots; None is an unknown one.
STATE_OF_ANY_LENGTH = (None, StateType.MAMBA, DSA_TAIL)


class SessionRegistration(PeerRegistration):
    """Base of a decode rank's registration, before the engine's."""

    # Sizes of its buffers; None if it does not report them.
    sizes: Sizes | None = None
    # The memory it has registered, see `pd.write_bounds`.
    bounds: Bounds | None = None

    def read_own_frames(self, msg: list[bytes]) -> None:
        """Reads the frames of a registration that describe buffers and their sizes."""
        super().read_own_frames(msg)
        self.sizes = find_sizes(msg)


class MooncakeSends(BoundedWrites, PrefillManager):
    """Base of a rank's KV manager, before the engine's: registers memory, and writes by plan."""

    register_memory = staticmethod(register_kv_then_aux)
    has_registered = False

    def register_buffers(self, aux_over_tcp: bool) -> None:
        """Registers KV, state, packing and aux buffers with `register_memory`.

        Args:
            aux_over_tcp: Whether the transfer engine never reads aux.

        Raises:
            RuntimeError: At startup, a buffer that the transfer engine sends cannot be registered;
                the text names it.
        """
        self.start_transfer_log()
        self.make_packing()
        with raise_only_at_startup(self):
            self.register_memory(self.kv_args, self.engine.batch_register, aux_over_tcp)

    def _registerable_regions(self) -> list[tuple[int, int]]:
        """Returns what a pause deregisters. Extends the engine's: also memory to pack in."""
        regions = super()._registerable_regions()
        return regions if self.packing is None else [*regions, self.packing.region[1:]]

    def _check_aux_data(self, frames: list[bytes]) -> None:
        """Raises ValueError for a metadata row that fits no open room or no buffer."""
        _, room, buffer, slot, length, data = frames
        args, number, row = self.kv_args, int(buffer), int(slot)
        (announced,) = struct.unpack(">I", length)
        if int(room) not in self.request_status:  # its slot may be another request's by now
            raise ValueError(f"metadata of room {int(room)}, which is not open")
        if not 0 <= number < len(args.aux_data_ptrs):
            raise ValueError(f"no metadata buffer {number}, only {len(args.aux_data_ptrs)}")
        item, size = args.aux_item_lens[number], args.aux_data_lens[number]
        if not (0 <= row < size // item and len(data) == announced):
            raise ValueError(
                f"metadata of {len(data)} bytes (announced as {announced}) for slot {row} of "
                f"buffer {number}, which has {size // item} slots of {item} bytes"
            )
        if announced != item:
            raise ValueError(
                f"metadata row {number} has {item} bytes here, {announced} on prefill; "
                "enable speculative decoding on both servers or on neither"
            )

    def plan_registration(self, session: str, info: SessionRegistration) -> None:
        """Makes the plan for a decode rank that registers, or refuses it; notes its memory."""
        tp = (info.dst_tp_rank, info.dst_attn_tp_size)
        info.awaits_units = awaits_units(info.layout_frame, self.attn_tp_size)
        info.plan, info.refusal = plan_or_refusal(session, self.kv_args, self.layout, info, tp)
        info.refusal = unreachable_reason(session) or info.refusal
        self._set_peer_bounds(session, info)

    def _set_peer_bounds(self, session: str, info: SessionRegistration) -> None:
        """Notes which memory this decode rank has registered."""
        try:
            layout = decode_layout(info.layout_frame)
        except LayoutError:  # its refusal says why
            layout = None
        state = (info.dst_state_data_ptrs, info.dst_state_item_lens)
        staging = [(info.staging_base_ptr, info.staging_total_size)]
        told = (layout, info.sizes)
        self.set_bounds(info, session, *told, *state, staging if info.staging_base_ptr else ())

    # Transfers

    def send_kvcache(
        self,
        mooncake_session_id: str,
        prefill_kv_indices: npt.NDArray[np.int32],
        dst_kv_ptrs: Sequence[int],
        dst_kv_indices: npt.NDArray[np.int32],
        executor: concurrent.futures.ThreadPoolExecutor,
        dst_layer_ids: list[int] | None = None,
        dst_device_kv_indices: npt.NDArray[np.int32] | None = None,
        *more,
        **options,
    ) -> int:
        """Writes these pages of all layers to the peer. Returns the transfer engine's status."""
        session, plan = mooncake_session_id, self.plan_for(mooncake_session_id)
        if plan is not None and dst_device_kv_indices is None:
            self.note_sending(session, "kv", plan.kv)
            pages = (prefill_kv_indices, dst_kv_indices)
            return self.transfer_by_plan(session, "kv", plan.kv, *pages, executor)
        self.note_sending(session, "kv")
        sent = (session, prefill_kv_indices, dst_kv_ptrs, dst_kv_indices, executor)
        more = (dst_layer_ids, dst_device_kv_indices, *more)
        return super().send_kvcache(*sent, *more, **options)

    def send_kvcache_slice(
        self,
        mooncake_session_id: str,
        prefill_kv_indices: npt.NDArray[np.int32],
        dst_kv_ptrs: Sequence[int],
        dst_kv_indices: npt.NDArray[np.int32],
        dst_tp_rank: int,
        dst_attn_tp_size: int,
        dst_kv_item_len: int,
        executor: concurrent.futures.ThreadPoolExecutor,
        *more,
        **options,
    ) -> int:
        """Writes the KV heads that both sides hold, if their TP sizes differ."""
        session, plan = mooncake_session_id, self.plan_for(mooncake_session_id)
        self.note_sending(session, "kv", plan and plan.kv)
        if plan is not None:
            pages = (prefill_kv_indices, dst_kv_indices)
            return self.transfer_by_plan(session, "kv", plan.kv, *pages, executor)
        pages = (prefill_kv_indices, dst_kv_ptrs, dst_kv_indices)
        peer = (dst_tp_rank, dst_attn_tp_size, dst_kv_item_len)
        self._check_pages(session, *pages, dst_kv_item_len)
        return super().send_kvcache_slice(session, *pages, *peer, executor, *more, **options)

    def _check_pages(self, session: str, src_pages, dst_ptrs, dst_pages, page_bytes: int) -> None:
        """Raises OutOfBounds if the engine would send KV heads of a page that a side lacks.

        The engine sends only to buffers with pages of this size; a draft's may be smaller.
        """
        if not len(src_pages) or not len(dst_pages):
            return
        own, info = self.kv_args, self.decode_kv_args_table.get(session)
        if info is None:
            return
        theirs = getattr(info, "dst_kv_item_lens", None) or [page_bytes] * len(dst_ptrs)
        written = [ptr for ptr, size in zip(dst_ptrs, theirs) if size == page_bytes]
        src = lowest_and_highest(zip(own.kv_data_ptrs, own.kv_item_lens), src_pages)
        dst = lowest_and_highest([(ptr, page_bytes) for ptr in written], dst_pages)
        self.check_bounds(session, src, dst)

    def transfer_by_plan(
        self,
        session: str,
        what: Literal["kv", "state"],
        plan: TransferPlan,
        src_pages: npt.NDArray[np.int32],
        dst_pages: npt.NDArray[np.int32],
        executor: concurrent.futures.ThreadPoolExecutor,
    ) -> int:
        """Writes these pages. Returns the transfer engine's status, 0 if all are written.

        Raises:
            LayoutError: A side lacks one of these pages, or the lists differ in length; nothing is
                written.
        """
        in_threads = self.enable_custom_mem_pool and (
            self.custom_mem_pool_type != "INTRA_NODE_NVLINK"
        )
        is_sliced = plan.is_sliced or isinstance(plan, PackedPlan)
        with contextlib.closing(self._batches(what, plan, src_pages, dst_pages)) as batches:
            for copies in batches:
                status = write_copies(self.engine, session, copies, executor, is_sliced, in_threads)
                if status != 0:
                    return status
        return 0

    def _batches(
        self,
        what: Literal["kv", "state"],
        plan: TransferPlan,
        src_pages: npt.NDArray[np.int32],
        dst_pages: npt.NDArray[np.int32],
    ) -> Iterator[Copies]:
        """Yields the copies of a chunk, as many as one call writes."""
        if isinstance(plan, PackedPlan):
            for copies, _ in copies_of_unit(self.packing, what, plan, src_pages, dst_pages):
                yield copies
            return
        plan.validate_pages(src_pages, dst_pages)
        at_once = getattr(self, "max_transfer_batch_indices", 0)
        at_once = at_once if at_once > 0 else max(1, len(src_pages))
        for start in range(0, len(src_pages), at_once):
            some = slice(start, start + at_once)
            yield plan.copies(src_pages[some], dst_pages[some])

    def send_aux(self, req: object, prefill_aux_index: int, dst_aux_ptrs: list[int]) -> int:
        """Writes the request's metadata to the peer. Returns the transfer engine's status."""
        session, own = req.mooncake_session_id, self.kv_args.aux_data_ptrs
        plan = self.aux_plan_for(session)
        self.note_sending(session, "aux")
        nvlink = self.enable_custom_mem_pool and self.custom_mem_pool_type == "NVLINK"
        if plan is None or nvlink or envs.SGLANG_MOONCAKE_SEND_AUX_TCP.get():
            return super().send_aux(req, prefill_aux_index, dst_aux_ptrs)
        slots = (own, prefill_aux_index, dst_aux_ptrs, req.dst_aux_index)
        return self.engine.batch_transfer_sync(session, *plan.copies(*slots).tolist())

    def send_aux_tcp(self, req: object, prefill_aux_index: int, dst_aux_ptrs: list[int]) -> int:
        """Sends the metadata in messages, one per row. Returns 0: no arrival is reported."""
        plan, own = self.aux_plan_for(req.mooncake_session_id), self.kv_args.aux_data_ptrs
        if plan is None:
            return super().send_aux_tcp(req, prefill_aux_index, dst_aux_ptrs)
        rows = plan.copies(own, prefill_aux_index, dst_aux_ptrs, req.dst_aux_index)
        for row, (address, _, size) in zip(plan.rows, rows.T.tolist()):
            data = AuxDataCodec.serialize_data_from_buffer(address, size)
            self.send_aux_data_to_endpoint(
                req.endpoint, req.dst_port, req.room, row, req.dst_aux_index, data
            )
        return 0

    def maybe_send_extra(
        self,
        req: object,
        prefill_state_indices: list,
        executor: concurrent.futures.ThreadPoolExecutor,
        target_rank_registration_info: SessionRegistration | None = None,
    ) -> int:
        """Writes state to the peer. Returns the transfer engine's status."""
        plan = self.plan_for(req.mooncake_session_id)
        self.note_sending(req.mooncake_session_id, "state", plan and plan.state)
        if plan is None or plan.state is None:
            self._check_state_lists(req, prefill_state_indices)
            self.check_state_slots(req.mooncake_session_id, self._state_slots(req))
            return super().maybe_send_extra(
                req, prefill_state_indices, executor, target_rank_registration_info
            )
        kind = self.kv_args.state_types[0]
        pages = pair_state_pages(kind, prefill_state_indices, req.dst_state_indices)
        session = req.mooncake_session_id
        return self.transfer_by_plan(session, "state", plan.state, *pages, executor)

    def _check_state_lists(self, req: object, own: list) -> None:
        """Raises LayoutError for page lists of different lengths; the engine would cut one.

        Leaves kinds of state that decode has not registered to the engine.
        """
        known = self.decode_kv_args_table.get(req.mooncake_session_id)
        registered = own if known is None else known.dst_state_data_ptrs
        for kind, ours, ptrs, theirs in zip_longest(
            self.kv_args.state_types, own, registered, req.dst_state_indices
        ):
            if kind not in STATE_OF_ANY_LENGTH and ours is not None and ptrs:
                check_state_pages(kind, ours, theirs or ())

    def _state_slots(self, req: object) -> list:
        """Returns decode's slots by kind of state; only the first number of a DSA tail, its row.

        A DSA tail's other numbers are places within that row.
        """
        kinds = [*self.kv_args.state_types, *[None] * len(req.dst_state_indices)]
        return [
            slots[:1] if kind == DSA_TAIL else slots
            for kind, slots in zip(kinds, req.dst_state_indices)
        ]
