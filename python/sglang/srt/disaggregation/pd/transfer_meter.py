"""Counts what transfer engines are given, and tells `transfer_log` when it is written.

A manager that keeps a log puts one of these in front of its transfer engine. A seam says what it is
about to send (`Sending.set`); everything else passes through.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Dict, NamedTuple, Optional, Union

import numpy as np
from sglang.srt.disaggregation.kv_layout import PackedPlan, TransferPlan
from sglang.srt.disaggregation.transfer_log import TransferLog

logger = logging.getLogger(__name__)

# Handles of NIXL, and decode ranks, that are remembered; a rank has fewer.
MAX_HANDLES, MAX_RANKS = 1 << 16, 1 << 12
# States in which a transfer of NIXL has ended.
DONE, FAILED = "DONE", "ERR"


def path_of(plan: Optional[TransferPlan]) -> str:
    """Returns how a plan sends: `whole` pages, `slices`, `packed`; `engine` if there is no plan."""
    if plan is None:
        return "engine"
    if isinstance(plan, PackedPlan):
        return "packed"
    return "slices" if plan.is_sliced else "whole"


class Payload(NamedTuple):
    """What is being sent: of which room, `kv`, `state` or `aux`, and how."""

    room: int
    kind: str
    path: str


UNKNOWN = Payload(-1, "kv", "engine")


class Sending:
    """What is being sent to each decode rank: one chunk at a time, maybe by several threads."""

    def __init__(self):
        self._by_peer: Dict[str, Payload] = {}
        self._own = threading.local()

    def set(self, peer: str, room: int, kind: str, plan: Optional[TransferPlan] = None) -> None:
        """Sets what the caller's thread, or a helper of it, sends next.

        Args:
            peer: The decode rank.
            kind: `kv`, `state` or `aux`.
            plan: How it is sent; None if by the engine's own code.
        """
        path = "whole" if kind == "aux" else path_of(plan)
        self._own.payload = self._by_peer[peer] = Payload(room, kind, path)
        if len(self._by_peer) > MAX_RANKS:  # one that has gone, or its next write sets it again
            self._by_peer.pop(list(self._by_peer)[0], None)

    def payload(self, peer: str) -> Payload:
        """Returns what the caller's thread sends; for a helper, what is sent to this rank."""
        return getattr(self._own, "payload", None) or self._by_peer.get(peer, UNKNOWN)


class Meter:
    """Base of what stands in front of a transfer engine; no error here may fail a transfer."""

    def __init__(
        self, engine: Any, log: TransferLog, sending: Sending, server_of: Callable[[str], str]
    ):
        """Puts a meter in front of `engine`.

        Args:
            server_of: Returns the decode server of a decode rank.
        """
        self._engine, self._log, self._sending, self._server_of = engine, log, sending, server_of

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def _quietly(self, note: Callable[..., None], *facts: Any) -> None:
        try:
            note(*facts)
        except Exception as error:
            # Without its text, which may differ each time: each one said would be kept.
            logger.warning_once(f"Metrics of KV transfers are incomplete: {type(error).__name__}")
            logger.debug("Metrics of KV transfers are incomplete", exc_info=True)

    def _note_start(self, payload: Payload) -> None:
        self._log.entered(payload.room, "sending")

    def _note_end(
        self, peer: str, payload: Payload, size: int, copies: int, seconds: Optional[float]
    ) -> None:
        room, *how = payload
        self._log.sent(room, self._server_of(peer), *how, size, copies, seconds)


class MeteredEngine(Meter):
    """A synchronous transfer engine: Mooncake's or MemFabric's."""

    def batch_transfer_sync(self, session_id: str, buffers, peer_buffer_addresses, lengths) -> int:
        """Writes copies; returns the engine's status, 0 for success."""
        start = self._start_write(session_id)
        status = self._engine.batch_transfer_sync(
            session_id, buffers, peer_buffer_addresses, lengths
        )
        self._quietly(self._note_copies, session_id, lengths, start, status)
        return status

    def transfer_sync(self, session_id: str, buffer: int, peer_buffer_address: int, length: int):
        """Writes one copy; returns the engine's status, 0 for success."""
        start = self._start_write(session_id)
        status = self._engine.transfer_sync(session_id, buffer, peer_buffer_address, length)
        self._quietly(self._note_copies, session_id, [length], start, status)
        return status

    def _start_write(self, session: str) -> float:
        """Notes that a write begins, which may hang; returns when."""
        self._quietly(lambda: self._note_start(self._sending.payload(session)))
        return time.monotonic()

    def _note_copies(self, session: str, lengths: Sequence[int], start: float, status: int) -> None:
        seconds = time.monotonic() - start if status == 0 else None
        payload = self._sending.payload(session)
        self._note_end(session, payload, sum(lengths), len(lengths), seconds)


class _Blocks(NamedTuple):
    """Blocks that NIXL has prepared: the decode rank's if `peer` is not empty."""

    peer: str
    lengths: Union[int, np.ndarray]

    def size(self, indices: Any) -> int:
        """Returns the bytes of these blocks."""
        if isinstance(self.lengths, int):
            return self.lengths * len(indices)
        return int(self.lengths[np.asarray(indices)].sum())


class _Transfer(NamedTuple):
    peer: str
    size: int
    copies: int
    payload: Payload = UNKNOWN
    start: float = 0.0


class _Handles:
    """What is known of NIXL's handles; keeps none alive, since NIXL ends what nobody holds.

    They cannot be referred to weakly. A new one may have the number of an earlier one, which is to
    be forgotten first, whatever becomes known of the new one.
    """

    def __init__(self):
        self._known: OrderedDict[int, Any] = OrderedDict()
        self._lock = threading.Lock()

    def put(self, handle: Any, known: Any) -> None:
        with self._lock:
            self._known[self._number(handle)] = known
            if len(self._known) > MAX_HANDLES:
                self._known.popitem(last=False)

    def get(self, handle: Any) -> Any:
        return self._known.get(self._number(handle))

    def pop(self, handle: Any) -> Any:
        with self._lock:
            return self._known.pop(self._number(handle), None)

    @staticmethod
    def _number(handle: Any) -> int:
        return handle if isinstance(handle, int) else id(handle)


class MeteredAgent(Meter):
    """A NIXL agent. Prefill's meters what is sent; decode's notes each room's first byte."""

    def __init__(self, *what):
        super().__init__(*what)
        self._lists, self._transfers = _Handles(), _Handles()
        # The thread's last descriptors: their lengths, bytes in all, and how many.
        self._described = threading.local()

    def get_xfer_descs(self, descs: Any, *more, **options) -> Any:
        """Describes one side's blocks."""
        self._quietly(self._note_descriptors, descs)
        return self._engine.get_xfer_descs(descs, *more, **options)

    def prep_xfer_dlist(self, agent_name: str, xfer_list: Any, *more, **options) -> Any:
        """Prepares one side's blocks."""
        handle = self._engine.prep_xfer_dlist(agent_name, xfer_list, *more, **options)
        self._quietly(self._lists.pop, handle)
        self._quietly(self._note_list, handle, agent_name, xfer_list)
        return handle

    def initialize_xfer(self, operation, local_descs, remote_descs, remote_agent, *more, **options):
        """Makes a transfer of described blocks."""
        given = (operation, local_descs, remote_descs, remote_agent)
        handle = self._engine.initialize_xfer(*given, *more, **options)
        self._quietly(self._transfers.pop, handle)
        if operation == "WRITE" and handle:  # else it probes a connection
            self._quietly(self._note_described, handle, remote_agent)
        return handle

    def make_prepped_xfer(
        self, operation, ours, own_indices, remote, remote_indices, *more, **options
    ):
        """Makes a transfer of prepared blocks."""
        given = (operation, ours, own_indices, remote, remote_indices)
        handle = self._engine.make_prepped_xfer(*given, *more, **options)
        self._quietly(self._transfers.pop, handle)
        if handle:
            self._quietly(self._note_prepared, handle, remote, remote_indices)
        return handle

    def transfer(self, handle: Any, *more, **options) -> str:
        """Starts a transfer; returns its state."""
        self._quietly(self._note_transfer, handle)
        state = self._engine.transfer(handle, *more, **options)
        self._quietly(self._note_state, handle, state)
        return state

    def check_xfer_state(self, handle: Any) -> str:
        """Returns a transfer's state."""
        state = self._engine.check_xfer_state(handle)
        self._quietly(self._note_state, handle, state)
        return state

    def release_xfer_handle(self, handle: Any, *more, **options) -> Any:
        """Releases a transfer, which NIXL cancels if it has not ended."""
        released = self._engine.release_xfer_handle(handle, *more, **options)
        self._quietly(self._note_state, handle, FAILED)
        return released

    def get_new_notifs(self, *more, **options) -> Any:
        """Returns what has arrived: by sender, messages that start with their room."""
        arrived = self._engine.get_new_notifs(*more, **options)
        self._quietly(self._note_arrived, arrived)
        return arrived

    def _note_descriptors(self, descs: Any) -> None:
        lengths = _lengths(descs)
        if lengths is not None:
            size = lengths * len(descs) if isinstance(lengths, int) else int(lengths.sum())
            self._described.last = (lengths, size, len(descs))

    def _note_list(self, handle: Any, peer: str, blocks: Any) -> None:
        lengths = _lengths(blocks)
        if lengths is None:  # descriptors that were made just before
            lengths = self._described.last[0]
        self._lists.put(handle, _Blocks(peer, lengths))

    def _note_described(self, handle: Any, peer: str) -> None:
        _, size, copies = self._described.last
        self._transfers.put(handle, _Transfer(peer, size, copies))

    def _note_prepared(self, handle: Any, remote: Any, indices: Any) -> None:
        theirs = self._lists.get(remote)
        self._transfers.put(handle, _Transfer(theirs.peer, theirs.size(indices), len(indices)))

    def _note_transfer(self, handle: Any) -> None:
        known: Optional[_Transfer] = self._transfers.get(handle)
        if known is not None:
            payload = self._sending.payload(known.peer)
            self._transfers.put(handle, known._replace(payload=payload, start=time.monotonic()))
            self._note_start(payload)

    def _note_state(self, handle: Any, state: str) -> None:
        if state not in (DONE, FAILED):
            return
        known: Optional[_Transfer] = self._transfers.pop(handle)
        if known is not None and known.start:
            seconds = time.monotonic() - known.start if state == DONE else None
            self._note_end(known.peer, known.payload, known.size, known.copies, seconds)

    def _note_arrived(self, arrived: Any) -> None:
        for messages in arrived.values():
            for message in messages:
                room = bytes(message).partition(b"_")[0]
                if room.isdigit():
                    self._log.entered(int(room), "receiving")


def _lengths(descs: Any) -> Union[int, np.ndarray, None]:
    """Returns the bytes of each block, one number if all are equal; None for NIXL's own lists.

    Args:
        descs: `[blocks, 3]`: address, bytes, device; or `[runs, 5]`: also stride, and how many.
    """
    if not isinstance(descs, (np.ndarray, list)):
        return None
    try:
        table = np.asarray(descs)
        if not len(table):
            return 0
        lengths = table[:, 1].astype(np.int64)
        if (lengths == lengths[0]).all():
            return int(lengths[0])
        return np.repeat(lengths, table[:, 4].astype(np.int64)) if table.shape[1] == 5 else lengths
    except (IndexError, TypeError, ValueError):  # for NIXL to judge
        return None
