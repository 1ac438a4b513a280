"""NIXL: sends KV by each peer's plan, whatever the TP sizes, and restores lost connections."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Container
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.kv_layout import (
    Copies,
    LayoutError,
    PackedPlan,
    PeerPlan,
    PreparedPlan,
    TransferPlan,
    find_layout_frame,
    prepare,
)
from sglang.srt.disaggregation.pd.early_connections import EarlyConnections
from sglang.srt.disaggregation.pd.host_memory import peer_memory_kind, register_vram_as_dram
from sglang.srt.disaggregation.pd.memory_registration import (
    packing_regions,
    send_slices_instead,
)
from sglang.srt.disaggregation.pd.message_checks import (
    STAGING,
    ValidatingSocket,
    check_agent_metadata,
    check_frame_sizes,
    check_metadata_message,
    check_rank_name,
    check_staging_message,
)
from sglang.srt.disaggregation.pd.packing import copies_of_unit
from sglang.srt.disaggregation.pd.peer_sockets import PeerSocket
from sglang.srt.disaggregation.pd.peers import (
    PeerRegistration,
    awaits_units,
    pair_state_pages,
    plan_or_refusal,
)
from sglang.srt.disaggregation.pd.per_instance import PerInstance
from sglang.srt.disaggregation.pd.prefill_manager import PrefillManager

if TYPE_CHECKING:
    from sglang.srt.disaggregation.nixl.conn import (
        _PEER_RELOAD_MIN_INTERVAL_S,
        ABORT_TAG,
        GUARD,
        EngineKVArgsRegisterInfo,
        EngineNixlKVManager,
        TransferInfo,
    )

logger = logging.getLogger(__name__)

RENAMED = (
    ("KVArgsRegisterInfo", "EngineKVArgsRegisterInfo"),
    ("NixlKVManager", "EngineNixlKVManager"),
)

# NIXL's errors contain this if the connection to a peer is lost.
CONNECTION_LOST = "NIXL_ERR_REMOTE_DISCONNECT"
# How long to wait between attempts to register a decode rank.
REGISTRATION_RETRY_SECONDS = 10.0
# The frame of a registration that holds the NIXL agent's metadata.
METADATA_FRAME = 5


class KVArgsRegisterInfo(PeerRegistration, EngineKVArgsRegisterInfo):
    # Whether the rank's next request for a room registers it again, and the earliest time for that
    # on the monotonic clock.
    needs_retry = False
    retry_at = 0.0

    @classmethod
    def from_zmq(cls, msg: list[bytes]):
        """Reads a registration. Extends the engine's: with the buffers' layout."""
        info = super().from_zmq(msg)
        info.layout_frame = find_layout_frame(msg)
        return info


class ConnectionState(threading.local):
    """The decode rank that a worker is sending to, and those whose connection it found lost.

    Attributes:
        unsettled: Transfers of its chunk that may still write, and of which the engine has no list.
    """

    peer = ""

    def __init__(self):
        self.lost: set[str] = set()
        self.unsettled: list[Any] = []


class QueueingState(threading.local):
    """The event that the chunk which this thread is queuing must wait for, or None."""

    wait_event: Any = None


class NixlKVManager(EarlyConnections, PrefillManager, EngineNixlKVManager):
    connection = ConnectionState()
    queuing = QueueingState()

    # By decode rank and "kv" or "state": the plan, and NIXL's lists of our blocks and of that
    # rank's; None if each transfer lists its own copies.
    prepared: dict[tuple[str, str], tuple[PreparedPlan, Any, Any] | None] = PerInstance(dict)
    own_dlists: dict[tuple, Any] = PerInstance(dict)

    def register_buffer_to_engine(self):
        """Registers the buffers. Extends the engine's: also memory to pack in, and host memory.

        Without memory to pack in, this rank sends slices.
        """
        if self.memory == "DRAM":
            register_vram_as_dram(self.agent)
        super().register_buffer_to_engine()
        self.make_packing()
        for _, address, size in packing_regions(self.kv_args):
            why = "it returned no descriptors"
            try:
                memory = [(address, size, self.kv_args.gpu_id, "")]
                descs = self.agent.register_memory(memory, "VRAM")
            except Exception as error:
                descs, why = None, repr(error)
            if not descs:
                send_slices_instead(self.kv_args, f"NIXL: {why}")

    # Messages from peers

    def _start_bootstrap_thread(self):
        """Starts prefill's thread for messages. Extends the engine's: drops invalid ones."""
        self.server_socket = ValidatingSocket(
            self.server_socket, self._check_prefill_message, self.failures.end_message
        )
        super()._start_bootstrap_thread()

    def _start_decode_listener_thread(self):
        """Starts decode's thread for messages. Extends the engine's: drops invalid ones."""
        self.server_socket = ValidatingSocket(self.server_socket, self._check_decode_message)
        super()._start_decode_listener_thread()

    def _check_prefill_message(self, frames: list[bytes]) -> bool:
        """Raises for frames on which the engine's thread would crash.

        Returns True for a request for a room that has failed here; notifies its decode rank.
        """
        if frames[0] in STAGING:
            check_staging_message(frames)
        elif frames[0] != ABORT_TAG:
            if frames[0] != GUARD:
                raise ValueError("not a registration, metadata, abort or staging message")
            check_rank_name(frames[4])
            if frames[1] == b"None":
                check_frame_sizes(frames, METADATA_FRAME)
                info = KVArgsRegisterInfo.from_zmq(frames[1:])
                if self.can_check_agent_metadata:
                    check_agent_metadata(frames[4], info.agent_metadata)
                self.requires_dcp_relayout(info.dst_dcp_size, info.dst_dcp_rank)
            else:
                info = TransferInfo.from_zmq(frames[1:])
                check_metadata_message(info)
                self.note_metadata_sender(info.agent_name)
                self._retry_registration(info.agent_name)
                decode = None if info.is_dummy else (info.endpoint, info.dst_port)
                return self.reject_failed_room(info.room, decode)
        return False

    @functools.cached_property
    def can_check_agent_metadata(self) -> bool:
        """Whether NIXL writes agent metadata in the format that `check_agent_metadata` reads."""
        try:
            check_agent_metadata(self.agent.name.encode(), self.agent.get_agent_metadata())
        except Exception as error:
            logger.warning(
                "Decode ranks' NIXL metadata is not checked, because this rank's has an unknown "
                f"format: {error}"
            )
            return False
        return True

    def _retry_registration(self, name: str) -> None:
        """Registers a decode rank that requests a room and could not be registered before.

        Tries at once, and then every `REGISTRATION_RETRY_SECONDS` at most: an attempt may take
        seconds, in which other messages wait.
        """
        info = self.decode_kv_args_table.get(name)
        now = time.monotonic()
        if info is not None and info.needs_retry and now >= info.retry_at:
            info.needs_retry = False
            info.retry_at = now + REGISTRATION_RETRY_SECONDS
            self._add_remote_peer(info)

    def _check_decode_message(self, frames: list[bytes]) -> bool:
        if frames[0] in STAGING and self.enable_staging:
            check_staging_message(frames, self._staging_handler)
        return self.store_frames(frames)

    def _add_remote_peer(self, decode_kv_args: KVArgsRegisterInfo):
        """Adds a decode rank, even one that is refused. Extends the engine's: makes a plan."""
        info, name = decode_kv_args, decode_kv_args.agent_name
        known = self.decode_kv_args_table.get(name)
        if known is not None and known.refusal:
            del self.decode_kv_args_table[name]  # it may be accepted now
        elif known is not None:
            return super()._add_remote_peer(info)
        tp = (info.decode_tp_rank, info.decode_tp_size)
        try:
            dcp = (info.dst_dcp_size, info.dst_dcp_rank)
            info.requires_dcp_relayout = self.requires_dcp_relayout(*dcp)
            info.awaits_units = awaits_units(info.layout_frame, self.attn_tp_size)
            own, is_on_device = (self.kv_args, self.layout), set(info.dst_kv_mem_kinds) == {"VRAM"}
            info.plan, info.refusal = plan_or_refusal(name, *own, info, tp, is_on_device)
            if info.plan is not None:
                peer_memory_kind(self.layout, info.plan.layout)
            if not info.refusal:
                super()._add_remote_peer(info)
        except LayoutError as error:
            logger.error(f"Refusing decode {name}: {error}")
            info.plan, info.refusal = None, str(error)
        except Exception as error:
            logger.exception(f"Decode {name} could not be registered")
            info.refusal = f"prefill could not register this decode rank: {error!r}"
            info.needs_retry = True
        # Add an entry even on failure: without one, the rank's rooms would wait.
        self.decode_kv_args_table[name] = info
        self.watch_peer(name, info)
        if not info.refusal:
            self.connect_early(name, info.dst_aux_ptrs)

    def handle_connect_failure(self, peer: str) -> None:
        """Adds a peer that NIXL has dropped again; its next request would have to wait for that."""
        self._reload_invalidated_peers({peer: None})

    def release_peer(self, name: str) -> bool:
        """Releases a decode rank's block lists and NIXL agent, unless NIXL is reading from it.

        Returns whether it did. Overrides `SilenceWatch.release_peer`.
        """
        if not self.end_early_connection(name):
            return False
        info = self.decode_kv_args_table.get(name)
        if info is not None and not info.needs_retry:
            info.refusal = "its connection was lost long ago; it is being registered again"
            info.plan = None
            self.drop_peer(name)
            info.retry_at = 0.0
            # Last: the thread that reads messages checks it first.
            info.needs_retry = True
        return True

    def drop_peer(self, name: str) -> None:
        """Drops what the manager and NIXL keep of a rank; see `SilenceWatch.drop_peer`."""
        for what in ("kv", "state"):
            self.prepared.pop((name, what), None)
        lists = (self.prep_handles, self.prep_handles_slice_dst, self._prepared_state_plans)
        for table in (*lists, self._peer_reload_times, self._state_layout_rejections):
            table.pop(name, None)
        with contextlib.suppress(Exception):  # NIXL may have dropped it already
            self.agent.remove_remote_agent(name)

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

    def _note_queued(self, chunk: Any) -> frozenset[str]:
        chunk.wait_event = self.queuing.wait_event
        return super()._note_queued(chunk)

    def _note_taken(self, chunk: Any) -> None:
        self.connection.unsettled.clear()  # NIXL cancels them
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
        """Prepares NIXL's lists of all blocks that may be sent to a rank; transfers index them."""
        peer = peer_info.agent_name
        for what in ("kv", "state"):
            self.prepared.pop((peer, what), None)
        if peer_info.plan is None:
            return super()._prepare_payload_xfer(peer_info)
        plan: PeerPlan = peer_info.plan
        slots = self._num_slots_src
        memory = peer_memory_kind(self.layout, plan.layout)
        peer_info.dst_homogeneous_mem_kind = memory
        kv = self._prepare(peer_info, plan.kv, memory, slots, peer_info.dst_num_slots or slots)
        self.prepared[peer, "kv"] = kv
        if plan.state is not None:
            self.prepared[peer, "state"] = self._prepare(peer_info, plan.state, memory)

    def _prepare(
        self, info: KVArgsRegisterInfo, plan: TransferPlan, memory: str, *pages: int
    ) -> tuple[PreparedPlan, Any, Any] | None:
        """Returns a plan with NIXL's lists of both sides' blocks; None for too many, or none.

        Args:
            pages: Numbers of pages of prefill and decode, for a plan that does not know them.
        """
        src_pages, dst_pages = pages or (0, 0)
        if not (plan.src_pages or src_pages) or not (plan.dst_pages or dst_pages):
            return None
        try:
            if isinstance(plan, PackedPlan):
                return None  # it has few copies
            prepared = prepare(plan, src_pages, dst_pages)
        except LayoutError as error:
            logger.info(f"Decode {info.agent_name}: {error}; not using prepared descriptors")
            return None
        if not prepared.src:
            return None
        ours = tuple(prepared.src)
        if ours not in self.own_dlists:
            self.own_dlists[ours] = self._prep_dlist("", ours, "VRAM", self.kv_args.gpu_id)
        theirs = self._prep_dlist(info.agent_name, prepared.dst, memory, info.gpu_id)
        return prepared, self.own_dlists[ours], theirs

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
        self.connection.peer = peer_name
        plan = self.plan_for(peer_name)
        if plan is None:
            sent = (peer_name, prefill_kv_indices, dst_kv_ptrs, dst_kv_indices, *more)
            return super().send_kvcache(*sent, **options)
        return self._post_planned(peer_name, plan, "kv", prefill_kv_indices, dst_kv_indices)

    def send_kvcache_slice(
        self,
        peer_name: str,
        prefill_kv_indices: npt.NDArray[np.int32],
        dst_kv_indices: npt.NDArray[np.int32],
    ):
        """Starts to write the KV heads that both sides hold, if their TP sizes differ."""
        self.connection.peer = peer_name
        plan = self.plan_for(peer_name)
        if plan is None:
            return super().send_kvcache_slice(peer_name, prefill_kv_indices, dst_kv_indices)
        return self._post_planned(peer_name, plan, "kv", prefill_kv_indices, dst_kv_indices)

    # What the engine sends in its own ways; see `_post_xfer`.

    def send_kvcache_dcp(self, peer_name: str, *sent, **options):
        self.connection.peer = peer_name
        return super().send_kvcache_dcp(peer_name, *sent, **options)

    def send_kvcache_mixed(self, peer_name: str, *sent, **options):
        self.connection.peer = peer_name
        return super().send_kvcache_mixed(peer_name, *sent, **options)

    def send_kvcache_staged(self, peer_name: str, *sent, **options):
        self.connection.peer = peer_name
        return super().send_kvcache_staged(peer_name, *sent, **options)

    def _post_planned(
        self,
        peer: str,
        plan: PeerPlan,
        what: Literal["kv", "state"],
        src_pages: npt.ArrayLike,
        dst_pages: npt.ArrayLike,
    ) -> Any | None:
        """Starts to write these pages. Returns NIXL's handle, None for nothing."""
        if (peer, what) not in self.prepared:
            raise RuntimeError(
                f"connection to decode {peer} was lost; NIXL has no descriptors of its blocks"
            )
        known = self.prepared[peer, what]
        if isinstance(getattr(plan, what), PackedPlan):
            return self._post_unit(peer, plan, what, src_pages, dst_pages)
        if known is None:
            copies = getattr(plan, what).copies(src_pages, dst_pages)
            return self._post_copies(peer, plan, copies)
        prepared, ours, theirs = known
        src, dst = prepared.blocks(src_pages, dst_pages)
        if not src.size:
            return None
        handle = self.agent.make_prepped_xfer("WRITE", ours, src, theirs, dst)
        if not handle:
            raise RuntimeError(
                f"NIXL could not create a transfer of {src.size} blocks to decode {peer}"
            )
        self._post_xfer(handle, f"NIXL did not start a transfer to decode {peer}")
        return handle

    def _post_unit(
        self,
        peer: str,
        plan: PeerPlan,
        what: Literal["kv", "state"],
        src_pages: npt.ArrayLike,
        dst_pages: npt.ArrayLike,
    ) -> Any | None:
        """Writes a chunk as whole rows. Returns NIXL's handle of the last transfer, None for none.

        All but that of a chunk that needs no packing are complete.
        """
        packed: PackedPlan = getattr(plan, what)
        last = None
        unit = copies_of_unit(self.packing, what, packed, src_pages, dst_pages)
        with contextlib.closing(unit):
            for copies, _ in unit:
                handle = self._post_copies(peer, plan, copies)
                if handle is None:
                    continue
                last = handle
                if packed.packs:  # its memory is packed again
                    self._await_round(peer, handle)
        return last

    def _await_round(self, peer: str, handle: Any) -> None:
        settled, failed = self._await_handles([handle], failure_seen=False)
        if not settled:
            self.connection.unsettled.append(handle)
            raise RuntimeError(f"a transfer to decode {peer} does not end")
        if failed:
            raise RuntimeError(f"NIXL reported an error of a transfer to decode {peer}")

    def send_aux(
        self, peer_name: str, prefill_aux_index: int, dst_aux_ptrs: list[int], dst_aux_index: int
    ):
        """Starts to write the request's metadata. Returns NIXL's handle."""
        self.connection.peer = peer_name
        plan = self.aux_plan_for(peer_name)
        if plan is None:
            return super().send_aux(peer_name, prefill_aux_index, dst_aux_ptrs, dst_aux_index)
        own = self.kv_args.aux_data_ptrs
        src, dst, length = plan.copies(own, prefill_aux_index, dst_aux_ptrs, dst_aux_index)
        device = np.zeros_like(length)
        sides = [np.stack((side, length, device), axis=1) for side in (src, dst)]
        return self._post(peer_name, *sides, "DRAM", "DRAM")

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
        self.connection.peer = peer_name
        plan = self.plan_for(peer_name)
        if plan is None or plan.state is None:
            state = (prefill_state_indices, dst_state_data_ptrs, dst_state_indices)
            yield from super().maybe_send_extra(peer_name, *state, *more, **options)
            return
        kind = self.kv_args.state_types[0]
        pages = pair_state_pages(kind, prefill_state_indices, dst_state_indices)
        handle = self._post_planned(peer_name, plan, "state", *pages)
        if handle is not None:
            yield handle

    def _post_copies(self, peer: str, plan: PeerPlan, copies: Copies) -> Any | None:
        if not len(copies):
            return None
        gpu_id = self.decode_kv_args_table[peer].gpu_id
        sides = copies.descriptors(self.kv_args.gpu_id, gpu_id)
        memory = peer_memory_kind(self.layout, plan.layout)
        return self._post(peer, *sides, "VRAM", memory)

    def _post(self, peer: str, src, dst, src_memory: str, dst_memory: str) -> Any:
        """Starts a transfer of descriptors, `[copies, 3]` per side: address, length, device."""
        ours = self.agent.get_xfer_descs(src.astype(np.uint64), src_memory)
        theirs = self.agent.get_xfer_descs(dst.astype(np.uint64), dst_memory)
        handle = self.agent.initialize_xfer("WRITE", ours, theirs, peer)
        if not handle:
            raise RuntimeError(
                f"NIXL could not create a transfer of {len(src)} copies to decode {peer}"
            )
        self._post_xfer(handle, f"NIXL did not start a transfer to decode {peer}")
        return handle

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

    def _running(self, handles: list[Any]) -> tuple[list[Any], bool]:
        """Returns those that are not done, and whether one has failed or has no readable state."""
        try:
            states = [self.agent.check_xfer_state(handle) for handle in handles]
        except Exception:
            return handles, True
        running = [handle for handle, state in zip(handles, states) if state != "DONE"]
        return running, "ERR" in states

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

    @staticmethod
    def _is_listening(info: KVArgsRegisterInfo | None) -> bool:
        """Whether a rank's process accepts connections, or its registration has no endpoint."""
        if info is None or not hasattr(info, "endpoint"):
            return info is not None
        return PeerSocket.to(info.endpoint, info.dst_port).is_listening()
