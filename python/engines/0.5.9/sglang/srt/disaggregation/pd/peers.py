"""Decode ranks that register with a prefill rank, and the rooms that they request.

decode: (None, ..., pointers, ..., description)   prefill plans its transfers, or refuses the rank
decode: (room, ..., pages, slots)                 the room opens once all its ranks requested it
decode: (ABORT, room, reason, ...)                see `room_failures`
"""

from __future__ import annotations

import logging
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from sglang.srt.disaggregation.base.conn import KVArgs, KVPoll
from sglang.srt.disaggregation.kv_layout import (
    Bounds,
    LayoutError,
    PeerPlan,
    Pointers,
    StockRegistration,
    decode_layout,
    has_layout_frame,
)
from sglang.srt.disaggregation.pd.message_checks import (
    check_numbers,
    rebind_with_limits,
    start_reader_thread,
)
from sglang.srt.disaggregation.pd.packing import make_packing_buffers
from sglang.srt.disaggregation.pd.peer_plans import plan_registered
from sglang.srt.disaggregation.pd.room_failures import ABORT
from sglang.srt.disaggregation.pd.server_names import server_name
from sglang.srt.disaggregation.utils import DisaggregationMode

logger = logging.getLogger(__name__)

Pages = npt.NDArray[np.int32]  # indices into a pool: [pages]

MAX_OPEN_ROOMS = 1 << 16
MAX_SESSION_NAME = 256
# The shortest time between two attempts to register a decode rank again.
REGISTRATION_RETRY_SECONDS = 10.0


@dataclass
class PeerRegistration:
    """A decode rank's registration of its buffers, and this prefill rank's plan for it.

    A backend adds its own fields, among them `dst_kv_ptrs`, `dst_state_data_ptrs`,
    `dst_kv_item_len` (bytes per page of the first buffer), `name`, and `attn_tp` (attention TP rank
    and size).
    """

    # Empty from a stock rank, which does not describe its buffers.
    layout_frame: bytes = field(default=b"", kw_only=True)
    # The server it belongs to, see `pd.server_names`.
    server: str = field(default="", kw_only=True)
    # The copies to this rank, or why there are none.
    plan: PeerPlan | None = field(default=None, kw_only=True)
    refusal: str = field(default="", kw_only=True)
    # Whether to register the rank again, and from when on the monotonic clock.
    can_retry: bool = field(default=False, kw_only=True)
    retry_at: float = field(default=0.0, kw_only=True)
    # Whether the rank reads why a room failed, unlike a stock one.
    reads_reasons: bool = field(default=False, kw_only=True)
    # The rank's memory, see `pd.write_bounds`.
    bounds: Bounds | None = field(default=None, kw_only=True)
    state_slots: Sequence[int | None] = field(default=(), kw_only=True)

    def read_own_frames(self, frames: list[bytes]) -> None:
        """Reads what stock ranks do not send: the description, and the draft's state pointers.

        They are the 13th and 14th frame: in the target's frame, a stock prefill rank would take
        the draft's pointers for the target's.
        """
        self.layout_frame = frames[12] if len(frames) > 12 else b""
        self.server = server_name(self.layout_frame, getattr(self, "endpoint", ""))
        if has_layout_frame(frames) and len(frames) > 13:
            check_numbers(frames[13])
            self.dst_state_data_ptrs += struct.unpack(f"{len(frames[13]) // 8}Q", frames[13])


@dataclass
class RoomRequest:
    """A decode rank's request for a room.

    A backend's `TransferInfo` has the engine's fields, among them `room`, `endpoint`, `dst_port`,
    `dst_kv_indices` and `dst_state_indices` (its pages and slots), `dst_aux_index` (its metadata
    row) and `required_dst_info_num` (decode ranks that request the room); and `name`, the rank's.
    """

    # Whether the rank was notified that the room concluded, or failed.
    is_notified: bool = field(default=False, kw_only=True)


def split_state(args: KVArgs) -> tuple[list[int], list[int]]:
    """Returns the target's state pointers, and the draft's, which stock peers do not have."""
    targets = sum(not buffer.draft for buffer in args.layout.state)
    return args.state_data_ptrs[:targets], args.state_data_ptrs[targets:]


class PeerTable:
    """Handles decode ranks' messages in a prefill rank's KV manager.

    A backend provides `_read_registration(frames)` and `_read_room(frames)`;
    `_check_registration(registration)`, which may reject one; `watch_peer(name, registration)` and
    `note_peer_alive(name, registration)` (see `peer_silence`); `_add_remote_peer(registration)`,
    which records the rank; and `_notify_failed(room, peers, reason)`.
    """

    # Whether the transfer plan covers state.
    sends_state_by_plan = True

    def make_packing(self, workers: int) -> None:
        """Sets aside memory to pack rows in; the transfer engine must register it.

        Args:
            workers: How many threads will send.
        """
        if self.disaggregation_mode == DisaggregationMode.PREFILL:
            self.kv_args.packing = make_packing_buffers(self.kv_args, workers)

    def rebind_server_socket(self) -> None:
        """Replaces the server socket by one that disconnects the sender of too large a message."""
        self.rank_port, self.server_socket = rebind_with_limits(self.server_socket)

    def read_bootstrap_messages(self) -> None:
        """Starts the thread that reads decode ranks' messages and drops unreadable ones."""
        handle, dropped = self._handle_bootstrap_message, self.transfer_log.malformed
        start_reader_thread(self.server_socket, handle, dropped)

    def _handle_bootstrap_message(self, frames: list[bytes]) -> None:
        if frames[0] == ABORT:
            self.handle_abort(*frames[1:5])
        elif frames[0] == b"None":
            self._register_decode(self._read_registration(frames))
        else:
            self._open_room(self._read_room(frames))

    def _register_decode(self, info: PeerRegistration) -> None:
        if not 0 < len(info.name) <= MAX_SESSION_NAME:
            raise LayoutError(
                f"decode rank name of {len(info.name)} characters, expected 1 to {MAX_SESSION_NAME}"
            )
        self._check_registration(info)
        self._plan_transfers(info)
        self._add_remote_peer(info)
        self.watch_peer(info.name, info)

    def _plan_transfers(self, info: PeerRegistration) -> None:
        """Sets the registration's `plan`, or its `refusal`."""
        args, (rank, size) = self.kv_args, info.attn_tp
        own = Pointers(args.kv_data_ptrs, args.state_data_ptrs)
        state = info.dst_state_data_ptrs if self.sends_state_by_plan else None
        facts = StockRegistration(
            tp_rank=rank % size,
            tp_size=size,
            kv_pointers=len(info.dst_kv_ptrs),
            state_pointers=None if state is None else len(state),
            page_bytes=info.dst_kv_item_len,
        )
        plan, refusal, can_retry = None, "", False
        try:
            layout = decode_layout(info.layout_frame)
            info.reads_reasons = layout is not None
            theirs = Pointers(info.dst_kv_ptrs, state)
            given = (own, layout, facts, theirs, args.packing is not None)
            plan = plan_registered(info.name, args.layout, *given)
        except LayoutError as error:
            refusal = str(error)
        except Exception as error:
            # Register the rank nevertheless: without an entry, its rooms would wait forever.
            logger.exception(f"No transfer plan for decode {info.name}")
            refusal, can_retry = f"prefill could not make a transfer plan: {error!r}", True
        if refusal:
            logger.error(f"Refusing decode {info.name}: {refusal}")
        # Only now: workers may be sending by this registration, and need a plan or a refusal.
        info.refusal = refusal or info.refusal
        info.plan, info.refusal, info.can_retry = plan, refusal, can_retry

    def _open_room(self, info: RoomRequest) -> None:
        refusal = self._registration_of(info).refusal
        failed = self._add_room_peer(info, refusal)
        if failed:
            self._notify_failed(info.room, {info.name: info}, failed)

    def _registration_of(self, info: RoomRequest) -> PeerRegistration:
        """Returns the registration of the decode rank that requests a room.

        Retries a registration that failed through no fault of the peer, first at once and then at
        most every `REGISTRATION_RETRY_SECONDS`: a retry may take seconds while other peers wait.

        Raises:
            LayoutError: The rank is not registered, or its request contains negative numbers.
        """
        who = f"decode {info.name} requested room {info.room}"
        known = self.decode_kv_args_table.get(info.name)
        if known is None:
            raise LayoutError(f"{who} and is not registered")
        numbers = (info.room, info.required_dst_info_num - 1, info.dst_aux_index or 0)
        slots = np.concatenate([info.dst_kv_indices, info.dst_state_indices])
        if min(numbers) < 0 or slots.min(initial=0) < 0:
            raise LayoutError(f"{who} with negative numbers")
        self.note_peer_alive(info.name, known)  # prevents the release of what the peer needs
        now = time.monotonic()
        if known.can_retry and now >= known.retry_at:
            known.retry_at = now + REGISTRATION_RETRY_SECONDS
            self._register_decode(known)
        return known

    def _add_room_peer(self, info: RoomRequest, refusal: str) -> str | None:
        """Adds a decode rank to the room it requests; returns why if the room has already failed.

        A rank that was notified of the failure and requests the room again has a new request.
        """
        with self.rooms_lock:
            failed = self.failed_rooms.get(info.room)
            if failed is not None and info.name not in failed.notified:
                failed.notified.add(info.name)
                return failed.reason
            self.failed_rooms.pop(info.room, None)
            self.aborted_before_request.pop(info.room, None)
            peers: dict[str, RoomRequest] = self.transfer_infos.setdefault(info.room, {})
            peers[info.name] = info
            if refusal:
                self.abort_room(info.room, refusal)
            elif len(peers) == info.required_dst_info_num:
                self.update_status(info.room, KVPoll.WaitingForInput)
            if len(self.transfer_infos) > MAX_OPEN_ROOMS:
                oldest = next(iter(self.transfer_infos))
                logger.error(f"{MAX_OPEN_ROOMS} rooms are open; dropping room {oldest}")
                del self.transfer_infos[oldest]
                self.drop_room(oldest)
        return None
