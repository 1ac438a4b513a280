"""NIXL sends KV by the peer's plan, counts arrivals by sender, reports failures to both sides."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import struct
import time
import uuid
from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

import numpy as np
from sglang.srt.disaggregation import kv_layout
from sglang.srt.disaggregation.base.conn import KVArgs, KVPoll
from sglang.srt.disaggregation.common.conn import (
    CommonKVBootstrapServer,
    CommonKVManager,
    CommonKVReceiver,
    CommonKVSender,
)
from sglang.srt.disaggregation.kv_layout import (
    Copies,
    LayoutError,
    PackedPlan,
    Unit,
    encode_layout,
    parse_notification,
)
from sglang.srt.disaggregation.pd.early_connections import EarlyConnections
from sglang.srt.disaggregation.pd.memory_registration import (
    packing_regions,
    send_slices_instead,
)
from sglang.srt.disaggregation.pd.message_checks import check_numbers, pack_numbers
from sglang.srt.disaggregation.pd.nixl_transfers import NixlTransfers, RoomFailed, Transfer
from sglang.srt.disaggregation.pd.packed_sends import PACKING_THREADS, PackedSends
from sglang.srt.disaggregation.pd.peers import Pages, PeerRegistration, RoomRequest, split_state
from sglang.srt.disaggregation.pd.sender import ABORTED
from sglang.srt.disaggregation.pd.verify_reports import VerifyRoutes
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.environ import envs

if TYPE_CHECKING:
    from sglang.srt.disaggregation.nixl.conn import GUARD, ServerArgs

logger = logging.getLogger(__name__)

REMOVED = ("TransferStatus",)  # in favour of `kv_layout.TransferStatus`


@dataclasses.dataclass
class TransferInfo(RoomRequest):
    # Whether it could not be notified at once that the room failed.
    is_delayed: bool = False

    @property
    def name(self) -> str:
        return self.agent_name


@dataclasses.dataclass
class KVArgsRegisterInfo(PeerRegistration):
    RENAMED = (("from_zmq", "_engine_from_zmq"),)
    # Whether NIXL has accepted the rank's metadata.
    is_connected: bool = False

    @classmethod
    def from_zmq(cls, msg: list[bytes]) -> KVArgsRegisterInfo:
        """Reads a registration. Extends the engine's: limits numbers, and reads our own frames."""
        check_numbers(*msg[5:8])
        info = cls._engine_from_zmq(msg)
        info.read_own_frames(msg)
        return info

    @property
    def name(self) -> str:
        return self.agent_name

    @property
    def attn_tp(self) -> tuple[int, int]:
        return self.decode_tp_rank, self.decode_tp_size


def _is_in(metadata: bytes, name: bytes) -> bool:
    return struct.pack("<Q", len(name)) + name in metadata


class NixlKVManager(EarlyConnections, NixlTransfers, CommonKVManager):
    REMOVED = (
        "_handle_node_failure",
        "_start_bootstrap_thread",
        "_start_heartbeat_checker_thread",
        "check_status",
        "record_failure",
        "send_aux",
        "send_kvcache_slice",
        "update_status",
    )
    backend_name = "nixl"
    _read_registration = KVArgsRegisterInfo.from_zmq
    _read_room = TransferInfo.from_zmq
    agent_lock = NixlTransfers.agent_lock  # not that of `EarlyConnections`, which excludes nobody

    def __init__(
        self,
        args: KVArgs,
        disaggregation_mode: DisaggregationMode,
        server_args: ServerArgs,
        is_mla_backend: bool = False,
    ):
        super().__init__(args, disaggregation_mode, server_args, is_mla_backend)
        self.agent = self._make_agent()
        self.start_transfer_log()
        self.register_buffer_to_engine()
        if disaggregation_mode == DisaggregationMode.PREFILL:
            self.bootstrap_timeout = envs.SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT.get()
            self.read_bootstrap_messages()
        else:
            self._init_heartbeat()

    def _make_agent(self):
        try:
            from nixl._api import nixl_agent, nixl_agent_config
        except ImportError as error:
            raise ImportError(
                "--disaggregation-transfer-backend nixl needs NIXL: pip install nixl"
            ) from error
        backend = envs.SGLANG_DISAGGREGATION_NIXL_BACKEND.get()
        threads = 8 if self.disaggregation_mode == DisaggregationMode.PREFILL else 0
        config = nixl_agent_config(backends=[backend], num_threads=threads)
        with contextlib.suppress(ImportError):
            # The bootstrap thread adds peers while the scheduler sends; older NIXL has no option.
            from nixl._api import nixl_thread_sync_t

            config.sync_mode = nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
        agent = nixl_agent(str(uuid.uuid4()), config)
        plugins = agent.get_plugin_list()
        if backend not in plugins:
            raise ValueError(
                f"SGLANG_DISAGGREGATION_NIXL_BACKEND is {backend!r}; this NIXL has {plugins}"
            )
        logger.info(f"NIXL KVManager initialized with backend: {backend}")
        return agent

    def _init_heartbeat(self) -> None:
        """Decode: sets up what the heartbeat thread shares, and starts that thread."""
        self.transfer_statuses: dict[int, kv_layout.TransferStatus] = defaultdict(
            kv_layout.TransferStatus
        )
        self.addr_to_rooms_tracker = defaultdict(set)
        self.heartbeat_interval = max(envs.SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL.get(), 2.0)
        self.max_failures = max(envs.SGLANG_DISAGGREGATION_HEARTBEAT_MAX_FAILURE.get(), 1)
        self.waiting_timeout = envs.SGLANG_DISAGGREGATION_WAITING_TIMEOUT.get()
        self.start_heartbeat()

    def _drop_backend_state(self, room: int) -> None:
        if self.disaggregation_mode == DisaggregationMode.PREFILL:
            self.transfer_infos.pop(room, None)
        else:
            self.transfer_statuses.pop(room, None)
            self.required_prefill_response_num_table.pop(room, None)

    def register_buffer_to_engine(self):
        """Registers KV, state and packing as memory of the pool's device, aux as host memory.

        Without the packing buffer, this rank sends slices.

        Raises:
            RuntimeError: NIXL refuses one of the others; the server must not start.
        """
        args = self.kv_args
        # A pool in host memory has the published device number, too: stock peers use that number.
        pool = (args.layout.memory, args.gpu_id)
        self.kv_descs = self._register("KV", args.kv_data_ptrs, args.kv_data_lens, *pool)
        self.aux_descs = self._register("aux", args.aux_data_ptrs, args.aux_data_lens, "DRAM", 0)
        if any(args.state_data_lens):
            self.state_descs = self._register(
                "state", args.state_data_ptrs, args.state_data_lens, *pool
            )
        self.make_packing(PACKING_THREADS)
        for role, address, size in packing_regions(args):
            try:
                self.packing_descs = self._register(role, [address], [size], *pool)
            except RuntimeError as error:
                send_slices_instead(args, str(error))

    def _register(self, role: str, ptrs: list[int], lens: list[int], kind: str, device: int):
        regions = [(ptr, size, device, "") for ptr, size in zip(ptrs, lens) if size]
        descs, why = None, "it returned no descriptors"
        try:
            descs = self.agent.register_memory(regions, kind)
        except Exception as error:
            why = str(error)
        if not descs:
            raise RuntimeError(
                f"NIXL could not register {len(ptrs)} {role} buffers ({sum(lens)} bytes of {kind} "
                f"on device {device}): {why}"
            )
        return descs

    def _send_kvcache_generic(
        self,
        peer_name: str,
        what: Literal["kv", "state"],
        prefill_data_indices: Pages,
        dst_data_indices: Pages,
        notif: str,
    ) -> Transfer | None:
        """Starts writing pages by a KV or state plan; with nothing to write, returns None."""
        plan = getattr(self.decode_kv_args_table[peer_name].plan, what)
        # The engine's sends get the room only as the first part of the notification.
        room, notification = int(notif.partition("_")[0]), notif.encode("ascii")
        self.now_sending.set(peer_name, room, what, plan)
        pages = (prefill_data_indices, dst_data_indices)
        if isinstance(plan, PackedPlan) and plan.packs:
            return self.packed_sends.start(peer_name, room, what, *pages, notification)
        copies = plan.copies(*pages)
        if not len(copies):
            self._notify(peer_name, notification)
            return None
        return self.start_copies(peer_name, room, copies, notification)

    def start_copies(
        self, peer: str, room: int, copies: Copies, notification: bytes = b""
    ) -> Transfer:
        """Starts to write copies of KV or state, which brings the notification when it is done.

        Raises:
            RoomFailed: The room has failed.
        """
        args, info = self.kv_args, self.decode_kv_args_table[peer]
        src, dst = copies.descriptors(args.gpu_id, info.gpu_id)
        src = self.agent.get_xfer_descs(src, args.layout.memory)
        dst = self.agent.get_xfer_descs(dst, info.plan.layout.memory)
        return self._start(peer, room, src, dst, notification)

    @functools.cached_property
    def packed_sends(self) -> PackedSends:
        return PackedSends(self)

    def send_kvcache(
        self,
        peer_name: str,
        prefill_kv_indices: Pages,
        dst_kv_ptrs: list[int],
        dst_kv_indices: Pages,
        dst_gpu_id: int,
        notif: str,
    ) -> Transfer | None:
        """Starts writing these pages, int32 `[pages]`, of all layers to a decode rank (PR #22145).

        NIXL delivers `notif` once all are written; at once, with None as result, if there are none.
        The plan has decode's addresses and device instead of `dst_kv_ptrs` and `dst_gpu_id`.

        Raises:
            LayoutError: The numbers of pages on the two sides differ.
            RoomFailed: The room has failed.
        """
        pages = (prefill_kv_indices, dst_kv_indices)
        return self._send_kvcache_generic(peer_name, "kv", *pages, notif)

    def maybe_send_extra(
        self,
        peer_name: str,
        prefill_state_indices: list[int],
        dst_state_data_ptrs: list[int],
        dst_state_indices: list[int],
        dst_gpu_id: int,
        notif: str,
        decode_tp_size: int,
    ) -> Transfer | None:
        """Starts writing slots or pages of state like `send_kvcache`; None if the model has none.

        The plan has what `dst_state_data_ptrs`, `dst_gpu_id` and `decode_tp_size` are for.
        """
        if self.kv_args.state_type == "none":
            return None
        pages = (prefill_state_indices, dst_state_indices)
        return self._send_kvcache_generic(peer_name, "state", *pages, notif)

    def add_transfer_request(
        self,
        bootstrap_room: int,
        kv_indices: Pages,
        index_slice: slice,
        is_last: bool,
        chunk_id: int,
        aux_index: int | None = None,
        state_indices: list[int] | None = None,
    ) -> list[Transfer]:
        """Starts the transfers of one chunk to every decode rank of the room, and returns them.

        An error fails the room, and never the caller, which is the scheduler.

        Args:
            kv_indices: Pages of this rank's pool, int32, `[pages]`.
            index_slice: Their place among all pages of the request.
            chunk_id: Counts from 0.
            aux_index: Row of the metadata buffers, with the last chunk.
            state_indices: Slots or pages of state, with the last chunk if the model has state.
        """
        writes: list[Transfer | None] = []
        self.note_chunk(bootstrap_room, index_slice, kv_indices)
        try:
            for req in list(self.transfer_infos.get(bootstrap_room, {}).values()):
                if req.is_dummy():
                    continue
                peer, info = req.agent_name, self.decode_kv_args_table[req.agent_name]
                unit = None
                if info.plan.needs_interleaving:
                    unit = (index_slice.start, index_slice.stop)
                kind = {"chunk": chunk_id, "is_last": is_last, "unit": unit}
                notif = self._notification(req.room, "kv", **kind)
                pages = (kv_indices, info.dst_kv_ptrs, req.dst_kv_indices[index_slice])
                write = self.send_kvcache(peer, *pages, info.gpu_id, notif.decode("ascii"))
                writes.append(write)
                if is_last:
                    # Those that have started are in the list even if a later one raises.
                    writes.extend(self._send_last(req, info, aux_index, state_indices))
        except RoomFailed:
            logger.info(f"Room {bootstrap_room} failed; chunk {chunk_id} is not sent")
        except Exception as error:
            logger.exception(f"Room {bootstrap_room}: chunk {chunk_id} could not be sent")
            self.fail(bootstrap_room, f"Prefill could not send KV: {error}")
        return [write for write in writes if write is not None]

    def _send_last(
        self,
        req: TransferInfo,
        info: KVArgsRegisterInfo,
        aux_index: int,
        state_indices: list[int] | None,
    ) -> Iterator[Transfer | None]:
        """Sends state, metadata and digests to a decode rank; yields each transfer once started."""
        peer, room = req.agent_name, req.room
        if state_indices is not None:
            pages = (state_indices, info.dst_state_data_ptrs, req.dst_state_indices, info.gpu_id)
            notif = self._notification(room, "state").decode("ascii")
            yield self.maybe_send_extra(peer, *pages, notif, info.decode_tp_size)
        rows = (self.kv_args.aux_data_ptrs, aux_index, info.dst_aux_ptrs, req.dst_aux_index)
        *sides, sizes = info.plan.aux.copies(*rows)
        sides = [np.column_stack((side, sizes, np.zeros_like(side))) for side in sides]
        self.now_sending.set(peer, room, "aux")
        src, dst = (self.agent.get_xfer_descs(side, "DRAM") for side in sides)
        yield self._start(peer, room, src, dst, self._notification(room, "aux"))
        digests = self.room_digests(room, info, state_indices)
        if digests is not None:
            self._notify(peer, self._notification(room, "digests", digests=digests))

    def update_transfer_status(self) -> None:
        """Decode: processes the notifications that have arrived since the last call."""
        with self.agent_lock:
            arrived = self.agent.get_new_notifs()
        for peer, message in [(peer, one) for peer, some in arrived.items() for one in some]:
            notification = parse_notification(message)
            if notification is None:
                logger.warning(f"Dropped a notification from {peer}: {message[:80]!r}")
                continue
            room = notification.room
            if room not in self.request_status:
                continue  # it has concluded, and must not be opened again
            self.transfer_statuses[room].add(peer, notification)
            if notification.kind == "digests":
                self.arrived_digests[room][peer] = notification.digests
            elif notification.kind == "failed":
                self.record_failure(room, f"Prefill failed: {notification.reason}")

    def _register_to_bootstrap(self):
        self.rebind_server_socket()
        super()._register_to_bootstrap()

    def _handle_bootstrap_message(self, frames: list[bytes]) -> None:
        if frames[0] != GUARD:
            raise ValueError(f"the first frame is {frames[0][:20]!r} instead of {GUARD!r}")
        super()._handle_bootstrap_message(frames[1:])

    def _check_registration(self, info: KVArgsRegisterInfo) -> None:
        name = info.name.encode("ascii")
        # NIXL uses the name in the metadata, and drops that agent if the rest is garbled.
        if self.can_check_agent_metadata and not _is_in(info.agent_metadata, name):
            raise LayoutError(f"NIXL metadata does not belong to agent {info.name}")

    @functools.cached_property
    def can_check_agent_metadata(self) -> bool:
        """Whether NIXL writes an agent's name in its metadata in the form that `_is_in` finds."""
        has_own = _is_in(self.agent.get_agent_metadata(), self.agent.name.encode("ascii"))
        if not has_own:
            logger.warning(
                "Decode ranks' NIXL metadata is not checked, because this rank's has an unknown "
                "format"
            )
        return has_own

    def _add_remote_peer(self, decode_kv_args: KVArgsRegisterInfo) -> None:
        """Records a decode rank and adds it to NIXL; a restarted rank has a new name.

        If NIXL rejects the rank, its next request for a room causes another attempt.
        """
        name = decode_kv_args.agent_name
        known = self.decode_kv_args_table.get(name)
        decode_kv_args.is_connected = known is not None and known.is_connected
        self.decode_kv_args_table[name] = decode_kv_args
        if decode_kv_args.is_connected:
            return
        try:
            with self.agent_lock:
                self.agent.add_remote_agent(decode_kv_args.agent_metadata)
            decode_kv_args.is_connected = True
            if not decode_kv_args.refusal:
                self.connect_early(name, decode_kv_args.dst_aux_ptrs)
        except Exception as error:
            logger.error(f"NIXL could not add decode {name}: {error}")
            decode_kv_args.can_retry = True

    def release_peer(self, name: str) -> bool:
        """Releases a decode rank's NIXL agent and plan, unless NIXL is using its connection.

        Returns whether it did. Overrides `SilenceWatch.release_peer`.
        """
        info = self.decode_kv_args_table.get(name)
        with self.agent_lock:
            if self._is_writing(peer=name) or not self.end_early_connection(name):
                return False
            self.drop_peer(name)
        if info is not None and not info.refusal:
            info.plan, info.can_retry, info.retry_at = None, True, 0.0
        return True

    def drop_peer(self, name: str) -> None:
        """Drops a decode rank's notices and NIXL agent. Overrides `SilenceWatch.drop_peer`."""
        info = self.decode_kv_args_table.get(name)
        self.drop_pending_notices(name)
        with self.agent_lock, contextlib.suppress(Exception):  # NIXL may have dropped it already
            self.unreachable_peers.discard(name)
            if info is not None:
                info.is_connected = False
            self.agent.remove_remote_agent(name)

    def _open_room(self, info: TransferInfo) -> None:
        self.handle_peer_recovered(info.name)
        self.drop_pending_notices(info.name, info.room)  # an earlier request's
        super()._open_room(info)


class NixlKVSender(CommonKVSender):
    def send(self, kv_indices: Pages, state_indices: list[int] | None = None):
        """Starts sending a chunk, the request's next pages; sends nothing for a failed room.

        First looks which earlier chunks are written, since nothing polls before the last one.
        """
        self._drop_finished_transfers()
        if self.kv_mgr.check_status(self.bootstrap_room) == KVPoll.Failed:
            self.has_sent = True
            return
        where = slice(self.curr_idx, self.curr_idx + len(kv_indices))
        is_last = where.stop == self.num_kv_indices
        chunk = (kv_indices, where, is_last, self.chunk_id, self.aux_index, state_indices)
        self.xfer_handles += self.kv_mgr.add_transfer_request(self.bootstrap_room, *chunk)
        self.curr_idx = where.stop
        self.chunk_id += 1
        self.has_sent = is_last

    def poll(self) -> KVPoll:
        """Returns the room's status; it concludes once this rank's last transfer has finished."""
        if self.conclude_state is not None:
            return self.conclude_state
        self._drop_finished_transfers()
        self._check_timeout()
        status = self.kv_mgr.check_status(self.bootstrap_room)
        if status != KVPoll.Failed and not self.has_sent:
            return status
        if self.xfer_handles:
            return KVPoll.Transferring
        self.conclude_state = KVPoll.Failed if status == KVPoll.Failed else KVPoll.Success
        return self.conclude_state

    def _drop_finished_transfers(self) -> None:
        """Drops settled transfers; one that failed or was abandoned fails the room."""
        for write in [one for one in self.xfer_handles if self.kv_mgr.is_settled(one)]:
            self.xfer_handles.remove(write)
            why = write.outcome or write.abandon_reason
            if why:
                self.kv_mgr.fail(self.bootstrap_room, f"Prefill's write to decode failed: {why}")

    def _check_timeout(self) -> None:
        """Fails a room that decode does not request in time; decode may lack the request."""
        manager, room = self.kv_mgr, self.bootstrap_room
        waited = time.monotonic() - self.started_at
        is_waiting = manager.check_status(room) == KVPoll.Bootstrapping
        if is_waiting and waited >= manager.bootstrap_timeout:
            manager.fail(
                room,
                f"Decode did not request this room within {waited:.0f} s; "
                "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT sets the limit",
            )

    def has_pending_transfers(self) -> bool:
        """Whether a transfer may still read our pages."""
        return bool(self.xfer_handles)

    def abort(self):
        """Fails the room, because its client has left."""
        if self.conclude_state is None:
            self.kv_mgr.fail(self.bootstrap_room, ABORTED)

    def failure_exception(self):
        """Drops the room, which this or another rank failed, and raises RuntimeError.

        No write of this rank is under way.
        """
        raise RuntimeError(self._close_failed_room())


class NixlKVReceiver(CommonKVReceiver):
    REMOVED = ("init", "poll")

    def _reset_room_state(self, has_state: bool) -> None:
        """Clears the room's arrivals, which belong to an earlier request."""
        self.kv_mgr.transfer_statuses[self.bootstrap_room] = kv_layout.TransferStatus(
            self.required_prefill_response_num, has_state, self.expects_digests
        )

    def _metadata_frames(
        self, is_dummy: bool, pages: bytes, aux: bytes, state: bytes
    ) -> list[bytes]:
        return [
            GUARD,
            str(self.bootstrap_room).encode("ascii"),
            *self._own_address(),
            b"" if is_dummy else pages,
            aux,
            str(self.required_dst_info_num).encode("ascii"),
            b"" if is_dummy else state,
        ]

    def _arrived_units(self) -> list[set[Unit]]:
        return self.kv_mgr.transfer_statuses[self.bootstrap_room].units

    def _read_results(self) -> bool:
        """Reads notifications, and concludes the room once every sender has sent all or failed."""
        manager, room = self.kv_mgr, self.bootstrap_room
        manager.update_transfer_status()
        if manager.check_transfer_done(room):
            failed = manager.transfer_statuses[room].is_failed()
            manager.update_status(room, KVPoll.Failed if failed else KVPoll.Success)
        return manager.transfer_statuses[room].is_failing

    def _register_kv_args(self):
        """Registers our buffers and their layout with each prefill rank that serves this one."""
        args = self.kv_mgr.kv_args
        target_state, draft_state = split_state(args)
        frames = [
            GUARD,
            b"None",
            *self._own_address(),
            self.kv_mgr.agent.get_agent_metadata(),
            pack_numbers("Q", args.kv_data_ptrs),
            pack_numbers("Q", args.aux_data_ptrs),
            pack_numbers("Q", target_state),
            str(args.gpu_id).encode("ascii"),
            str(args.decode_tp_size).encode("ascii"),
            str(args.engine_rank).encode("ascii"),
            str(args.kv_item_lens[0]).encode("ascii"),
            encode_layout(args.layout),
            pack_numbers("Q", draft_state),
        ]
        self._register(frames)

    def has_pending_transfers(self) -> bool:
        """Whether a sender may still write to our pages."""
        return self.is_open() and self.conclude_state is None

    def _abort_frames(self, reason: str) -> list[bytes]:
        return [GUARD, *super()._abort_frames(reason)]

    def _rank_name(self) -> bytes:
        return self.kv_mgr.agent.name.encode("ascii")

    def failure_exception(self):
        """Drops the room, which this or another rank failed, and raises RuntimeError."""
        raise RuntimeError(self._close_failed_room())


class NixlKVBootstrapServer(VerifyRoutes, CommonKVBootstrapServer):
    takes_aborts = True
