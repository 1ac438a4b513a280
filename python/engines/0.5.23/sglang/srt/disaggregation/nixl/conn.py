"""NIXL: sends KV by each peer's plan, whatever the TP sizes, and restores lost connections."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Container
from typing import TYPE_CHECKING, Any

from sglang.srt.disaggregation.pd.forward_events import ForwardEvents
from sglang.srt.disaggregation.pd.message_checks import ValidatingSocket
from sglang.srt.disaggregation.pd.nixl_sends import (
    CONNECTION_LOST,
    AgentRegistration,
    NixlSends,
)

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from sglang.srt.disaggregation.nixl.conn import (
        _PEER_RELOAD_MIN_INTERVAL_S,
        EngineKVArgsRegisterInfo,
        EngineNixlKVManager,
        TransferInfo,
    )

logger = logging.getLogger(__name__)

RENAMED = (
    ("KVArgsRegisterInfo", "EngineKVArgsRegisterInfo"),
    ("NixlKVManager", "EngineNixlKVManager"),
)


class KVArgsRegisterInfo(AgentRegistration, EngineKVArgsRegisterInfo):
    @classmethod
    def from_zmq(cls, msg: list[bytes]):
        """Reads a registration. Extends the engine's: with the buffers' layout."""
        info = super().from_zmq(msg)
        info.read_own_frames(msg)
        return info


class QueueingState(threading.local):
    """The event that the chunk which this thread is queuing must wait for, or None."""

    wait_event: Any = None


class NixlKVManager(ForwardEvents, NixlSends, EngineNixlKVManager):
    backend_name = "nixl"
    queuing = QueueingState()
    registration_type = KVArgsRegisterInfo
    request_type = TransferInfo
    # Override the engine's, whose text the patch set checks.
    _start_bootstrap_thread = NixlSends._start_bootstrap_thread
    register_buffer_to_engine = NixlSends.register_buffer_to_engine
    _add_remote_peer = NixlSends._add_remote_peer
    _prepare_payload_xfer = NixlSends._prepare_payload_xfer

    # Messages from peers

    def _start_decode_listener_thread(self):
        """Starts decode's thread for messages. Extends the engine's: drops invalid ones."""
        dropped = self.transfer_log.malformed
        self.server_socket = ValidatingSocket(
            self.server_socket, self._check_decode_message, dropped=dropped
        )
        super()._start_decode_listener_thread()

    def handle_connect_failure(self, peer: str) -> None:
        """Adds a peer that NIXL has dropped again; its next request would have to wait for that."""
        self._reload_invalidated_peers({peer: None})

    def drop_peer(self, name: str) -> None:
        """Drops a rank, see `NixlSends.drop_peer`, also what 0.5.23 keeps of it."""
        super().drop_peer(name)
        tables = (self._prepared_state_plans, self._peer_reload_times)
        for table in (*tables, self._state_layout_rejections):
            table.pop(name, None)

    def build_receiver_registration_message(self) -> list[bytes]:
        """Builds the registration. Extends the engine's: adds the buffers' layout."""
        return self.append_layout(super().build_receiver_registration_message())

    # Transfers

    def add_transfer_request(self, *chunk, wait_event: Any = None, **options) -> None:
        """Queues a chunk. Extends the engine's, which ignores `wait_event`.

        Until that event, a forward pass may still write these pages.
        """
        self.queuing.wait_event = wait_event
        super().add_transfer_request(*chunk, wait_event=wait_event, **options)
        self.queuing.wait_event = None

    def forward_event(self, chunk: Any) -> Any:
        return self.queuing.wait_event

    def _prep_dlist(self, peer: str, runs: Any, memory: str, gpu_id: int) -> Any:
        """Returns NIXL's list of the blocks of these runs, which are ours if `peer` is empty."""
        rows = [(address, length, gpu_id, stride, n) for address, length, stride, n in runs]
        return self._prep_xfer_dlist(peer, self._pack_stride_descs(rows), memory)

    def send_kvcache(
        self,
        peer_name: str,
        prefill_kv_indices: npt.NDArray[np.int32],
        dst_kv_ptrs: list[int],
        dst_kv_indices: npt.NDArray[np.int32],
        *more,
        **options,
    ):
        """Starts to write these pages of all layers. Returns NIXL's handle, None for nothing."""
        plan = self.plan_for(peer_name)
        self.note_sending(peer_name, "kv", plan and plan.kv)
        if plan is None:
            sent = (peer_name, prefill_kv_indices, dst_kv_ptrs, dst_kv_indices, *more)
            return super().send_kvcache(*sent, **options)
        return self.write_pages(peer_name, "kv", prefill_kv_indices, dst_kv_indices)

    def send_kvcache_slice(
        self,
        peer_name: str,
        prefill_kv_indices: npt.NDArray[np.int32],
        dst_kv_indices: npt.NDArray[np.int32],
    ):
        """Starts to write the KV heads that both sides hold, if their TP sizes differ."""
        plan = self.plan_for(peer_name)
        self.note_sending(peer_name, "kv", plan and plan.kv)
        if plan is None:
            return super().send_kvcache_slice(peer_name, prefill_kv_indices, dst_kv_indices)
        return self.write_pages(peer_name, "kv", prefill_kv_indices, dst_kv_indices)

    # What the engine sends in its own ways; see `_post_xfer`.

    def send_kvcache_dcp(self, peer_name: str, *sent, **options):
        self.note_sending(peer_name, "kv")
        return super().send_kvcache_dcp(peer_name, *sent, **options)

    def send_kvcache_mixed(self, peer_name: str, *sent, **options):
        self.note_sending(peer_name, "kv")
        return super().send_kvcache_mixed(peer_name, *sent, **options)

    def send_kvcache_staged(self, peer_name: str, *sent, **options):
        self.note_sending(peer_name, "kv")
        return super().send_kvcache_staged(peer_name, *sent, **options)

    def send_aux(
        self, peer_name: str, prefill_aux_index: int, dst_aux_ptrs: list[int], dst_aux_index: int
    ):
        """Starts to write the request's metadata. Returns NIXL's handle."""
        self.note_sending(peer_name, "aux")
        row = (peer_name, prefill_aux_index, dst_aux_ptrs, dst_aux_index)
        if self.aux_plan_for(peer_name) is None:
            return super().send_aux(*row)
        return self.write_metadata(*row)

    def maybe_send_extra(
        self,
        peer_name: str,
        prefill_state_indices: list[list[int]],
        dst_state_data_ptrs: list[list[int]],
        dst_state_indices: list[list[int]],
        *more,
        **options,
    ):
        """Starts to write state. Yields NIXL's handles."""
        plan = self.plan_for(peer_name)
        self.note_sending(peer_name, "state", plan and plan.state)
        if plan is None or plan.state is None:
            state = (prefill_state_indices, dst_state_data_ptrs, dst_state_indices)
            yield from super().maybe_send_extra(peer_name, *state, *more, **options)
            return
        handle = self.write_state(peer_name, prefill_state_indices, dst_state_indices)
        if handle is not None:
            yield handle

    def _await_handles(self, handles: list[Any], *, failure_seen: bool) -> tuple[bool, bool]:
        """Waits for transfers. Returns whether all have settled, and whether any has failed.

        Extends the engine's, which waits without limit: treats a silent decode rank as a failure.
        """
        handles, has_failed = [*handles, *self.connection.unsettled], False
        while handles and not (failure_seen or has_failed):
            handles, has_failed = self._running(handles)
            failure_seen = not self.worker_state.peers.isdisjoint(self.silent_peers)
            time.sleep(0)
        return super()._await_handles(handles, failure_seen=failure_seen)

    # Connections

    def _post_xfer(self, xfer_handle: Any, error_msg: str) -> None:
        """Starts a transfer. Extends the engine's: notes the peer if its connection is lost."""
        try:
            super()._post_xfer(xfer_handle, error_msg)
        except Exception as error:
            if CONNECTION_LOST in str(error):
                self.connection.lost.add(self.connection.peer)
            raise

    def _reload_invalidated_peers(self, room_transfer_infos: dict[str, Any]) -> None:
        """Adds the room's peers that NIXL has dropped to NIXL again.

        Extends the engine's: first removes peers that NIXL still knows but has no connection to,
        except within a second of the last time, when the engine would not add them again. Adds only
        peers whose processes listen: UCX may abort this one if they refuse a connection.
        """
        room_transfer_infos = {
            peer: info
            for peer, info in room_transfer_infos.items()
            if self._is_listening(self.decode_kv_args_table.get(peer))
        }
        try:
            self._remove_lost_peers(room_transfer_infos)
        except Exception:  # nothing catches what leaves this call: the worker would end
            logger.exception("Could not remove lost decode ranks from NIXL")
        super()._reload_invalidated_peers(room_transfer_infos)

    def _remove_lost_peers(self, peers: Container[str]) -> None:
        """Removes those of `peers` from NIXL to which it has no connection."""
        for peer in filter(peers.__contains__, list(self.connecting)):
            if not self.agent.check_remote_metadata(peer):
                self.end_early_connection(peer)  # its reads use the connection that was lost
        for peer in filter(peers.__contains__, list(self.connection.lost)):
            last = self._peer_reload_times.get(peer)
            is_due = last is None or time.monotonic() - last >= _PEER_RELOAD_MIN_INTERVAL_S
            if is_due and self.end_early_connection(peer):
                self.connection.lost.discard(peer)
                with contextlib.suppress(Exception):  # NIXL may have dropped it already
                    self.agent.remove_remote_agent(peer)
