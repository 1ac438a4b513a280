"""Mooncake (and what derives from it) sends KV by the peer's plan, whatever the TP sizes.

scheduler: add_transfer_request    a lane for each group of decode ranks    worker threads

A worker writes chunk after chunk by the transfer engine's synchronous calls. When a prefill rank
writes no more for a room, it notifies each decode rank of the room once:

    (room, status, sender's number, reason, digests, chunks)

Only decode ranks with the patch set get the reason; of these, ranks that verify get digests, and
ranks that interleave (`pd.interleaving`) get chunks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import struct
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt
import zmq
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import (
    CommonKVBootstrapServer,
    CommonKVManager,
    CommonKVReceiver,
)
from sglang.srt.disaggregation.kv_layout import (
    LayoutError,
    PackedPlan,
    PeerPlan,
    TransferPlan,
    Unit,
    decode_units,
    encode_layout,
    encode_units,
)
from sglang.srt.disaggregation.mooncake.utils import check_mooncake_custom_mem_pool_enabled
from sglang.srt.disaggregation.pd.back_off import PeerBackoff
from sglang.srt.disaggregation.pd.copy_batches import write_copies
from sglang.srt.disaggregation.pd.memory_registration import register_kv_then_aux
from sglang.srt.disaggregation.pd.message_checks import (
    check_numbers,
    pack_numbers,
    start_reader_thread,
)
from sglang.srt.disaggregation.pd.packing import copies_of_unit
from sglang.srt.disaggregation.pd.peer_queue import PeerQueue, PeerQueues, Peers
from sglang.srt.disaggregation.pd.peers import PeerRegistration, RoomRequest, split_state
from sglang.srt.disaggregation.pd.room_failures import (
    ENDED,
    FAILED_ELSEWHERE,
    UNSETTLED_SECONDS,
)
from sglang.srt.disaggregation.pd.session_ids import port_of, unreachable_reason
from sglang.srt.disaggregation.pd.verify_reports import VerifyRoutes
from sglang.srt.disaggregation.pd.write_bounds import BoundedWrites
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.environ import envs
from sglang.srt.utils import format_tcp_address, is_valid_ipv6_address

if TYPE_CHECKING:
    from sglang.srt.disaggregation.mooncake.conn import (
        AuxDataCodec,
        CommonKVSender,
        KVTransferError,
    )

logger = logging.getLogger(__name__)


@dataclasses.dataclass
class TransferInfo(RoomRequest):
    # Copies of a failed write may arrive until then, on the monotonic clock.
    unsettled_until: float = 0.0
    # Digests of what the room sent to the rank; None if the rank does not verify.
    digests: bytes | None = None
    # The chunks that the rank must interleave.
    units: list[Unit] = dataclasses.field(default_factory=list)

    @property
    def name(self) -> str:
        return self.mooncake_session_id


@dataclasses.dataclass
class TransferKVChunk:
    # The decode ranks' requests for which it is sent, by session. A later request with the same
    # room has another dictionary, even if it arrives while the chunk is queued.
    requests: dict[str, TransferInfo] = dataclasses.field(default_factory=dict)
    # Why the room failed, if the chunk only notifies decode of that.
    reason: str = ""


@dataclasses.dataclass
class KVArgsRegisterInfo(PeerRegistration):
    RENAMED = (("from_zmq", "_engine_from_zmq"),)

    @classmethod
    def from_zmq(cls, msg: list[bytes]) -> KVArgsRegisterInfo:
        """Reads a registration. Extends the engine's: limits numbers, and reads our own frames."""
        check_numbers(*msg[4:7], *msg[10:12])
        info = cls._engine_from_zmq(msg)
        info.read_own_frames(msg)
        return info

    @property
    def name(self) -> str:
        return self.mooncake_session_id

    @property
    def attn_tp(self) -> tuple[int, int]:
        return self.dst_tp_rank, self.dst_attn_tp_size


def _aux_goes_over_tcp() -> bool:
    """Whether `send_aux` bypasses the transfer engine, according to this side's environment.

    Decode does not know prefill's environment, and its manager has no attribute for it.
    """
    has_pool, pool = check_mooncake_custom_mem_pool_enabled()
    return envs.SGLANG_MOONCAKE_SEND_AUX_TCP.get() or (has_pool and pool == "NVLINK")


class MooncakeKVManager(BoundedWrites, PeerQueues, CommonKVManager):
    REMOVED = (
        "_handle_node_failure",
        "_send_kvcache_generic",
        "_transfer_data",
        "check_status",
        "record_failure",
        "send_kvcache_slice",
        "sync_status_to_decode_endpoint",
        "update_status",
    )
    _read_registration = KVArgsRegisterInfo.from_zmq
    _read_room = TransferInfo.from_zmq
    register_memory = staticmethod(register_kv_then_aux)
    # A call returns at the first copy that fails, or after its timeout, while others are under way.
    # MemFabric's calls do so, too, with any protocol.
    unsettled_seconds = UNSETTLED_SECONDS

    def register_buffer_to_engine(self) -> None:
        """Registers KV, state, packing and aux buffers with the engine, by `register_memory`.

        Raises:
            RuntimeError: A buffer that the engine must send is not registered; the text names it.
        """
        self.start_transfer_log()
        self.make_packing(envs.SGLANG_DISAGGREGATION_QUEUE_SIZE.get())
        self.register_memory(self.kv_args, self.engine.batch_register, _aux_goes_over_tcp())

    def send_kvcache(
        self,
        mooncake_session_id: str,
        prefill_kv_indices: npt.NDArray[np.int32],
        dst_kv_ptrs: list[int],
        dst_kv_indices: npt.NDArray[np.int32],
        executor: ThreadPoolExecutor,
    ) -> int:
        """Writes these pages, int32 `[pages]`, of all layers to the peer, at its plan's addresses.

        Returns the transfer engine's status.

        Raises:
            LayoutError: The peer was refused, or the numbers of pages on the two sides differ.
        """
        plan = self._plan_for(mooncake_session_id).kv
        self.note_sending(mooncake_session_id, "kv", plan)
        pages = (prefill_kv_indices, dst_kv_indices)
        return self._transfer(mooncake_session_id, "kv", plan, *pages, executor)

    def _plan_for(self, session: str) -> PeerPlan:
        info = self.decode_kv_args_table[session]
        if info.plan is None:
            raise LayoutError(info.refusal)
        return info.plan

    def note_sending(self, session: str, kind: str, plan: TransferPlan | None = None) -> None:
        """Notes what a worker sends next to a decode session.

        Args:
            kind: `kv`, `state` or `aux`.
            plan: None if the engine sends in its own way.
        """
        if self.transfer_log.is_on:
            self.now_sending.set(session, self.worker_state.room, kind, plan)

    def _transfer(
        self,
        session: str,
        what: Literal["kv", "state"],
        plan: TransferPlan,
        src_pages: npt.NDArray[np.int32],
        dst_pages: npt.NDArray[np.int32],
        executor: ThreadPoolExecutor,
    ) -> int:
        is_packed = isinstance(plan, PackedPlan)
        how = (executor, plan.is_sliced or is_packed, self.enable_custom_mem_pool)
        if not is_packed:
            return write_copies(self.engine, session, plan.copies(src_pages, dst_pages), *how)
        # Closed at once, also by an error: the room's pages are read until then.
        unit = copies_of_unit(self.kv_args.packing, what, plan, src_pages, dst_pages)
        with closing(unit):
            for copies, _ in unit:
                status = write_copies(self.engine, session, copies, *how)
                if status != 0:
                    return status
        return 0

    def send_aux(self, req: TransferInfo, prefill_aux_index: int, dst_aux_ptrs: list[int]) -> int:
        """Writes the request's metadata to the peer. Returns the transfer engine's status."""
        self.note_sending(req.mooncake_session_id, "aux")
        nvlink = self.enable_custom_mem_pool and self.custom_mem_pool_type == "NVLINK"
        if nvlink or envs.SGLANG_MOONCAKE_SEND_AUX_TCP.get():  # the transfer engine is not used
            return self.send_aux_tcp(req, prefill_aux_index, dst_aux_ptrs)
        session, own = req.mooncake_session_id, self.kv_args.aux_data_ptrs
        slots = (own, prefill_aux_index, dst_aux_ptrs, req.dst_aux_index)
        return self.engine.batch_transfer_sync(
            session, *self._plan_for(session).aux.copies(*slots).tolist()
        )

    def send_aux_tcp(
        self, req: TransferInfo, prefill_aux_index: int, dst_aux_ptrs: list[int]
    ) -> int:
        """Sends the request's metadata in messages, one per row. Returns 0: there is no status."""
        plan, own = self._plan_for(req.mooncake_session_id).aux, self.kv_args.aux_data_ptrs
        rows = plan.copies(own, prefill_aux_index, dst_aux_ptrs, req.dst_aux_index)
        peer = (req.endpoint, req.dst_port, req.room)
        for row, (address, _, size) in zip(plan.rows, rows.T.tolist()):
            data = AuxDataCodec.serialize_data_from_buffer(address, size)
            self.send_aux_data_to_endpoint(*peer, row, req.dst_aux_index, data)
        return 0

    def _handle_aux_data(self, msg: list[bytes]):
        """Stores one metadata row that came in a message instead of by the transfer engine.

        Skips a row of another width: a stock prefill rank sends hidden states as wide as its own.
        Skips a row of a concluded room, whose slot may belong to another. No room waits for rows.
        """
        buffer, slot = int(msg[2]), int(msg[3])
        data, args = msg[5], self.kv_args
        if not 0 <= buffer < len(args.aux_data_ptrs):
            raise ValueError(f"no metadata buffer {buffer}, only {len(args.aux_data_ptrs)}")
        item, size = args.aux_item_lens[buffer], args.aux_data_lens[buffer]
        (announced,) = struct.unpack(">I", msg[4])
        if not (0 <= slot < size // item and len(data) == announced):
            raise ValueError(
                f"metadata of {len(data)} bytes (announced as {announced}) for slot {slot} of "
                f"buffer {buffer}, which has {size // item} slots of {item} bytes"
            )
        if announced == item:
            with self.rooms_lock:
                if int(msg[1]) in self.requested_rooms:
                    AuxDataCodec.deserialize_data_to_buffer(args, buffer, slot, data)
        else:
            logger.warning_once(
                f"Skipped metadata row {buffer}, which has {item} bytes here and {announced} on "
                "prefill; enable speculative decoding on both servers or on neither"
            )

    def maybe_send_extra(
        self,
        req: TransferInfo,
        prefill_state_indices: list[int],
        dst_state_data_ptrs: list[int],
        executor: ThreadPoolExecutor,
        target_rank_registration_info: KVArgsRegisterInfo | None = None,
    ) -> int:
        """Writes state slots or pages to the peer. Returns the transfer engine's status."""
        kind, info = self.kv_args.state_type, target_rank_registration_info
        if kind == "none":
            return 0
        session = req.mooncake_session_id
        if kind != "mamba":
            pages = (prefill_state_indices, req.dst_state_indices)
            plan = self._plan_for(session).state
            self.note_sending(session, "state", plan)
            return self._transfer(session, "state", plan, *pages, executor)
        self.note_sending(session, "state")
        self.check_state_slots(session, [req.dst_state_indices])
        slots = (req, prefill_state_indices, dst_state_data_ptrs)
        if info is None or info.dst_attn_tp_size == self.attn_tp_size:
            return self._send_mamba_state(*slots)
        return self._send_mamba_state_slice(
            *slots,
            info.dst_state_item_lens,
            info.dst_state_dim_per_tensor,
            info.dst_tp_rank,
            info.dst_attn_tp_size,
        )

    def transfer_worker(self, queue: PeerQueue, executor: ThreadPoolExecutor) -> None:
        """Sends chunk after chunk. An error fails the chunk's room and never stops this thread."""
        while True:
            chunk = queue.get()
            try:
                self._send_chunk(chunk, executor)
            except Exception as error:
                logger.exception(f"Room {chunk.room}: could not send KV")
                reason = f"Prefill could not send KV: {error}"
                try:
                    self._conclude(chunk, KVPoll.Failed, reason)
                except Exception:
                    logger.exception(f"Room {chunk.room}: could not notify decode")

    def _send_chunk(self, chunk: TransferKVChunk, executor: ThreadPoolExecutor) -> None:
        if chunk.is_last and chunk.prefill_aux_index is None:
            self._notify(chunk.requests, KVPoll.Failed, chunk.reason)
            return
        if not self._is_current(chunk):
            return
        if self.check_status(chunk.room) == KVPoll.Failed:
            self._conclude(chunk, KVPoll.Failed)
            return
        self.note_chunk(chunk.room, chunk.index_slice, chunk.prefill_kv_indices)
        for req in list(chunk.requests.values()):
            if not req.is_dummy:
                self._send_to_peer(req, chunk, executor)
        if chunk.is_last:
            self._conclude(chunk, KVPoll.Success)

    def _is_current(self, chunk: TransferKVChunk) -> bool:
        """Returns whether the chunk's request is still open, and no later one has its room."""
        return (
            chunk.room in self.request_status
            and self.transfer_infos.get(chunk.room) is chunk.requests
        )

    def _peers_of(self, chunk: TransferKVChunk) -> Peers:
        return frozenset(chunk.requests)

    def _send_to_peer(
        self, req: TransferInfo, chunk: TransferKVChunk, executor: ThreadPoolExecutor
    ) -> None:
        session, dst_pages = req.mooncake_session_id, req.dst_kv_indices[chunk.index_slice]
        info = self.decode_kv_args_table[session]

        def check(what: str, status: int) -> None:
            if status != 0:
                raise RuntimeError(
                    f"the transfer engine returned {status} for {what} to decode session {session}"
                )

        with self.back_off.attempt(session), self._note_unsettled(req):
            pages = (chunk.prefill_kv_indices, info.dst_kv_ptrs, dst_pages)
            check("KV", self.send_kvcache(session, *pages, executor))
            if info.plan.needs_interleaving:
                req.units.append((chunk.index_slice.start, chunk.index_slice.stop))
            if not chunk.is_last:
                return
            if chunk.state_indices is not None:
                state = (req, chunk.state_indices, info.dst_state_data_ptrs, executor, info)
                check("state", self.maybe_send_extra(*state))
            check("metadata", self.send_aux(req, chunk.prefill_aux_index, info.dst_aux_ptrs))
        req.digests = self.room_digests(chunk.room, info, chunk.state_indices)

    @contextlib.contextmanager
    def _note_unsettled(self, req: TransferInfo) -> Iterator[None]:
        """Notes that writes may go on after an error, unless it shows that none was started."""
        try:
            yield
        except LayoutError:
            raise
        except Exception:
            req.unsettled_until = time.monotonic() + self.unsettled_seconds
            raise

    def _conclude(self, chunk: TransferKVChunk, status: KVPoll, reason: str = "") -> None:
        """Concludes the chunk's request on this rank and notifies its decode ranks.

        Does nothing if the request was dropped: `close_failed_room` has queued their notice.
        """
        with self.rooms_lock:
            if not self._is_current(chunk):
                return
            if reason:
                self.record_failure(chunk.room, reason)
            self.update_status(chunk.room, status)
            # Failed, if its request was aborted while its last chunk was written.
            status = self.check_status(chunk.room)
            # `close_failed_room` needs a failed room's peers, to record who was notified.
            if status != KVPoll.Failed:
                self.transfer_infos.pop(chunk.room)
            reason = self.failure_records.get(chunk.room, FAILED_ELSEWHERE)
        self._notify(chunk.requests, status, reason)

    def _notify(self, requests: Mapping[str, TransferInfo], status: KVPoll, reason: str) -> None:
        """Notifies each decode rank once of how the room that it requested concluded."""
        with self.rooms_lock:
            waiting = [req for req in requests.values() if not (req.is_dummy or req.is_notified)]
            for req in waiting:
                req.is_notified = True
        for req in waiting:
            self._notify_when_settled(req, status, reason if status == KVPoll.Failed else "")

    def _notify_when_settled(self, req: TransferInfo, status: KVPoll, reason: str) -> None:
        """Notifies decode when it may free its pages; a timer waits for that, not the caller."""
        seconds = req.unsettled_until - time.monotonic()
        if seconds <= 0:
            self._send_status(req, status, reason)
            return
        later = threading.Timer(seconds, self._send_status, (req, status, reason))
        later.daemon = True
        try:
            later.start()
        except RuntimeError as error:  # out of threads: decode waits until its timeout
            logger.error(f"Room {req.room}: could not notify decode {req.endpoint}: {error}")

    def _send_status(self, req: TransferInfo, status: KVPoll, reason: str) -> None:
        frames = [str(number).encode("ascii") for number in (req.room, status, self.sender_rank)]
        known = self.decode_kv_args_table.get(req.mooncake_session_id)  # None if it was dropped
        units = req.units if status == KVPoll.Success else []
        has_more = req.digests is not None or bool(units)  # then the rank reads all frames
        if has_more or (known is not None and known.reads_reasons):
            frames.append(reason.encode("utf-8", "backslashreplace"))
        if has_more:
            frames.append(req.digests or b"")
        if units:
            frames.append(encode_units(units))
        address = format_tcp_address(req.endpoint, req.dst_port)
        try:
            self._connect(address, is_valid_ipv6_address(req.endpoint)).send_multipart(frames)
        except zmq.ZMQError as error:
            logger.warning(f"Room {req.room}: could not notify decode {address}: {error}")

    def _notify_failed(self, room: int, peers: Mapping[str, TransferInfo], reason: str) -> None:
        for req in peers.values():
            if not req.is_dummy:
                self._send_status(req, KVPoll.Failed, reason)

    def start_prefill_thread(self):
        """Starts to read decode ranks' registrations, room requests and aborts."""
        self.back_off = PeerBackoff()
        self.read_bootstrap_messages()

    def start_decode_thread(self):
        """Starts to read prefill ranks' status messages, and to watch prefill servers."""
        # Rooms requested from prefill, and those of them that one sender has failed while others
        # may still write.
        self.requested_rooms: set[int] = set()
        self.arrived_units: dict[int, dict[int, list[Unit]]] = defaultdict(dict)
        self.failing_rooms: set[int] = set()
        self.rebind_server_socket()
        handle, dropped = self._handle_decode_message, self.transfer_log.malformed
        start_reader_thread(self.server_socket, handle, dropped)
        self.start_heartbeat()

    def _handle_decode_message(self, frames: list[bytes]) -> None:
        if frames[0] == self.AUX_DATA_HEADER:
            self._handle_aux_data(frames)
        else:
            self._handle_status(frames)

    def _handle_status(self, frames: list[bytes]) -> None:
        """Records a prefill rank's result for a room; concludes the room after the last one."""
        room_frame, status, sender_frame, *more = frames
        if int(status) not in ENDED:
            raise ValueError("not a status message")
        reason = more[0].decode("utf-8", "replace") if more else "no reason given"
        with self.rooms_lock:
            room = int(room_frame)
            if room not in self.requested_rooms:
                return  # it has concluded
            sender = int(sender_frame)
            if len(more) > 1:
                self.arrived_digests[room][sender] = more[1]
            if int(status) == KVPoll.Failed:
                self.record_failure(room, f"Prefill failed: {reason}")
                self.failing_rooms.add(room)
            if len(more) > 2:
                try:
                    self.arrived_units[room][sender] = decode_units(more[2])
                except LayoutError as error:  # the sender counts: it writes no more
                    logger.error(f"Room {room}: prefill rank {sender}: {error}")
                    self.record_failure(room, str(error))
                    self.failing_rooms.add(room)
            self.prefill_response_tracker[room].add(sender)
            needed = self.required_prefill_response_num_table[room]
            if len(self.prefill_response_tracker[room]) >= needed:
                failed = room in self.failing_rooms
                self.update_status(room, KVPoll.Failed if failed else KVPoll.Success)

    def add_transfer_request(
        self,
        bootstrap_room: int,
        kv_indices: npt.NDArray[np.int32],
        index_slice: slice,
        is_last: bool,
        aux_index: int | None = None,
        state_indices: list[int] | None = None,
    ):
        """Queues one chunk for the room's decode ranks; does nothing for a failed or dropped room.

        Args:
            kv_indices: Pages of this rank's pool, int32, `[pages]`.
            index_slice: Their place among all pages of the request.
            aux_index: Row of the metadata buffers, with the last chunk.
            state_indices: Slots or pages of state, with the last chunk if the model has state.
        """
        if self.check_status(bootstrap_room) != KVPoll.Failed:
            chunk = (kv_indices, index_slice, is_last, aux_index, state_indices)
            requests = self.transfer_infos.get(bootstrap_room, {})
            self._enqueue(TransferKVChunk(bootstrap_room, *chunk, requests))

    def conclude_failure(self, room: int, reason: str) -> None:
        """Notifies the room's decode ranks of its failure, after the write that is under way.

        Its queued chunks are not sent.
        """
        with self.rooms_lock:
            reason = self.failure_records.get(room, reason)
            requests = self.transfer_infos.get(room, {})
            if room not in self.request_status:  # its request has not arrived, or has concluded
                self.transfer_infos.pop(room, None)
        self._queue_failure(room, requests, reason)

    def _queue_failure(self, room: int, requests: dict[str, TransferInfo], reason: str) -> None:
        """Queues a notice of a failure: a last chunk without metadata. A worker sends it."""
        chunk = (np.empty(0, np.int32), slice(0), True, None, None)
        self._enqueue(TransferKVChunk(room, *chunk, requests, reason))

    def _enqueue(self, chunk: TransferKVChunk) -> None:
        """Queues a chunk for its decode ranks; does nothing if none has requested the room."""
        if chunk.requests:
            self.queues_made.wait()
            self.transfer_queues[0].put(chunk)

    def close_failed_room(self, room: int) -> str:
        """Drops a failed room and returns why it failed; notifies decode once no write runs."""
        with self.rooms_lock:
            requests = self.transfer_infos.pop(room, {})
            reason = self.drop_room(room) or FAILED_ELSEWHERE
            self.record_failed_room(room, reason, requests)
        self._queue_failure(room, requests, reason)
        return reason

    def _drop_backend_state(self, room: int) -> None:
        if self.disaggregation_mode == DisaggregationMode.DECODE:
            self.required_prefill_response_num_table.pop(room, None)
            self.prefill_response_tracker.pop(room, None)
            self.requested_rooms.discard(room)
            self.arrived_units.pop(room, None)
            self.failing_rooms.discard(room)

    def _register_to_bootstrap(self):
        self.rebind_server_socket()
        super()._register_to_bootstrap()

    def handle_peer_recovered(self, name: str) -> None:
        """Resets the back-off of a silent decode rank that answers again."""
        self.back_off.reset(name)

    def drop_peer(self, name: str) -> None:
        """Drops a decode rank's back-off. Overrides `SilenceWatch.drop_peer`."""
        self.back_off.reset(name)

    @property
    def sends_state_by_plan(self) -> bool:
        """False for recurrent state, which the engine cuts along dimensions between TP sizes."""
        return self.kv_args.state_type != "mamba"

    def _check_registration(self, info: KVArgsRegisterInfo) -> None:
        port_of(info.name)  # raises ValueError if it is not a session id

    def _plan_transfers(self, info: KVArgsRegisterInfo) -> None:
        """Sets the registration's `plan`, or its `refusal`; refuses a session id without a port."""
        super()._plan_transfers(info)
        unreachable = unreachable_reason(info.name)
        if unreachable:
            logger.error(f"Refusing decode {info.name}: {unreachable}")
            info.plan, info.refusal, info.can_retry = None, unreachable, False

    def _add_remote_peer(self, info: KVArgsRegisterInfo) -> None:
        layout = info.plan and info.plan.layout
        state = ([info.dst_state_data_ptrs], [info.dst_state_item_lens])
        self.set_bounds(info, info.name, layout, None, *state)
        known = self.decode_kv_args_table.get(info.name)
        self.decode_kv_args_table[info.name] = info
        if known is None or known.dst_kv_ptrs != info.dst_kv_ptrs:
            self.back_off.reset(info.name)  # the rank is a new process


class MooncakeKVSender(CommonKVSender):
    REMOVED = ("clear",)

    def failure_exception(self):
        """Drops the room, which this or another rank failed, and raises KVTransferError.

        Notifies decode once this rank writes no more.
        """
        raise KVTransferError(self.bootstrap_room, self._close_failed_room())


class MooncakeKVReceiver(CommonKVReceiver):
    REMOVED = ("abort", "clear", "init", "poll")

    def _register_kv_args(self):
        """Registers our buffers and their layout with each prefill rank that serves this one."""
        args = self.kv_mgr.kv_args
        target_state, draft_state = split_state(args)
        frames = [
            b"None",
            *self._own_address(),
            pack_numbers("Q", args.kv_data_ptrs),
            pack_numbers("Q", args.aux_data_ptrs),
            pack_numbers("Q", target_state),
            str(args.engine_rank).encode("ascii"),
            str(self.kv_mgr.attn_tp_size).encode("ascii"),
            str(args.kv_item_lens[0]).encode("ascii"),
            pack_numbers("I", args.state_item_lens),
            pack_numbers("I", getattr(args, "state_dim_per_tensor", [])),
            encode_layout(args.layout),
            pack_numbers("Q", draft_state),
        ]
        self._register(frames)

    def _reset_room_state(self, has_state: bool) -> None:
        self.kv_mgr.requested_rooms.add(self.bootstrap_room)

    def _metadata_frames(
        self, is_dummy: bool, pages: bytes, aux: bytes, state: bytes
    ) -> list[bytes]:
        return [
            str(self.bootstrap_room).encode("ascii"),
            *self._own_address(),
            *([b"", b"", b""] if is_dummy else [pages, aux, state]),
            str(self.required_dst_info_num).encode("ascii"),
        ]

    def _read_results(self) -> bool:
        return self.bootstrap_room in self.kv_mgr.failing_rooms

    def _arrived_units(self) -> list[list[Unit]]:
        return list(self.kv_mgr.arrived_units[self.bootstrap_room].values())

    def has_pending_transfers(self) -> bool:
        """Whether a sender may still write to our pages."""
        return self.is_open() and self.conclude_state is None

    def _rank_name(self) -> bytes:
        return self.session_id.encode("ascii")

    def failure_exception(self):
        """Drops the room, which this or another rank failed, and raises KVTransferError."""
        raise KVTransferError(self.bootstrap_room, self._close_failed_room())


class MooncakeKVBootstrapServer(VerifyRoutes, CommonKVBootstrapServer):
    takes_aborts = True
