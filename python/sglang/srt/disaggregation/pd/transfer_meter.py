"""Counts what transfer engines are given, and tells `transfer_log` when it is written.

A manager that keeps a log puts one of these in front of its transfer engine. A seam says what it is
about to send (`Sending.note`); everything else passes through.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Dict, NamedTuple, Optional, Union
from weakref import WeakKeyDictionary

import numpy as np
from sglang.srt.disaggregation.kv_layout import PackedPlan, TransferPlan
from sglang.srt.disaggregation.transfer_log import TransferLog

# Handles that are numbers, as older releases of NIXL have them, and have not been seen to end.
MAX_HANDLES = 1 << 16


def path_of(plan: Optional[TransferPlan]) -> str:
    """Returns how a plan sends: `whole` pages, `slices`, `packed`; `engine` if there is no plan."""
    if plan is None:
        return "engine"
    if isinstance(plan, PackedPlan):
        return "packed"
    return "slices" if plan.is_sliced else "whole"


class About(NamedTuple):
    """What is being sent: of which room, `kv`, `state` or `aux`, and how."""

    room: int
    kind: str
    path: str


UNKNOWN = About(-1, "kv", "engine")


class Sending:
    """What is being sent to each decode rank: one chunk at a time, maybe by several threads."""

    def __init__(self):
        self._by_peer: Dict[str, About] = {}
        self._own = threading.local()

    def note(self, peer: str, room: int, kind: str, plan: Optional[TransferPlan] = None) -> None:
        """Notes what the caller's thread, or a helper of it, sends next.

        Args:
            peer: The decode rank.
            kind: `kv`, `state` or `aux`.
            plan: How it is sent; None if by the engine's own code.
        """
        path = "whole" if kind == "aux" else path_of(plan)
        self._own.about = self._by_peer[peer] = About(room, kind, path)

    def about(self, peer: str) -> About:
        """Returns what the caller's thread sends; for a helper, what is sent to this rank."""
        return getattr(self._own, "about", None) or self._by_peer.get(peer, UNKNOWN)


class MeteredEngine:
    """A synchronous transfer engine: Mooncake's or MemFabric's."""

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

    def batch_transfer_sync(self, session_id: str, buffers, peer_buffer_addresses, lengths) -> int:
        """Writes copies; returns the engine's status, 0 for success."""
        start = time.monotonic()
        status = self._engine.batch_transfer_sync(
            session_id, buffers, peer_buffer_addresses, lengths
        )
        if status == 0:
            self._note(session_id, sum(lengths), len(lengths), start)
        return status

    def transfer_sync(self, session_id: str, buffer: int, peer_buffer_address: int, length: int):
        """Writes one copy; returns the engine's status, 0 for success."""
        start = time.monotonic()
        status = self._engine.transfer_sync(session_id, buffer, peer_buffer_address, length)
        if status == 0:
            self._note(session_id, length, 1, start)
        return status

    def _note(self, session: str, size: int, copies: int, start: float) -> None:
        room, kind, path = self._sending.about(session)
        seconds = time.monotonic() - start
        self._log.wrote(room, self._server_of(session), kind, path, size, copies, seconds)


class _Listed(NamedTuple):
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
    about: About = UNKNOWN
    start: float = 0.0


class _Handles:
    """What is known of NIXL's handles; it keeps none alive, since NIXL ends what nobody holds."""

    def __init__(self):
        self._weak: WeakKeyDictionary = WeakKeyDictionary()
        self._numbers: OrderedDict[int, Any] = OrderedDict()

    def __setitem__(self, handle: Any, known: Any) -> None:
        if not isinstance(handle, int):
            self._weak[handle] = known
            return
        self._numbers[handle] = known
        if len(self._numbers) > MAX_HANDLES:
            self._numbers.popitem(last=False)

    def get(self, handle: Any) -> Any:
        return (self._numbers if isinstance(handle, int) else self._weak).get(handle)

    def pop(self, handle: Any) -> Any:
        return (self._numbers if isinstance(handle, int) else self._weak).pop(handle, None)


class MeteredAgent:
    """A NIXL agent. Prefill's meters what is sent; decode's notes each room's first byte."""

    def __init__(
        self, agent: Any, log: TransferLog, sending: Sending, server_of: Callable[[str], str]
    ):
        """Puts a meter in front of `agent`; see `MeteredEngine`."""
        self._agent, self._log, self._sending, self._server_of = agent, log, sending, server_of
        self._lists, self._transfers = _Handles(), _Handles()
        self._described = threading.local()  # the thread's last descriptors: bytes, and copies

    def __getattr__(self, name: str) -> Any:
        return getattr(self._agent, name)

    def get_xfer_descs(self, descs: Any, *more, **options) -> Any:
        """Describes one side's blocks."""
        lengths = _lengths(descs)
        if lengths is not None:
            size = lengths * len(descs) if isinstance(lengths, int) else int(lengths.sum())
            self._described.last = (lengths, size, len(descs))
        return self._agent.get_xfer_descs(descs, *more, **options)

    def prep_xfer_dlist(self, agent_name: str, xfer_list: Any, *more, **options) -> Any:
        """Prepares one side's blocks."""
        lengths = _lengths(xfer_list)
        if lengths is None:  # descriptors that were made just before
            lengths = getattr(self._described, "last", (0,))[0]
        handle = self._agent.prep_xfer_dlist(agent_name, xfer_list, *more, **options)
        if handle:
            self._lists[handle] = _Listed(agent_name, lengths)
        return handle

    def initialize_xfer(self, operation, local_descs, remote_descs, remote_agent, *more, **options):
        """Makes a transfer of described blocks."""
        given = (operation, local_descs, remote_descs, remote_agent)
        handle = self._agent.initialize_xfer(*given, *more, **options)
        if handle and operation == "WRITE":  # not a probe of a connection
            _, size, copies = getattr(self._described, "last", (0, 0, 0))
            self._transfers[handle] = _Transfer(remote_agent, size, copies)
        return handle

    def make_prepped_xfer(
        self, operation, local, indices, remote, remote_indices, *more, **options
    ):
        """Makes a transfer of prepared blocks."""
        given = (operation, local, indices, remote, remote_indices)
        handle = self._agent.make_prepped_xfer(*given, *more, **options)
        theirs = self._lists.get(remote)
        if handle and theirs is not None:
            size = theirs.size(remote_indices)
            self._transfers[handle] = _Transfer(theirs.peer, size, len(remote_indices))
        return handle

    def transfer(self, handle: Any, *more, **options) -> str:
        """Starts a transfer; returns its state."""
        known = self._transfers.get(handle)
        if known is not None:
            about = self._sending.about(known.peer)
            self._transfers[handle] = known._replace(about=about, start=time.monotonic())
        state = self._agent.transfer(handle, *more, **options)
        if state == "DONE":
            self._note_done(handle)
        return state

    def check_xfer_state(self, handle: Any) -> str:
        """Returns a transfer's state."""
        state = self._agent.check_xfer_state(handle)
        if state == "DONE":
            self._note_done(handle)
        return state

    def get_new_notifs(self, *more, **options) -> Any:
        """Returns what has arrived: by sender, messages that start with their room."""
        arrived = self._agent.get_new_notifs(*more, **options)
        for messages in arrived.values():
            for message in messages:
                room = bytes(message).partition(b"_")[0]
                if room.isdigit():
                    self._log.entered(int(room), "receiving")
        return arrived

    def _note_done(self, handle: Any) -> None:
        known: Optional[_Transfer] = self._transfers.pop(handle)
        if known is None or not known.start:
            return
        seconds = time.monotonic() - known.start
        server = self._server_of(known.peer)
        self._log.wrote(
            known.about.room,
            server,
            known.about.kind,
            known.about.path,
            known.size,
            known.copies,
            seconds,
        )


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
