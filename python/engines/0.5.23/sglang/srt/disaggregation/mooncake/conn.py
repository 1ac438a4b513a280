"""Mooncake and its derivatives: send KV by each peer's plan, whatever the TP sizes."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.kv_layout import LayoutError, Sizes, encode_sizes
from sglang.srt.disaggregation.mooncake.utils import check_mooncake_custom_mem_pool_enabled
from sglang.srt.disaggregation.pd.back_off import FailedSessions
from sglang.srt.disaggregation.pd.message_checks import (
    STAGING,
    check_frame_sizes,
    check_session_id,
    check_staging_message,
    drop_invalid,
)
from sglang.srt.disaggregation.pd.mooncake_sends import MooncakeSends, SessionRegistration
from sglang.srt.disaggregation.pd.per_instance import PerInstance
from sglang.srt.disaggregation.pd.session_ids import unreachable_reason
from sglang.srt.environ import envs

if TYPE_CHECKING:
    from sglang.srt.disaggregation.mooncake.conn import (
        ABORT_TAG,
        DisaggregationMode,
        EngineKVArgsRegisterInfo,
        EngineMooncakeKVManager,
        TransferInfo,
    )

logger = logging.getLogger(__name__)

RENAMED = (
    ("KVArgsRegisterInfo", "EngineKVArgsRegisterInfo"),
    ("MooncakeKVManager", "EngineMooncakeKVManager"),
)


class KVArgsRegisterInfo(SessionRegistration, EngineKVArgsRegisterInfo):
    @classmethod
    def from_zmq(cls, msg: list[bytes]):
        """Reads a registration. Extends the engine's: with the buffers' layout and sizes."""
        info = super().from_zmq(msg)
        info.read_own_frames(msg)
        return info


class MooncakeKVManager(MooncakeSends, EngineMooncakeKVManager):
    # Adds a frame, which stock decode ranks of this release read, too.
    kv_status_msg_carries_reason = True
    # Per transfer worker: `room`, the last one that failed while writes to it might go on.
    unsettled = threading.local()
    failed_sessions: FailedSessions = PerInstance(FailedSessions)
    # Override the engine's, whose text the patch set checks.
    _registerable_regions = MooncakeSends._registerable_regions
    send_kvcache = MooncakeSends.send_kvcache
    send_kvcache_slice = MooncakeSends.send_kvcache_slice
    send_aux = MooncakeSends.send_aux
    send_aux_tcp = MooncakeSends.send_aux_tcp
    maybe_send_extra = MooncakeSends.maybe_send_extra

    def register_buffer_to_engine(self) -> None:
        """Registers KV, state, packing and aux buffers, see `MooncakeSends.register_buffers`."""
        has_pool, pool = check_mooncake_custom_mem_pool_enabled()
        in_pool = has_pool and pool == "NVLINK"
        self.register_buffers(envs.SGLANG_MOONCAKE_SEND_AUX_TCP.get() or in_pool)

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
        dropped = self.transfer_log.malformed
        if self.disaggregation_mode == DisaggregationMode.DECODE:
            return drop_invalid(recv, self._check_decode_message, dropped=dropped)
        return drop_invalid(recv, self._check_prefill_message, self.failures.end_message, dropped)

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
                if unreachable_reason(info.mooncake_session_id):
                    frames[7] = b"1"  # ranks without a port share a session id: one opens the room
                return self.reject_request(info.mooncake_session_id, info)
        return False

    def _check_decode_message(self, frames: list[bytes]) -> bool:
        if frames[0] == self.AUX_DATA_HEADER:
            self._check_aux_data(frames)
        elif frames[0] in STAGING:
            check_staging_message(frames, self._staging_handler)
        return self.store_frames(frames)

    def _publish_peer_registration(
        self, mooncake_session_id: str, decode_kv_args: KVArgsRegisterInfo
    ) -> str | None:
        """Registers a decode rank; returns why it is refused, or None.

        Extends the engine's: makes a plan, and notes the rank's memory.
        """
        info = decode_kv_args
        try:
            self.plan_registration(mooncake_session_id, info)
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
