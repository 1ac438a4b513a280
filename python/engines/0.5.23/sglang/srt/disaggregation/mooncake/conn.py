"""Mooncake and its derivatives: send KV by each peer's plan, whatever the TP sizes."""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import struct
import threading
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt
from sglang.srt.disaggregation.base.conn import KVPoll, StateType
from sglang.srt.disaggregation.kv_layout import (
    Bounds,
    Copies,
    LayoutError,
    PackedPlan,
    Sizes,
    TransferPlan,
    decode_layout,
    encode_sizes,
    find_layout_frame,
    find_sizes,
)
from sglang.srt.disaggregation.mooncake.utils import check_mooncake_custom_mem_pool_enabled
from sglang.srt.disaggregation.pd.back_off import FailedSessions
from sglang.srt.disaggregation.pd.copy_batches import write_copies
from sglang.srt.disaggregation.pd.memory_registration import (
    raise_only_at_startup,
    register_kv_then_aux,
)
from sglang.srt.disaggregation.pd.message_checks import (
    STAGING,
    check_frame_sizes,
    check_metadata_message,
    check_session_id,
    check_staging_message,
    drop_invalid,
)
from sglang.srt.disaggregation.pd.packing import copies_of_unit
from sglang.srt.disaggregation.pd.peers import (
    PeerRegistration,
    awaits_units,
    check_state_pages,
    pair_state_pages,
    plan_or_refusal,
)
from sglang.srt.disaggregation.pd.per_instance import PerInstance
from sglang.srt.disaggregation.pd.prefill_manager import PrefillManager
from sglang.srt.disaggregation.pd.session_ids import unreachable_reason
from sglang.srt.disaggregation.pd.write_bounds import BoundedWrites, lowest_and_highest
from sglang.srt.environ import envs

if TYPE_CHECKING:
    from sglang.srt.disaggregation.mooncake.conn import (
        ABORT_TAG,
        AuxDataCodec,
        DisaggregationMode,
        EngineKVArgsRegisterInfo,
        EngineMooncakeKVManager,
        TransferInfo,
    )

logger = logging.getLogger(__name__)

# Kinds of state of which the two sides may list different numbers of slots; None is an unknown one.
STATE_OF_ANY_LENGTH = (None, StateType.MAMBA, StateType.DSA_TAIL)

RENAMED = (
    ("KVArgsRegisterInfo", "EngineKVArgsRegisterInfo"),
    ("MooncakeKVManager", "EngineMooncakeKVManager"),
)


class KVArgsRegisterInfo(PeerRegistration, EngineKVArgsRegisterInfo):
    # Sizes of its buffers; None if it does not report them.
    sizes: Sizes | None = None
    # The memory it has registered, see `pd.write_bounds`.
    bounds: Bounds | None = None

    @classmethod
    def from_zmq(cls, msg: list[bytes]):
        """Reads a registration. Extends the engine's: with the buffers' layout and sizes."""
        info = super().from_zmq(msg)
        info.layout_frame, info.sizes = find_layout_frame(msg), find_sizes(msg)
        return info


class MooncakeKVManager(BoundedWrites, PrefillManager, EngineMooncakeKVManager):
    # Adds a frame, which stock decode ranks of this release read, too.
    kv_status_msg_carries_reason = True
    # Per transfer worker: `room`, the last one that failed while writes to it might go on.
    unsettled = threading.local()
    register_memory = staticmethod(register_kv_then_aux)
    failed_sessions: FailedSessions = PerInstance(FailedSessions)
    has_registered = False

    def register_buffer_to_engine(self) -> None:
        """Registers KV, state, packing and aux buffers with `register_memory`.

        Raises:
            RuntimeError: At startup, a buffer that the transfer engine sends cannot be registered;
                the text names it.
        """
        has_pool, pool = check_mooncake_custom_mem_pool_enabled()
        aux_over_tcp = envs.SGLANG_MOONCAKE_SEND_AUX_TCP.get() or (has_pool and pool == "NVLINK")
        self.make_packing()
        with raise_only_at_startup(self):
            self.register_memory(self.kv_args, self.engine.batch_register, aux_over_tcp)

    def _registerable_regions(self) -> list[tuple[int, int]]:
        """Returns what a pause deregisters. Extends the engine's: also memory to pack in."""
        regions = super()._registerable_regions()
        return regions if self.packing is None else [*regions, self.packing.region[1:]]

    def start_prefill_thread(self):
        """Starts prefill's threads. Extends the engine's: soon retries a session that failed."""
        self.failed_sessions = FailedSessions()
        super().start_prefill_thread()

    def _run_one_probe_pass(self) -> None:
        """Probes failed sessions. Extends the engine's: also those that workers may try again.

        It would take these for recovered, and probe them for ever.
        """
        with FailedSessions.showing_all():
            super()._run_one_probe_pass()

    def _register_staging_memory(self, ptr: int, size: int) -> None:
        super()._register_staging_memory(ptr, size)
        self.extra_memory = (*self.extra_memory, (ptr, size))

    # Messages from peers

    def _make_worker_recv(self, socket, timeout_ms: int = 500):
        """Returns a receive function. Extends the engine's: it drops invalid messages."""
        recv = super()._make_worker_recv(socket, timeout_ms)
        if self.disaggregation_mode == DisaggregationMode.DECODE:
            return drop_invalid(recv, self._check_decode_message)
        return drop_invalid(recv, self._check_prefill_message, self.failures.end_message)

    def _check_prefill_message(self, frames: list[bytes]) -> bool:
        """Raises for frames on which the engine's thread would crash.

        Returns True for a request for a room that has failed here; notifies its decode rank.
        """
        if frames[0] in STAGING:
            check_staging_message(frames, self._staging_ctx)
        elif frames[0] != ABORT_TAG:
            check_session_id(frames[3])
            if frames[0] == b"None":
                check_frame_sizes(frames)
                info = KVArgsRegisterInfo.from_zmq(frames)
                if self.requires_dcp_relayout(info.dst_dcp_size, info.dst_dcp_rank):
                    drafts = self.kv_args.num_draft_entries
                    targets = [info.dst_kv_item_len] * (len(self.kv_args.kv_item_lens) - drafts)
                    lengths = [*targets, *[None] * drafts]
                    self.prepare_dcp_token_item_lens(lengths, info.dst_dcp_size)
                    # The engine's thread would end if there is no memory left for these.
                    self._init_dcp_pack_buffers_once(info.dst_dcp_size, include_draft=True)
            else:
                info = TransferInfo.from_zmq(frames)
                check_metadata_message(info)
                self.note_metadata_sender(info.mooncake_session_id)
                if unreachable_reason(info.mooncake_session_id):
                    frames[7] = b"1"  # ranks without a port share a session id: one opens the room
                decode = None if info.is_dummy else (info.endpoint, info.dst_port)
                return self.reject_failed_room(info.room, decode)
        return False

    def _check_decode_message(self, frames: list[bytes]) -> bool:
        if frames[0] == self.AUX_DATA_HEADER:
            self._check_aux_data(frames)
        elif frames[0] in STAGING:
            check_staging_message(frames, self._staging_handler)
        return self.store_frames(frames)

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

    def _publish_peer_registration(
        self, mooncake_session_id: str, decode_kv_args: KVArgsRegisterInfo
    ) -> str | None:
        """Registers a decode rank; returns why it is refused, or None.

        Extends the engine's: makes a plan, and notes the rank's memory.
        """
        info, tp = decode_kv_args, (decode_kv_args.dst_tp_rank, decode_kv_args.dst_attn_tp_size)
        try:
            info.awaits_units = awaits_units(info.layout_frame, self.attn_tp_size)
            own = (self.kv_args, self.layout)
            info.plan, info.refusal = plan_or_refusal(mooncake_session_id, *own, info, tp)
            info.refusal = unreachable_reason(mooncake_session_id) or info.refusal
            self._set_peer_bounds(mooncake_session_id, info)
            super()._publish_peer_registration(mooncake_session_id, info)
        except Exception as error:
            # Add an entry even so: without one, the rank's rooms would wait.
            logger.exception(f"Decode {mooncake_session_id} could not be registered")
            info.refusal = f"prefill could not register this decode rank: {error!r}"
            self.decode_kv_args_table[mooncake_session_id] = info
        self.watch_peer(mooncake_session_id, info)
        return info.refusal or self.state_layout_rejections.get(mooncake_session_id)

    def handle_peer_recovered(self, name: str) -> None:
        with self.session_lock:
            self._unblacklist_session(name)

    def drop_peer(self, name: str) -> None:
        """Drops the session's failures and its layout checks; see `SilenceWatch.drop_peer`."""
        with self.session_lock:
            self._unblacklist_session(name)
            self.state_layout_rejections.pop(name, None)
            self.state_strides_validated.discard(name)

    def _set_peer_bounds(self, session: str, info: KVArgsRegisterInfo) -> None:
        """Notes which memory this decode rank has registered."""
        try:
            layout = decode_layout(info.layout_frame)
        except LayoutError:  # its refusal says why
            layout = None
        state = (info.dst_state_data_ptrs, info.dst_state_item_lens)
        staging = [(info.staging_base_ptr, info.staging_total_size)]
        told = (layout, info.sizes)
        self.set_bounds(info, session, *told, *state, staging if info.staging_base_ptr else ())

    def _validate_peer_state_layout(self, registration_info: KVArgsRegisterInfo):
        """Returns whether the state layout is fully checked, and why it is rejected, or None.

        Extends the engine's, which expects all state buffers to match by position: it does not
        check state that is sent by plan.
        """
        plan = registration_info.plan
        if plan is not None and plan.state is not None:
            return True, None
        return super()._validate_peer_state_layout(registration_info)

    def build_receiver_registration_message(self) -> list[bytes]:
        """Builds the registration. Extends the engine's: adds buffer layouts and sizes."""
        args = self.kv_args
        lens = (args.kv_data_lens, map(tuple, args.state_data_lens), args.aux_data_lens)
        sizes = encode_sizes(Sizes(*map(tuple, lens)))
        return [*self.append_layout(super().build_receiver_registration_message()), sizes]

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
            pages = (prefill_kv_indices, dst_kv_indices)
            return self.transfer_by_plan(session, "kv", plan.kv, *pages, executor)
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
        if plan is not None:
            pages = (prefill_kv_indices, dst_kv_indices)
            return self.transfer_by_plan(session, "kv", plan.kv, *pages, executor)
        pages = (prefill_kv_indices, dst_kv_ptrs, dst_kv_indices)
        peer = (dst_tp_rank, dst_attn_tp_size, dst_kv_item_len)
        self._check_pages(session, *pages, dst_kv_item_len)
        return super().send_kvcache_slice(session, *pages, *peer, executor, *more, **options)

    def _check_pages(self, session: str, src_pages, dst_ptrs, dst_pages, page_bytes: int) -> None:
        """Raises RuntimeError if the engine would send KV heads of a page that a side lacks.

        The engine sends only to buffers with pages of this size; a draft's may be smaller.
        """
        if not len(src_pages) or not len(dst_pages):
            return
        own, info = self.kv_args, self.decode_kv_args_table.get(session)
        if info is None:
            return
        theirs = info.dst_kv_item_lens or [page_bytes] * len(dst_ptrs)
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
        at_once = self.max_transfer_batch_indices
        at_once = at_once if at_once > 0 else max(1, len(src_pages))
        for start in range(0, len(src_pages), at_once):
            some = slice(start, start + at_once)
            yield plan.copies(src_pages[some], dst_pages[some])

    def send_aux(self, req: TransferInfo, prefill_aux_index: int, dst_aux_ptrs: list[int]):
        """Writes the request's metadata to the peer. Returns the transfer engine's status."""
        session, own = req.mooncake_session_id, self.kv_args.aux_data_ptrs
        plan = self.aux_plan_for(session)
        nvlink = self.enable_custom_mem_pool and self.custom_mem_pool_type == "NVLINK"
        if plan is None or nvlink or envs.SGLANG_MOONCAKE_SEND_AUX_TCP.get():
            return super().send_aux(req, prefill_aux_index, dst_aux_ptrs)
        slots = (own, prefill_aux_index, dst_aux_ptrs, req.dst_aux_index)
        return self.engine.batch_transfer_sync(session, *plan.copies(*slots).tolist())

    def send_aux_tcp(self, req: TransferInfo, prefill_aux_index: int, dst_aux_ptrs: list[int]):
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
        req: TransferInfo,
        prefill_state_indices: list,
        executor: concurrent.futures.ThreadPoolExecutor,
        target_rank_registration_info: KVArgsRegisterInfo | None = None,
    ):
        """Writes state to the peer. Returns the transfer engine's status."""
        plan = self.plan_for(req.mooncake_session_id)
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

    def _check_state_lists(self, req: TransferInfo, own: list) -> None:
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

    def _state_slots(self, req: TransferInfo) -> list:
        """Returns decode's slots by kind of state; only the first number of a DSA tail, its row.

        A DSA tail's other numbers are places within that row.
        """
        kinds = [*self.kv_args.state_types, *[None] * len(req.dst_state_indices)]
        return [
            slots[:1] if kind == StateType.DSA_TAIL else slots
            for kind, slots in zip(kinds, req.dst_state_indices)
        ]

    def transfer_worker(self, *own, **options):
        """Sends chunk after chunk. Extends the engine's: an error only fails its room."""
        while True:
            self.unsettled.room = None
            try:
                return super().transfer_worker(*own, **options)
            except Exception as error:
                try:
                    self._fail_unsettled(error.__context__ or error)
                except Exception:  # a worker that ends would block its decode ranks for good
                    logger.exception(f"Room {self.unsettled.room}: could not notify decode")

    def conclude_transfer(self, *, bootstrap_room: int, status: KVPoll, **more) -> KVPoll | None:
        """Concludes a room. Extends the engine's: success resets its peers' failure counts."""
        if status == KVPoll.Success and isinstance(self.failed_sessions, FailedSessions):
            self.failed_sessions.reset(self.transfer_infos.get(bootstrap_room, ()))
        return super().conclude_transfer(bootstrap_room=bootstrap_room, status=status, **more)

    def poison_deferred_ack_room(self, room: int) -> None:
        """Marks a room that may still be written to. Extends the engine's: notes the last."""
        self.unsettled.room = room
        super().poison_deferred_ack_room(room)

    def _fail_unsettled(self, error: BaseException) -> None:
        room = self.unsettled.room
        logger.error(f"Room {room}: could not send KV", exc_info=error)
        if room is None:
            return
        if isinstance(error, LayoutError):  # no write was started
            self._deferred_ack_poisoned_rooms.discard(room)
        self._staging_outstanding.pop(room, None)
        reason = f"Prefill could not send KV: {error}".encode(errors="replace").decode()
        self.conclude_failure(bootstrap_room=room, failure_reason=reason)
