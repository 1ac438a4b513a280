"""NIXL: sends by each peer's plan, whatever the TP sizes."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from sglang.srt.disaggregation.kv_layout import (
    Copies,
    LayoutError,
    PackedPlan,
    PeerPlan,
    PreparedPlan,
    TransferPlan,
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
from sglang.srt.disaggregation.pd.room_failures import ABORT

logger = logging.getLogger(__name__)

# NIXL's errors contain this if the connection to a peer is lost.
CONNECTION_LOST = "NIXL_ERR_REMOTE_DISCONNECT"
# The first frame of registrations and of requests for rooms.
GUARD = b"NixlMsgGuard"
# How long to wait between attempts to register a decode rank.
REGISTRATION_RETRY_SECONDS = 10.0
# The frame of a registration that holds the NIXL agent's metadata.
METADATA_FRAME = 5


class AgentRegistration(PeerRegistration):
    """Base of a decode rank's registration, before the engine's."""

    # Whether its next request for a room is to register it again, and from when on; on the
    # monotonic clock.
    needs_retry = False
    retry_at = 0.0


class ConnectionState(threading.local):
    """The decode rank that a worker is sending to, and those whose connection it found lost.

    Attributes:
        unsettled: Transfers of its chunk that may still write, and of which the engine has no list.
    """

    peer = ""

    def __init__(self):
        self.lost: set[str] = set()
        self.unsettled: list[Any] = []


class NixlSends(EarlyConnections, PrefillManager):
    """Base of a rank's KV manager, before the engine's: registers peers, and writes by plan.

    A release provides the types of messages, `registration_type` and `request_type`;
    `_prep_dlist(peer, runs, memory, gpu_id)`, which lists a side's blocks for
    NIXL; `_post_xfer(handle, error_text)`, which starts a transfer; and
    `_await_handles(handles, failure_seen=...)`, which returns whether all of these transfers have
    settled, and whether any has failed.
    """

    connection = ConnectionState()
    # By decode rank and "kv" or "state": the plan, and NIXL's lists of our blocks and of that
    # rank's; None if each transfer lists its own copies.
    prepared: dict[tuple[str, str], tuple[PreparedPlan, Any, Any] | None] = PerInstance(dict)
    own_dlists: dict[tuple, Any] = PerInstance(dict)

    def register_buffer_to_engine(self):
        """Registers the buffers. Extends the engine's: also memory to pack in, and host memory.

        Without memory to pack in, this rank sends slices.
        """
        self.start_transfer_log()
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
            self.server_socket,
            self._check_prefill_message,
            self.failures.end_message,
            self.transfer_log.malformed,
        )
        super()._start_bootstrap_thread()

    def _check_prefill_message(self, frames: list[bytes]) -> bool:
        """Raises for frames on which the engine's thread would crash.

        Returns True for a request for a room that has failed here; notifies its decode rank.
        """
        if frames[0] in STAGING:
            check_staging_message(frames)
        elif frames[0] != ABORT:
            if frames[0] != GUARD:
                raise ValueError("not a registration, metadata, abort or staging message")
            check_rank_name(frames[4])
            if frames[1] == b"None":
                check_frame_sizes(frames, METADATA_FRAME)
                info = self.registration_type.from_zmq(frames[1:])
                if self.can_check_agent_metadata:
                    check_agent_metadata(frames[4], info.agent_metadata)
                self.requires_dcp_relayout(info.dst_dcp_size, info.dst_dcp_rank)
            else:
                info = self.request_type.from_zmq(frames[1:])
                return self.reject_request(info.agent_name, info)
        return False

    def _check_decode_message(self, frames: list[bytes]) -> bool:
        if frames[0] in STAGING and self.enable_staging:
            check_staging_message(frames, self._staging_handler)
        return self.store_frames(frames)

    # Decode ranks

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

    def note_metadata_sender(self, name: str) -> None:
        """Notes that a decode rank is alive; registers it if it could not be registered before."""
        super().note_metadata_sender(name)
        self._retry_registration(name)

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

    def _add_remote_peer(self, decode_kv_args: AgentRegistration):
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

    def drop_peer(self, name: str) -> None:
        """Drops what the manager and NIXL keep of a rank; see `SilenceWatch.drop_peer`."""
        super().drop_peer(name)
        for what in ("kv", "state"):
            self.prepared.pop((name, what), None)
        for table in (self.prep_handles, self.prep_handles_slice_dst):
            table.pop(name, None)
        with contextlib.suppress(Exception):  # NIXL may have dropped it already
            self.agent.remove_remote_agent(name)

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

    # Transfers

    def note_sending(self, peer: str, kind: str, plan: TransferPlan | None = None) -> None:
        """Notes what a worker sends next. Extends `PrefillManager`'s: also whose connection it is.

        Args:
            plan: None if the engine sends in its own way.
        """
        self.connection.peer = peer
        super().note_sending(peer, kind, plan)

    def _note_taken(self, chunk: Any) -> None:
        self.connection.unsettled.clear()  # NIXL cancels them
        super()._note_taken(chunk)

    def _prepare_payload_xfer(self, peer_info: AgentRegistration):
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
        self, info: AgentRegistration, plan: TransferPlan, memory: str, *pages: int
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

    def write_pages(
        self,
        peer: str,
        what: Literal["kv", "state"],
        src_pages: npt.ArrayLike,
        dst_pages: npt.ArrayLike,
    ) -> Any | None:
        """Starts to write these pages by plan. Returns NIXL's handle, None for nothing."""
        plan = self.plan_for(peer)
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

    def write_metadata(
        self, peer: str, prefill_aux_index: int, dst_aux_ptrs: list[int], dst_aux_index: int
    ) -> Any:
        """Starts to write a request's metadata by plan. Returns NIXL's handle."""
        rows = (self.kv_args.aux_data_ptrs, prefill_aux_index, dst_aux_ptrs, dst_aux_index)
        src, dst, length = self.aux_plan_for(peer).copies(*rows)
        device = np.zeros_like(length)
        sides = [np.stack((side, length, device), axis=1) for side in (src, dst)]
        return self._post(peer, *sides, "DRAM", "DRAM")

    def write_state(
        self,
        peer: str,
        src: Sequence[Sequence[int] | None],
        dst: Sequence[Sequence[int] | None],
    ) -> Any | None:
        """Starts to write state by plan; `src` and `dst` are pages by kind of state.

        Returns NIXL's handle, None for nothing.
        """
        pages = pair_state_pages(self.kv_args.state_types[0], src, dst)
        return self.write_pages(peer, "state", *pages)

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

    def _running(self, handles: list[Any]) -> tuple[list[Any], bool]:
        """Returns those that are not done, and whether one has failed or has no readable state."""
        try:
            states = [self.agent.check_xfer_state(handle) for handle in handles]
        except Exception:
            return handles, True
        running = [handle for handle, state in zip(handles, states) if state != "DONE"]
        return running, "ERR" in states

    @staticmethod
    def _is_listening(info: AgentRegistration | None) -> bool:
        """Whether a rank's process accepts connections, or its registration has no endpoint."""
        if info is None or not hasattr(info, "endpoint"):
            return info is not None
        return PeerSocket.to(info.endpoint, info.dst_port).is_listening()
