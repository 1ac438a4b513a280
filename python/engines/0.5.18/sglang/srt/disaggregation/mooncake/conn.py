"""Mooncake and its derivatives: send KV by each peer's plan; an error only fails its room."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.kv_layout import LayoutError, Sizes, encode_sizes
from sglang.srt.disaggregation.mooncake.utils import check_mooncake_custom_mem_pool_enabled
from sglang.srt.disaggregation.pd.back_off import FailedSessions
from sglang.srt.disaggregation.pd.held_pages import HoldingReceiver
from sglang.srt.disaggregation.pd.message_checks import (
    STAGING,
    ValidatingSocket,
    check_frame_sizes,
    check_session_id,
    check_staging_message,
)
from sglang.srt.disaggregation.pd.mooncake_sends import MooncakeSends, SessionRegistration
from sglang.srt.disaggregation.pd.prefill_servers import PrefillServers
from sglang.srt.disaggregation.pd.room_conclusions import WorkerRooms
from sglang.srt.disaggregation.pd.room_failures import ABORT, Endpoint
from sglang.srt.disaggregation.pd.session_ids import unreachable_reason
from sglang.srt.disaggregation.pd.status_messages import ENDED, STATUS_READER
from sglang.srt.disaggregation.pd.write_bounds import OutOfBounds
from sglang.srt.environ import envs

if TYPE_CHECKING:
    from sglang.srt.disaggregation.mooncake.conn import (
        DisaggregationMode,
        EngineKVArgsRegisterInfo,
        EngineMooncakeKVManager,
        EngineMooncakeKVReceiver,
        TransferInfo,
    )

logger = logging.getLogger(__name__)

RENAMED = (
    ("KVArgsRegisterInfo", "EngineKVArgsRegisterInfo"),
    ("MooncakeKVManager", "EngineMooncakeKVManager"),
    ("MooncakeKVReceiver", "EngineMooncakeKVReceiver"),
)

CHUNK_READY = b"CHUNK_READY"


class KVArgsRegisterInfo(SessionRegistration, EngineKVArgsRegisterInfo):
    @classmethod
    def from_zmq(cls, msg: list[bytes]):
        """Reads a registration. Extends the engine's: also our frames."""
        info = super().from_zmq(msg)
        info.read_own_frames(msg)
        info.reads_status = STATUS_READER in msg
        return info


class MooncakeKVManager(MooncakeSends, WorkerRooms, EngineMooncakeKVManager):
    is_complete = False  # whether `__init__` has ended
    # Override the engine's, whose text the patch set checks.
    _registerable_regions = MooncakeSends._registerable_regions
    send_kvcache = MooncakeSends.send_kvcache
    send_kvcache_slice = MooncakeSends.send_kvcache_slice
    send_aux = MooncakeSends.send_aux
    send_aux_tcp = MooncakeSends.send_aux_tcp
    maybe_send_extra = MooncakeSends.maybe_send_extra

    def __init__(self, *given, **more):
        super().__init__(*given, **more)
        self.is_complete = True
        if self.disaggregation_mode == DisaggregationMode.PREFILL:
            self.start_prefill_thread()

    def register_buffer_to_engine(self) -> None:
        """Registers KV, state, packing and aux buffers, see `MooncakeSends.register_buffers`."""
        has_pool, pool = check_mooncake_custom_mem_pool_enabled()
        in_pool = has_pool and pool == "NVLINK"
        self.register_buffers(envs.SGLANG_MOONCAKE_SEND_AUX_TCP.get() or in_pool)

    def _init_staging_buffers(self, count: int):
        super()._init_staging_buffers(count)
        made = [(one.get_ptr(), one.get_size()) for one in self._staging_ctx.buffers or ()]
        self.extra_memory = (*self.extra_memory, *made)

    # Messages from peers

    def start_prefill_thread(self):
        """Starts prefill's thread for messages. Extends the engine's: drops invalid ones.

        The engine starts it before it makes what the thread uses.
        """
        if self.is_complete:
            self.failed_sessions = FailedSessions()  # soon retries a session that failed
            self.server_socket = ValidatingSocket(
                self.server_socket,
                self._check_prefill_message,
                self.failures.end_message,
                self.transfer_log.malformed,
            )
            super().start_prefill_thread()

    def start_decode_thread(self):
        """Starts decode's threads. Extends the engine's: invalid messages are dropped."""
        dropped = self.transfer_log.malformed
        self.server_socket = ValidatingSocket(
            self.server_socket, self._check_decode_message, dropped=dropped
        )
        super().start_decode_thread()

    def _check_prefill_message(self, frames: list[bytes]) -> bool:
        """Raises for frames on which the engine's thread would crash.

        Returns True for what it handles: registrations, aborts, and a request for a room that has
        failed here, whose decode rank it notifies.
        """
        if frames[0] in STAGING:
            check_staging_message(frames, self._staging_ctx)
            return False
        if frames[0] == ABORT:
            return self._handle_abort_notification(frames)
        check_session_id(frames[3])
        if frames[0] == b"None":
            check_frame_sizes(frames)
            self._register_peer(KVArgsRegisterInfo.from_zmq(frames))
            return True
        info = TransferInfo.from_zmq(frames)
        if unreachable_reason(info.mooncake_session_id):
            frames[7] = b"1"  # ranks without a port share a session id: one opens the room
        return self.reject_request(info.mooncake_session_id, info)

    def _register_peer(self, info: KVArgsRegisterInfo) -> None:
        """Registers a decode rank, even one that is refused, with a plan and its memory."""
        session, own = info.mooncake_session_id, self.kv_args.kv_item_lens
        try:
            dcp = (info.dst_dcp_size, info.dst_dcp_rank)
            info.requires_dcp_relayout = self.requires_dcp_relayout(*dcp)
            if info.requires_dcp_relayout:
                theirs = [info.dst_kv_item_len] * len(own)
                info.dcp_token_item_lens = self.prepare_dcp_token_item_lens(theirs)
            self.plan_registration(session, info)
        except Exception as error:
            logger.exception(f"Decode {session} could not be registered")
            info.refusal = f"prefill could not register this decode rank: {error!r}"
        # An entry even so: without one, the rank's rooms would wait.
        self.decode_kv_args_table[session] = info
        self.note_reader(info)
        self.handle_peer_recovered(session)
        self.watch_peer(session, info)

    def _check_decode_message(self, frames: list[bytes]) -> bool:
        if self.store_frames(frames):
            return True
        if frames[0] == self.AUX_DATA_HEADER:
            self._check_aux_data(frames)
        elif frames[0] in STAGING:
            check_staging_message(frames, self._staging_handler)
        elif frames[0] == CHUNK_READY:
            _, *numbers, session = frames[:6]
            if self._staging_handler is None or len([*map(int, numbers)]) != 4:
                raise ValueError("a staged chunk, for which nothing is set up")
            session.decode("ascii")
        else:
            room, status, rank = map(int, frames)
            is_open = room in self.request_status
            if not is_open or room not in self.required_prefill_response_num_table:
                raise ValueError(f"status {status} of room {room}, which was not requested")
            if status in ENDED and not self.enable_staging:
                # The engine's thread would end if the room is cleared just now.
                self.apply_status(room, status, rank, "its server does not say why")
                return True
        return False

    def _on_heartbeat_success(self, bootstrap_addr: str):
        super()._on_heartbeat_success(bootstrap_addr)
        PrefillServers._on_heartbeat_success(self, bootstrap_addr)  # the engine's hides it

    def own_frames(self) -> list[bytes]:
        """Returns what a decode rank appends to the engine's registration: also buffer sizes."""
        args = self.kv_args
        lens = (args.kv_data_lens, map(tuple, args.state_data_lens), args.aux_data_lens)
        return [*super().own_frames(), encode_sizes(Sizes(*map(tuple, lens)))]

    def handle_peer_recovered(self, name: str) -> None:
        with self.session_lock:
            self.failed_sessions.discard(name)
            self.session_failures.pop(name, None)

    drop_peer = handle_peer_recovered

    # Transfers

    def transfer_worker(self, *own, **options):
        """Sends chunk after chunk. Extends the engine's: an error only fails its room."""
        # Of writes that were not started. With such a pool, threads write the engine's layers.
        refused = (LayoutError,) if self.enable_custom_mem_pool else (LayoutError, OutOfBounds)
        while True:
            self.sending.start(None)
            try:
                return super().transfer_worker(*own, **options)
            except Exception as error:
                cause, room = error.__context__ or error, self.sending.room
                logger.error(f"Room {room}: could not send KV", exc_info=cause)
                if room is not None:
                    reason = f"Prefill could not send KV: {cause}"
                    self.fail_chunk(room, reason, isinstance(cause, refused))

    def settle_writes(self) -> bool:
        """Returns whether the chunk failed because its session pauses; nothing of it was written.

        After the transfer engine returned an error, copies may still arrive.
        """
        return self.failed_sessions.has_refused()

    def conclude_transfer(self, *, bootstrap_room: int, status: KVPoll, **more) -> KVPoll | None:
        """Ends a room. Extends `PrefillManager`'s: success resets its peers' failure counts."""
        if status == KVPoll.Success:
            self.failed_sessions.reset(self.transfer_infos.get(bootstrap_room, ()))
        return super().conclude_transfer(bootstrap_room=bootstrap_room, status=status, **more)

    def sync_status_to_decode_endpoint(self, *told, **named) -> None:
        """Does nothing for a worker, which has notified all decode ranks of its room's end."""
        if self.sending.room is None:
            super().sync_status_to_decode_endpoint(*told, **named)

    def notify_stock(self, endpoint: Endpoint, room: int, status: KVPoll) -> None:
        """Tells a stock decode rank how a room ended."""
        told = (*endpoint, room, status, self._prefill_unique_rank())
        super().sync_status_to_decode_endpoint(*told)


class MooncakeKVSender:
    REMOVED = ("failure_exception",)  # in favour of `NotifyingSender`'s


class MooncakeKVReceiver(HoldingReceiver, EngineMooncakeKVReceiver):
    """Keeps a failed room's pages until prefill writes no more, and interleaves what arrived."""
