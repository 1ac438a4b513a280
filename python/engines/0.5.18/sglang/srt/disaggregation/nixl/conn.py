"""NIXL: sends KV by each peer's plan; both sides learn of failures; lost connections come back."""

from __future__ import annotations

import logging
import math
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.pd.held_pages import HoldingReceiver
from sglang.srt.disaggregation.pd.message_checks import ValidatingSocket, drop_invalid
from sglang.srt.disaggregation.pd.nixl_sends import AgentRegistration, NixlSends
from sglang.srt.disaggregation.pd.per_instance import PerInstance
from sglang.srt.disaggregation.pd.room_conclusions import WorkerRooms
from sglang.srt.disaggregation.pd.room_failures import Endpoint
from sglang.srt.disaggregation.pd.status_messages import STATUS_READER
from sglang.srt.disaggregation.pd.watched_agent import WatchedAgent
from sglang.srt.observability.trace import TraceNullContext

if TYPE_CHECKING:
    from sglang.srt.disaggregation.nixl.conn import (
        EngineKVArgsRegisterInfo,
        EngineNixlKVManager,
        EngineNixlKVReceiver,
        TransferInfo,
    )

logger = logging.getLogger(__name__)

RENAMED = (
    ("KVArgsRegisterInfo", "EngineKVArgsRegisterInfo"),
    ("NixlKVManager", "EngineNixlKVManager"),
    ("NixlKVReceiver", "EngineNixlKVReceiver"),
)

# How long a worker waits for its other transfers after one has failed.
SETTLE_SECONDS = 5.0
SETTLE_POLL_SECONDS = 0.001
# How long to wait between attempts to add a decode rank to NIXL again.
RELOAD_SECONDS = 1.0


class KVArgsRegisterInfo(AgentRegistration, EngineKVArgsRegisterInfo):
    @classmethod
    def from_zmq(cls, msg: list[bytes]):
        """Reads a registration. Extends the engine's: also our frames."""
        info = super().from_zmq(msg)
        info.read_own_frames(msg)
        info.reads_status = STATUS_READER in msg
        return info


class NixlKVManager(NixlSends, WorkerRooms, EngineNixlKVManager):
    backend_name = "nixl"
    # Whether NIXL takes runs of blocks, or only each block.
    takes_runs = True
    reload_lock = PerInstance(threading.Lock)
    reload_times: dict[str, float] = PerInstance(dict)
    registration_type = KVArgsRegisterInfo
    request_type = TransferInfo
    # Override the engine's, whose text the patch set checks.
    _start_bootstrap_thread = NixlSends._start_bootstrap_thread
    _prepare_payload_xfer = NixlSends._prepare_payload_xfer
    transfer_worker = EngineNixlKVManager.transfer_worker  # the same, but its text is checked

    def register_buffer_to_engine(self):
        """Registers the buffers. Extends the engine's, see `NixlSends` and `WatchedAgent`."""
        self.start_transfer_log()  # what it meters is what `WatchedAgent` sends
        if not isinstance(self.agent, WatchedAgent):
            self.agent = WatchedAgent(self.agent, self)
        super().register_buffer_to_engine()

    def check_status(self, bootstrap_room: int) -> KVPoll:
        return super(EngineNixlKVManager, self).check_status(bootstrap_room)

    # Messages from peers

    def _start_decode_staging_thread(self):
        """Starts decode's thread for messages about staging. Extends the engine's, see below."""
        dropped = self.transfer_log.malformed
        self.server_socket = ValidatingSocket(
            self.server_socket, self._check_decode_message, dropped=dropped
        )
        super()._start_decode_staging_thread()

    def _start_heartbeat_checker_thread(self):
        """Starts decode's heartbeats. Extends the engine's: also the thread for messages."""
        super()._start_heartbeat_checker_thread()
        if not self.enable_staging:
            threading.Thread(target=self._read_messages, daemon=True).start()

    def _read_messages(self) -> None:
        dropped = self.transfer_log.malformed
        receive = self.server_socket.recv_multipart
        receive = drop_invalid(receive, self._check_decode_message, dropped=dropped)
        while True:
            receive()  # what is left is of no interest without staging buffers

    def _add_remote_peer(self, decode_kv_args: KVArgsRegisterInfo):
        """Adds a decode rank, see `NixlSends`; notes whether it reads `pd.status_messages`."""
        super()._add_remote_peer(decode_kv_args)
        self.note_reader(decode_kv_args)

    def update_transfer_status(self) -> None:
        """Reads NIXL's notifications. Extends the engine's: drops those that it cannot read."""
        for notification in self.agent.each_notification():
            try:
                room = int(notification.split(b"_", 1)[0])
                if room in self.request_status:  # else it is over, and must not be opened again
                    super().update_transfer_status()
            except Exception as error:
                logger.error(f"Dropped a notification: {error!r}: {notification[:80]!r}")

    def drop_peer(self, name: str) -> None:
        super().drop_peer(name)
        self.reload_times.pop(name, None)

    def notify_stock(self, endpoint: Endpoint, room: int, status: KVPoll) -> None:
        """Does nothing: a stock decode rank gets NIXL's notifications, and none of a failure."""

    # Transfers

    def add_transfer_request(self, *chunk, **options) -> None:
        """Queues a chunk, see `PrefillManager`, which takes what is optional by name."""
        names = ("chunk_id", "aux_index", "state_indices", "num_kv_tokens")
        super().add_transfer_request(*chunk[:4], **dict(zip(names, chunk[4:])), **options)

    def update_status(self, bootstrap_room: int, status: KVPoll) -> None:
        """Updates a room's status. Extends `WorkerRooms`: notifies stock ranks of a chunk."""
        if status in (KVPoll.Transferring, KVPoll.Success) and self.sending.room == bootstrap_room:
            notices, self.sending.notices = self.sending.notices, []
            if self.check_status(bootstrap_room) != KVPoll.Failed:
                for peer, notice in notices:
                    self.agent.send_notif(peer, notice.encode("ascii"))
        super().update_status(bootstrap_room, status)

    def _prep_dlist(self, peer: str, runs: Any, memory: str, gpu_id: int) -> Any:
        """Returns NIXL's list of the blocks of these runs, which are ours if `peer` is empty."""
        rows = [(address, length, gpu_id, stride, n) for address, length, stride, n in runs]
        rows = np.array(rows, dtype=np.uint64).reshape(-1, 5)
        if self.takes_runs:
            try:
                return self.agent.prep_xfer_dlist(peer, rows, memory)
            except TypeError:
                self.takes_runs = False
        counts = rows[:, 4].astype(np.int64)
        starts = np.cumsum(counts) - counts
        numbers = np.arange(counts.sum()) - np.repeat(starts, counts)
        blocks = np.repeat(rows[:, :3], counts, axis=0)
        blocks[:, 0] += numbers.astype(np.uint64) * np.repeat(rows[:, 3], counts)
        return self.agent.prep_xfer_dlist(peer, self.agent.get_xfer_descs(blocks, memory), memory)

    def send_kvcache(
        self,
        peer_name: str,
        prefill_kv_indices,
        dst_kv_ptrs,
        dst_kv_indices,
        dst_gpu_id: int,
        notif: str,
        dst_mem_kind: str = "VRAM",
    ):
        """Starts to write these pages of all layers. Returns NIXL's handle, None for nothing."""
        plan = self.plan_for(peer_name)
        self.note_sending(peer_name, "kv", plan and plan.kv)
        if plan is None:
            sent = (prefill_kv_indices, dst_kv_ptrs, dst_kv_indices, dst_gpu_id, notif)
            return super().send_kvcache(peer_name, *sent, dst_mem_kind)
        self.sending.notices.append((peer_name, notif))
        return self.write_pages(peer_name, "kv", prefill_kv_indices, dst_kv_indices)

    def send_kvcache_mixed(self, peer_name: str, *sent, **more):
        self.note_sending(peer_name, "kv")
        return super().send_kvcache_mixed(peer_name, *sent, **more)

    def send_kvcache_slice(self, peer_name: str, prefill_kv_indices, dst_kv_indices, notif: str):
        """Starts to write the KV heads that both sides hold, if their TP sizes differ."""
        plan = self.plan_for(peer_name)
        self.note_sending(peer_name, "kv", plan and plan.kv)
        pages = (prefill_kv_indices, dst_kv_indices)
        if plan is None:
            return super().send_kvcache_slice(peer_name, *pages, notif)
        self.sending.notices.append((peer_name, notif))
        return self.write_pages(peer_name, "kv", *pages)

    def send_aux(self, peer_name, prefill_aux_index, dst_aux_ptrs, dst_aux_index, notif):
        """Starts to write the request's metadata. Returns NIXL's handle."""
        self.note_sending(peer_name, "aux")
        row = (peer_name, prefill_aux_index, dst_aux_ptrs, dst_aux_index)
        if self.aux_plan_for(peer_name) is None:
            return super().send_aux(*row, notif)
        self.sending.notices.append((peer_name, notif))
        return self.write_metadata(*row)

    def maybe_send_extra(
        self,
        peer_name: str,
        prefill_state_indices: list,
        dst_state_data_ptrs: list,
        dst_state_indices: list,
        dst_gpu_id: int,
        notif: str,
        *more,
        **options,
    ) -> list:
        """Starts to write state. Returns NIXL's handles."""
        plan = self.plan_for(peer_name)
        self.note_sending(peer_name, "state", plan and plan.state)
        if plan is None or plan.state is None:
            state = (prefill_state_indices, dst_state_data_ptrs, dst_state_indices)
            sent = (*state, dst_gpu_id, notif, *more)
            return super().maybe_send_extra(peer_name, *sent, **options)
        handle = self.write_state(peer_name, prefill_state_indices, dst_state_indices)
        self.sending.notices.append((peer_name, f"{notif}_0"))
        return [] if handle is None else [handle]

    def _post_xfer(self, xfer_handle: Any, error_msg: str) -> None:
        if self.agent.transfer(xfer_handle) == "ERR":
            raise RuntimeError(error_msg)

    def _await_handles(self, handles: list[Any], *, failure_seen: bool) -> tuple[bool, bool]:
        """Waits for transfers; once one has failed, or a peer is silent, not for long.

        Returns whether all have settled, and whether any has failed.
        """
        handles, until = [*handles, *self.connection.unsettled], math.inf
        while True:
            try:
                states = {self.agent.agent.check_xfer_state(handle) for handle in handles}
            except Exception as error:
                logger.warning(f"The state of a transfer cannot be read: {error}")
                return False, True
            failure_seen = failure_seen or "ERR" in states
            if states <= {"DONE", "ERR"}:
                return True, failure_seen
            if not self.worker_state.peers.isdisjoint(self.silent_peers):
                return False, True
            if failure_seen:
                until = min(until, time.monotonic() + SETTLE_SECONDS)
            if time.monotonic() >= until:
                return False, True
            time.sleep(SETTLE_POLL_SECONDS if failure_seen else 0)

    def settle_writes(self) -> bool:
        """Waits for the transfers of a chunk that has failed; returns whether all have settled."""
        self.exceptions.pop(self.sending.room, None)  # its traceback would keep the transfers
        is_settled, _ = self._await_handles(self.sending.handles, failure_seen=True)
        self.reload_peers(self.worker_state.peers)
        return is_settled

    # Connections

    def handle_connect_failure(self, peer: str) -> None:
        """Adds the peer to NIXL again now, for which its next request would have to wait."""
        self.reload_peers({peer})

    def reload_peers(self, peers: set[str] | frozenset[str]) -> None:
        """Adds peers to NIXL again that it has dropped, or to which the connection is lost.

        NIXL never connects to them again itself. Adds none within a second of the last time, and
        only those whose processes listen: UCX may abort this one if they refuse a connection.
        """
        for peer in peers:
            info = self.decode_kv_args_table.get(peer)
            if info is None or info.needs_retry or not self._is_listening(info):
                continue
            try:
                with self.reload_lock:
                    self._reload_peer(peer, info)
            except Exception:
                logger.exception(f"Decode {peer} could not be added to NIXL again")

    def _reload_peer(self, peer: str, info: KVArgsRegisterInfo) -> None:
        has_lists = info.plan is None or (peer, "kv") in self.prepared
        is_known = has_lists and self.agent.check_remote_metadata(peer)
        if is_known and peer not in self.connection.lost:
            return
        last, now = self.reload_times.get(peer, -math.inf), time.monotonic()
        if now - last < RELOAD_SECONDS:
            return
        if not self.end_early_connection(peer) and is_known:
            return  # NIXL reads from it
        logger.warning(f"The connection to decode {peer} was lost; adding it to NIXL again")
        self.drop_peer(peer)
        self.connection.lost.discard(peer)
        self.reload_times[peer] = now
        info.kv_xfer_segments = None
        self.agent.add_remote_agent(info.agent_metadata)
        try:
            self._prepare_payload_xfer(info)
        except Exception:
            self.drop_peer(peer)  # a later failure tries again
            raise


class NixlKVSender:
    REMOVED = ("failure_exception",)  # in favour of `NotifyingSender`'s
    trace_ctx = PerInstance(TraceNullContext)  # itself, it would make the class abstract

    def abort(self) -> None:
        """Aborts the request. Extends `NotifyingSender`'s: polls fail though the room is reused."""
        super().abort()
        self._send_failed = True


class NixlKVReceiver(HoldingReceiver, EngineNixlKVReceiver):
    def clear(self) -> None:
        """Clears the room. Extends `HoldingReceiver`'s: also what NIXL has reported of it."""
        super().clear()
        if self.bootstrap_room not in self.kv_mgr.request_status:  # else another request has it
            self.kv_mgr.transfer_statuses.pop(self.bootstrap_room, None)
