"""NIXL: KV is sent by the peer's plan, whatever the TP sizes, and over a connection that lives."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from typing import TYPE_CHECKING, Any, Dict, FrozenSet, List, Optional, Set, Tuple

import numpy as np
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.kv_layout import (
    Copies,
    LayoutError,
    PeerPlan,
    PreparedPlan,
    RankLayout,
    TransferPlan,
    prepare,
)
from sglang.srt.disaggregation.pd.early_connections import EarlyConnections
from sglang.srt.disaggregation.pd.host_memory import peer_memory_kind, register_vram_as_dram
from sglang.srt.disaggregation.pd.message_checks import (
    STAGING,
    ValidatingSocket,
    check_agent_metadata,
    check_frame_sizes,
    check_metadata_message,
    check_rank_name,
    check_staging_message,
)
from sglang.srt.disaggregation.pd.peers import PlannedTransfers
from sglang.srt.disaggregation.pd.room_failures import RoomFailures
from sglang.srt.disaggregation.pd.silent_peers import SilentPeers
from sglang.srt.disaggregation.pd.verify_exchange import DigestSender

if TYPE_CHECKING:
    from sglang.srt.disaggregation.nixl.conn import (
        _PEER_RELOAD_MIN_INTERVAL_S,
        ABORT_TAG,
        GUARD,
        EngineNixlKVManager,
    )

logger = logging.getLogger(__name__)

RENAMED = (("NixlKVManager", "EngineNixlKVManager"),)

# In NIXL's errors: the connection to a peer is lost.
CONNECTION_LOST = "NIXL_ERR_REMOTE_DISCONNECT"
# Of a decode rank that could not be registered.
REGISTRATION_RETRY_SECONDS = 10.0
# Of a registration: the frame with its NIXL agent's metadata.
METADATA_FRAME = 5


class TransferInfo:
    # What has been sent of it, see `pd.verify_exchange`.
    sent_chunks = ()
    sent_state = None


class KVArgsRegisterInfo:
    # How this decode rank is served, see `pd.peers`.
    plan = None
    refusal = ""
    # Its description, and once more where it is to be registered again when it asks for a room.
    layout_frame = b""
    retry_layout = None
    # When that is tried again, on the monotonic clock.
    retry_at = 0.0


class ConnectionState(threading.local):
    """The decode rank that a worker is sending to, and those to which it found none."""

    peer = ""

    def __init__(self):
        self.lost: Set[str] = set()


class QueueingState(threading.local):
    """What the chunk waits for that this thread is queuing: an event, or nothing."""

    wait_event: Any = None


class NixlKVManager(
    EarlyConnections, DigestSender, SilentPeers, RoomFailures, PlannedTransfers, EngineNixlKVManager
):
    connection = ConnectionState()
    queuing = QueueingState()

    def __new__(cls, *args, **kwargs):
        self = super().__new__(cls)
        # By decode rank, of "kv" and "state": the plan, and NIXL's lists of our blocks and of the
        # rank's; None where each transfer names its copies.
        self.prepared: Dict[Tuple[str, str], Optional[tuple[PreparedPlan, Any, Any]]] = {}
        self.own_dlists: Dict[tuple, Any] = {}
        return self

    def register_buffer_to_engine(self):
        """As the engine's, also of a pool in host memory."""
        if self.kv_args.memory == "DRAM":
            register_vram_as_dram(self.agent)
        super().register_buffer_to_engine()

    # What peers say

    def _start_bootstrap_thread(self):
        """As the engine's, without messages that could not be read."""
        self.server_socket = ValidatingSocket(
            self.server_socket, self._check_prefill_message, self.release_message_lock
        )
        super()._start_bootstrap_thread()

    def _start_decode_listener_thread(self):
        """As the engine's, without messages that could not be read."""
        self.server_socket = ValidatingSocket(self.server_socket, self._check_decode_message)
        super()._start_decode_listener_thread()

    def _check_prefill_message(self, frames: List[bytes]) -> bool:
        """Raises what the engine's thread would on its way through these frames.

        True for a room that has ended here, of which the decode rank is told.
        """
        if frames[0] in STAGING:
            check_staging_message(frames)
        elif frames[0] != ABORT_TAG:
            if frames[0] != GUARD:
                raise ValueError("this is no decode rank's message")
            check_rank_name(frames[4])
            if frames[1] == b"None":
                check_frame_sizes(frames, METADATA_FRAME)
                info = KVArgsRegisterInfo.from_zmq(frames[1:])
                if self.can_check_agent_metadata:
                    check_agent_metadata(frames[4], info.agent_metadata)
                self.requires_dcp_relayout(info.dst_dcp_size, info.dst_dcp_rank)
                self.note_arriving_layout(frames)
            else:
                info = TransferInfo.from_zmq(frames[1:])
                check_metadata_message(info)
                self.note_metadata_sender(info.agent_name)
                self._retry_registration(info.agent_name)
                return self.reject_failed_room(info)
        return False

    @functools.cached_property
    def can_check_agent_metadata(self) -> bool:
        """Whether NIXL writes an agent's metadata as `check_agent_metadata` reads them."""
        try:
            check_agent_metadata(self.agent.name.encode(), self.agent.get_agent_metadata())
        except Exception as error:
            logger.warning(f"Decode ranks' metadata are not checked, ours are others: {error}")
            return False
        return True

    def _retry_registration(self, name: str) -> None:
        """Register a decode rank that asks for a room, and could not be registered before.

        At once, and then every so often: it may take seconds, in which others wait.
        """
        info = self.decode_kv_args_table.get(name)
        now = time.monotonic()
        if info is not None and info.retry_layout is not None and now >= info.retry_at:
            self.arriving_layout, info.retry_layout = info.retry_layout, None
            info.retry_at = now + REGISTRATION_RETRY_SECONDS
            self._add_remote_peer(info)

    def _check_decode_message(self, frames: List[bytes]) -> bool:
        if frames[0] in STAGING and self.enable_staging:
            check_staging_message(frames, self._staging_handler)
        return self.handle_digests_message(frames)

    def _add_remote_peer(self, decode_kv_args: KVArgsRegisterInfo):
        """As the engine's, with a plan for this decode rank. One that is refused is known, too."""
        info, name = decode_kv_args, decode_kv_args.agent_name
        known = self.decode_kv_args_table.get(name)
        if known is not None and known.refusal:
            del self.decode_kv_args_table[name]  # it may do better now
        elif known is not None:
            return super()._add_remote_peer(info)
        info.layout_frame = self.arriving_layout
        tp = (info.decode_tp_rank, info.decode_tp_size)
        try:
            dcp = (info.dst_dcp_size, info.dst_dcp_rank)
            info.requires_dcp_relayout = self.requires_dcp_relayout(*dcp)
            self.set_plan(name, info, tp, info.dst_kv_item_len)
            if not info.refusal:
                super()._add_remote_peer(info)
        except Exception as error:
            logger.exception(f"Decode {name} could not be registered")
            info.refusal = f"prefill could not register it: {error!r}"
            info.retry_layout = self.arriving_layout
        # Also where it failed: an entry that is missing would be worse, its rooms would wait.
        self.decode_kv_args_table[name] = info
        self.watch_peer(name, info)
        if not info.refusal:
            self.connect_early(name, info.dst_aux_ptrs)

    def handle_connect_failure(self, peer: str) -> None:
        """The engine tells NIXL again, which its next request would have it do at its expense."""
        self._reload_invalidated_peers({peer: None})

    def release_peer(self, name: str) -> bool:
        """As `SilenceWatch`: its blocks, which NIXL lists for each, and its NIXL agent."""
        info = self.decode_kv_args_table.get(name)
        if info is not None and info.retry_layout is None:
            info.plan = None
            self.drop_peer(name)
            info.refusal = "its connection was lost long ago, and it is registered again"
            info.retry_at = 0.0
            # Last: the thread that reads messages begins with it.
            info.retry_layout = info.layout_frame
        return True

    def drop_peer(self, name: str) -> None:
        """As `SilenceWatch`."""
        for what in ("kv", "state"):
            self.prepared.pop((name, what), None)
        lists = (self.prep_handles, self.prep_handles_slice_dst, self._prepared_state_plans)
        for table in (*lists, self._peer_reload_times, self._state_layout_rejections):
            table.pop(name, None)
        with contextlib.suppress(Exception):  # NIXL may not know it any more
            self.agent.remove_remote_agent(name)

    def matches_inferred_layout(self, info: KVArgsRegisterInfo, layout: RankLayout) -> bool:
        return set(info.dst_kv_mem_kinds) == {"VRAM"} and super().matches_inferred_layout(
            info, layout
        )

    def build_receiver_registration_message(self) -> List[bytes]:
        """As the engine's, and what each buffer holds."""
        return self.append_layout(super().build_receiver_registration_message())

    # What is sent

    def add_transfer_request(self, *chunk, wait_event: Any = None, **options) -> None:
        """As the engine's, which forgets the event: until then a forward may write these pages."""
        self.queuing.wait_event = wait_event
        super().add_transfer_request(*chunk, wait_event=wait_event, **options)
        self.queuing.wait_event = None

    def _note_queued(self, chunk: Any) -> FrozenSet[str]:
        chunk.wait_event = self.queuing.wait_event
        return super()._note_queued(chunk)

    def _note_taken(self, chunk: Any) -> None:
        super()._note_taken(chunk)
        event, chunk.wait_event = chunk.wait_event, None
        if event is None or self.request_status.get(chunk.room, KVPoll.Failed) == KVPoll.Failed:
            return
        try:
            event.synchronize()
        except Exception as error:
            reason = f"Prefill could not wait for the pages of a cached prefix: {error}"
            self.conclude_failure(bootstrap_room=chunk.room, failure_reason=reason)

    def _prepare_payload_xfer(self, peer_info: KVArgsRegisterInfo):
        """Name all blocks to NIXL that this decode rank may be sent; a request says which."""
        peer = peer_info.agent_name
        for what in ("kv", "state"):
            self.prepared.pop((peer, what), None)
        if peer_info.plan is None:
            return super()._prepare_payload_xfer(peer_info)
        plan: PeerPlan = peer_info.plan
        slots = self._num_slots_src
        memory = peer_memory_kind(self.kv_args.layout, plan.layout)
        peer_info.dst_homogeneous_mem_kind = memory
        kv = self._prepare(peer_info, plan.kv, memory, slots, peer_info.dst_num_slots or slots)
        self.prepared[peer, "kv"] = kv
        if plan.state is not None:
            self.prepared[peer, "state"] = self._prepare(peer_info, plan.state, memory)

    def _prepare(
        self, info: KVArgsRegisterInfo, plan: TransferPlan, memory: str, *pages: int
    ) -> Optional[tuple[PreparedPlan, Any, Any]]:
        """A plan with NIXL's lists of both sides' blocks; None where there are too many, or none.

        pages: How many each side has, where the plan does not know.
        """
        src_pages, dst_pages = pages or (0, 0)
        if not (plan.src_pages or src_pages) or not (plan.dst_pages or dst_pages):
            return None
        try:
            prepared = prepare(plan, src_pages, dst_pages)
        except LayoutError as error:
            logger.info(f"Decode {info.agent_name}: {error}; each transfer names its own")
            return None
        if not prepared.src:
            return None
        ours = tuple(prepared.src)
        if ours not in self.own_dlists:
            self.own_dlists[ours] = self._prep_dlist("", ours, "VRAM", self.kv_args.gpu_id)
        theirs = self._prep_dlist(info.agent_name, prepared.dst, memory, info.gpu_id)
        return prepared, self.own_dlists[ours], theirs

    def _prep_dlist(self, peer: str, runs: Any, memory: str, gpu_id: int) -> Any:
        """NIXL's list of the blocks of these runs, ours where `peer` is empty."""
        rows = [(address, length, gpu_id, stride, n) for address, length, stride, n in runs]
        return self._prep_xfer_dlist(peer, self._pack_stride_descs(rows), memory)

    def send_kvcache(self, peer: str, src_pages, dst_ptrs, dst_pages, *more, **options):
        """Begin to write these pages of all layers. Returns NIXL's handle, None for nothing."""
        self.connection.peer = peer
        if self.plan_for(peer) is None:
            return super().send_kvcache(peer, src_pages, dst_ptrs, dst_pages, *more, **options)
        return self._post_planned(peer, "kv", src_pages, dst_pages)

    def send_kvcache_slice(self, peer: str, src_pages, dst_pages):
        """The same between TP sizes: the heads that both sides hold."""
        self.connection.peer = peer
        if self.plan_for(peer) is None:
            return super().send_kvcache_slice(peer, src_pages, dst_pages)
        return self._post_planned(peer, "kv", src_pages, dst_pages)

    def _post_planned(self, peer: str, what: str, src_pages, dst_pages) -> Optional[Any]:
        """Begin to write these pages of "kv" or "state"."""
        if (peer, what) not in self.prepared:
            raise RuntimeError(f"NIXL knows no blocks of decode {peer}; its connection was lost")
        known = self.prepared[peer, what]
        if known is None:
            plan = getattr(self.plan_for(peer), what)
            return self._post_copies(peer, plan.copies(src_pages, dst_pages))
        prepared, ours, theirs = known
        src, dst = prepared.blocks(src_pages, dst_pages)
        if not src.size:
            return None
        handle = self.agent.make_prepped_xfer("WRITE", ours, src, theirs, dst)
        if not handle:
            raise RuntimeError(f"NIXL made no transfer of {src.size} blocks to decode {peer}")
        self._post_xfer(handle, f"NIXL did not start a transfer to decode {peer}")
        return handle

    def send_aux(self, peer: str, own_slot: int, dst_ptrs: List[int], dst_slot: int):
        """Begin to write the request's metadata. Returns NIXL's handle."""
        self.connection.peer = peer
        plan = self.aux_plan_for(peer)
        if plan is None:
            return super().send_aux(peer, own_slot, dst_ptrs, dst_slot)
        own = self.kv_args.aux_data_ptrs
        src, dst, length = plan.copies(own, own_slot, dst_ptrs, dst_slot)
        device = np.zeros_like(length)
        sides = [np.stack((side, length, device), axis=1) for side in (src, dst)]
        return self._post(peer, *sides, "DRAM", "DRAM")

    def maybe_send_extra(
        self, peer: str, src_state: list, dst_ptrs: list, dst_state: list, gpu_id: int, *more, **by
    ):
        """Begin to write state. Gives NIXL's handles."""
        self.connection.peer = peer
        plan = self.plan_for(peer)
        if plan is None or plan.state is None:
            sent = (src_state, dst_ptrs, dst_state, gpu_id, *more)
            yield from super().maybe_send_extra(peer, *sent, **by)
            return
        pages = self.pair_state_pages(src_state, dst_state)
        handle = self._post_planned(peer, "state", *pages)
        if handle is not None:
            yield handle

    def _post_copies(self, peer: str, copies: Copies) -> Optional[Any]:
        if not len(copies):
            return None
        gpu_id = self.decode_kv_args_table[peer].gpu_id
        sides = copies.descriptors(self.kv_args.gpu_id, gpu_id)
        memory = peer_memory_kind(self.kv_args.layout, self.plan_for(peer).layout)
        return self._post(peer, *sides, "VRAM", memory)

    def _post(self, peer: str, src, dst, src_memory: str, dst_memory: str) -> Any:
        """Begin a transfer of descriptors, each side's `[copies, 3]`: address, length, device."""
        ours = self.agent.get_xfer_descs(src.astype(np.uint64), src_memory)
        theirs = self.agent.get_xfer_descs(dst.astype(np.uint64), dst_memory)
        handle = self.agent.initialize_xfer("WRITE", ours, theirs, peer)
        if not handle:
            raise RuntimeError(f"NIXL made no transfer of {len(src)} copies to decode {peer}")
        self._post_xfer(handle, f"NIXL did not start a transfer to decode {peer}")
        return handle

    def _await_handles(self, handles: List[Any], *, failure_seen: bool) -> Tuple[bool, bool]:
        """As the engine's, which waits without end; not for a decode rank that is silent."""
        while not failure_seen and self._any_running(handles):
            failure_seen = not self.worker_state.peers.isdisjoint(self.silent_peers)
            time.sleep(0)
        return super()._await_handles(handles, failure_seen=failure_seen)

    def _any_running(self, handles: List[Any]) -> bool:
        """Whether some are, and none has failed; what cannot be read is left to the engine."""
        try:
            states = {self.agent.check_xfer_state(handle) for handle in handles}
        except Exception:
            return False
        return not states <= {"DONE"} and "ERR" not in states

    # Connections

    def _post_xfer(self, xfer_handle: Any, error_msg: str) -> None:
        """As the engine's; it is noted to whom the connection is lost."""
        try:
            super()._post_xfer(xfer_handle, error_msg)
        except Exception as error:
            if CONNECTION_LOST in str(error):
                self.connection.lost.add(self.connection.peer)
            raise

    def _reload_invalidated_peers(self, room_transfer_infos: Dict[str, Any]) -> None:
        """As the engine's, also for a peer that NIXL knows still and has no connection to.

        No other one is forgotten, and none within the second for which the engine lets it be.
        """
        for peer in self.connection.lost.intersection(room_transfer_infos) - self.connecting:
            last = self._peer_reload_times.get(peer)
            if last is None or time.monotonic() - last >= _PEER_RELOAD_MIN_INTERVAL_S:
                self.connection.lost.discard(peer)
                with contextlib.suppress(Exception):  # NIXL may not know it any more
                    self.agent.remove_remote_agent(peer)
        super()._reload_invalidated_peers(room_transfer_infos)
