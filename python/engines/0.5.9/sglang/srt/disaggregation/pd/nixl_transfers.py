"""Writes of a NIXL agent, over a new connection where one was lost, and a request that waits."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, List, Optional, Set, Tuple
from weakref import WeakSet

import numpy as np
import numpy.typing as npt
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.kv_layout import parse_notification
from sglang.srt.disaggregation.pd.peer_sockets import LOST_SECONDS, PeerSocket
from sglang.srt.disaggregation.pd.sender import ABORTED

logger = logging.getLogger(__name__)

# A write whose state cannot be read, and which NIXL does not give up, is over after that.
UNREADABLE_SECONDS = 30.0
# Of no request.
NO_CHUNK = 1 << 31
# Failed rooms of which decode ranks could not be told yet.
MAX_PENDING_NOTICES = 4096
# In NIXL's errors: the connection to a peer is lost, or could not be made anew. The second is said
# of other mistakes, too; a connection that was good is then replaced, which does no harm.
CONNECTION_LOST = ("NIXL_ERR_REMOTE_DISCONNECT", "NIXL_ERR_NOT_FOUND")


def _is_lost(error: Exception) -> bool:
    return any(name in str(error) for name in CONNECTION_LOST)


class RoomFailed(Exception):
    """Nothing more is written for it."""


@dataclass(frozen=True)
class Chunk:
    """Some pages of one request, computed.

    The last chunk brings the row of the metadata, and state slots or pages if the model has any.

    Attributes:
        kv_indices: Pages of this rank's pool, int32, `[pages]`.
        index_slice: Their place among all pages of the request.
        chunk_id: Counted from 0.
    """

    kv_indices: npt.NDArray[np.int32]
    index_slice: slice
    is_last: bool
    chunk_id: int
    aux_index: Optional[int] = None
    state_indices: Optional[List[int]] = None


@dataclass(eq=False)
class Transfer:
    """One transfer to a decode rank.

    Attributes:
        end: Set when nothing is written any more: empty, or why it failed.
        left: Why nobody here waits for its end: the decode rank is silent, or it was rejected.
        is_partly_posted: NIXL did not start it, or not all of it.
        is_invalidated: Decode will not take its room for done.
        unreadable_since: When its state could not be read first, on the monotonic clock.
    """

    room: int
    peer: str
    handle: object
    outcome: Optional[str] = None
    abandon_reason: str = ""
    unreadable_since: Optional[float] = None
    is_invalidated: bool = False
    is_partly_posted: bool = False


class NixlTransfers:
    """A KV manager's, over `SilenceWatch`.

    It has the `agent`, in `decode_kv_args_table` its peers' metadata, `_notify_failed`, and in
    `connecting` the peers that are being read; `_notification` makes one.
    """

    def __new__(cls, *args, **kwargs):
        self = super().__new__(cls)
        # The scheduler and the bootstrap thread use the agent in turn: NIXL before 1.2 has no locks
        # of its own, and a connection must not be made anew that a write begins to use.
        self.agent_lock = threading.RLock()
        self.unreachable_peers: Set[str] = set()
        # Those under way. A sender that is collected takes its writes along; NIXL cancels them.
        self.transfers: WeakSet[Transfer] = WeakSet()
        # Those that nobody waits for, and who is told of their rooms when they have ended.
        self.abandoned_transfers: List[Transfer] = []
        self.pending_notices: List[Tuple[int, str, Any, str]] = []
        return self

    def _start(self, peer: str, src, dst, notif: bytes) -> Transfer:
        room = parse_notification(notif).room

        def start() -> Transfer:
            if self.check_status(room) == KVPoll.Failed:
                raise RoomFailed
            handle = self.agent.initialize_xfer("WRITE", src, dst, peer, notif)
            write, note = Transfer(room, peer, handle), notif.decode("ascii")
            try:
                if not handle or self.agent.transfer(handle) == "ERR":
                    raise RuntimeError(f"NIXL did not start the transfer {note} to {peer}")
            except Exception as error:
                if handle and not _is_lost(error):  # over a lost one nothing arrives
                    write.abandon_reason, write.is_partly_posted = str(error), True
                    self.abandoned_transfers.append(write)
                    self.transfers.add(write)
                raise
            self.transfers.add(write)
            return write

        return self._with_reconnect(peer, start)

    def _notify(self, peer: str, notif: bytes) -> None:
        self._with_reconnect(peer, lambda: self.agent.send_notif(peer, notif))

    def _with_reconnect(self, peer: str, act: Callable):
        """Do it; once more over a new connection if NIXL has lost the one to this peer.

        NIXL itself makes none: without that a live peer would be out of reach for ever.
        """
        with self.agent_lock:
            try:
                return act()
            except Exception as error:
                if not _is_lost(error) or not self._reconnect(peer):
                    raise
                return act()

    def _reconnect(self, peer: str) -> bool:
        """Whether there is a new connection; not while a write over the old one is under way.

        The scheduler calls this, so that nothing here waits for the rank. UCX keeps a socket for
        each connection refused: a rank to which there has been no connection for a moment is tried
        once, for longer not at all, until it asks for another room.
        """
        of_peer = [write for write in self.transfers if write.peer == peer]
        under_way = [write for write in of_peer if not write.is_partly_posted]
        if peer in self.unreachable_peers or peer in self.connecting:
            return False
        if not all(map(self.has_finished, under_way)):
            return False
        info = self.decode_kv_args_table[peer]
        try:
            with contextlib.suppress(Exception):  # NIXL may not know it any more
                self.agent.remove_remote_agent(peer)
            messages = PeerSocket.to(info.endpoint, info.dst_port)
            # The first is up to date; the second counts a rank that was never connected, too.
            seconds = max(messages.lost_for(), messages.silent_for())
            if seconds > LOST_SECONDS:
                place = f"{info.endpoint}:{info.dst_port}"
                raise ConnectionError(f"messages to {place} have no connection for {seconds:.1f} s")
            if seconds:
                self.unreachable_peers.add(peer)
            self.agent.add_remote_agent(info.agent_metadata)
        except Exception as error:
            logger.warning(f"Decode {peer} takes no new connection: {error}")
            self.unreachable_peers.add(peer)
            return False
        logger.info(f"Connected to decode {peer} again")
        return True

    def has_finished(self, write: Transfer) -> bool:
        """Whether nothing is written any more; `write.end` says how it ended."""
        with self.agent_lock:
            if write.outcome is not None:
                return True
            if write.abandon_reason and not write.is_invalidated:
                self._invalidate(write)
            try:
                if write.is_partly_posted:
                    raise RuntimeError(write.abandon_reason)
                state = self.agent.check_xfer_state(write.handle)
                reason = "NIXL reports an error"
            except Exception as error:
                state, reason = self._state_if_unreadable(write), str(error)
            if state not in ("DONE", "ERR"):
                return False
            write.outcome, write.handle = reason if state == "ERR" else "", None
            self.transfers.discard(write)
            return True

    def _invalidate(self, write: Transfer) -> None:
        """Have decode never take the room for done: nobody keeps the pages that are sent.

        NIXL tells decode that a write is done when its state is asked; a chunk too many has all
        releases wait for the word that the room failed.
        """
        notification = self._notification(write.room, "kv", chunk=NO_CHUNK)
        with contextlib.suppress(Exception):  # over this connection no other word arrives either
            self.agent.send_notif(write.peer, notification)
            write.is_invalidated = True

    def _state_if_unreadable(self, write: Transfer) -> str:
        """Of a write whose state cannot be read: over if NIXL gives it up, or long ago."""
        now = time.monotonic()
        write.unreadable_since = write.unreadable_since or now
        with contextlib.suppress(Exception):
            if (
                not write.is_partly_posted
            ):  # some of it may be posted, which NIXL does not take back
                self.agent.release_xfer_handle(write.handle)
                return "ERR"
        return "PROC" if now - write.unreadable_since < UNREADABLE_SECONDS else "ERR"

    def is_settled(self, write: Transfer) -> bool:
        """Whether its sender need not wait: it has ended, or its decode rank is silent."""
        with self.agent_lock:
            if write.abandon_reason or self.has_finished(write):
                return True
            write.abandon_reason = self.silent_peers.get(write.peer, "")
            if write.abandon_reason:
                self.abandoned_transfers.append(write)
            return bool(write.abandon_reason)

    def check_peers(self) -> None:
        """As `SilenceWatch`; of writes that nobody waited for, decode is told once they end."""
        super().check_peers()
        if not (self.abandoned_transfers or self.pending_notices):
            return  # NIXL may hold the lock for long, while it meets a decode rank
        with self.agent_lock:
            self.abandoned_transfers = [
                one for one in self.abandoned_transfers if not self.has_finished(one)
            ]
            waiting, self.pending_notices = self.pending_notices, []
        for room, peer, info, reason in waiting:
            if peer in self.silent_peers or peer in self.unreachable_peers:
                self.notify_later(room, peer, info, reason)
            else:
                self._notify_failed(room, {peer: info}, reason)

    def defers_notice(self, room: int, peer: str, info: Any, reason: str) -> bool:
        """Whether a write may go on, that nobody waits for or another request of that number does.

        Decode must keep the room's pages; then `check_peers` tells it that the room failed.
        """
        with self.agent_lock:
            of_room = [one for one in self.transfers if (one.room, one.peer) == (room, peer)]
            is_written_to = not all(map(self.has_finished, of_room))
            if is_written_to:
                self.notify_later(room, peer, info, reason)
            return is_written_to

    def notify_later(self, room: int, peer: str, info: Any, reason: str) -> None:
        """Have `check_peers` tell a decode rank that the room failed."""
        with self.agent_lock:
            self.pending_notices.append((room, peer, info, reason))
            del self.pending_notices[:-MAX_PENDING_NOTICES]

    def drop_pending_notices(self, peer: str, room: Optional[int] = None) -> None:
        """Of this room, or of all, a decode rank need not hear any more that they failed."""
        with self.agent_lock:
            self.pending_notices = [
                one for one in self.pending_notices if one[1] != peer or room not in (None, one[0])
            ]

    def handle_peer_recovered(self, name: str) -> None:
        """A decode rank lives: it may take a new connection."""
        with self.agent_lock:
            self.unreachable_peers.discard(name)

    def conclude_failure(self, room: int, reason: str) -> None:
        """Tell the room's decode ranks that it failed; its sender will, if it is being written."""
        with self.agent_lock:
            of_room = [write for write in self.transfers if write.room == room]
            if all(map(self.has_finished, of_room)):
                self._notify_failed(room, self.transfer_infos.get(room, {}), reason)
        if room not in self.request_status:  # its request has not come
            self.transfer_infos.pop(room, None)


class TransferSender:
    """A KV sender whose writes are `xfer_handles`; `has_sent` when the last one is begun."""

    xfer_handles: List[Transfer]

    def poll(self) -> KVPoll:
        """The room's state; this rank tells success or failure when its last write has ended."""
        if self.conclude_state is not None:
            return self.conclude_state
        self._drop_finished_transfers()
        self._check_timeout()
        status = self.kv_mgr.check_status(self.bootstrap_room)
        if status != KVPoll.Failed and not self.has_sent:
            return status
        if self.xfer_handles:
            return KVPoll.Transferring
        self.conclude_state = KVPoll.Failed if status == KVPoll.Failed else KVPoll.Success
        return self.conclude_state

    def _check_timeout(self) -> None:
        """Fail a room that decode does not ask for: maybe it was never sent the request."""
        manager, room = self.kv_mgr, self.bootstrap_room
        waited = time.monotonic() - self.started_at
        is_waiting = manager.check_status(room) == KVPoll.Bootstrapping
        if is_waiting and waited >= manager.bootstrap_timeout:
            manager.fail(
                room,
                f"Decode did not ask for this request within {waited:.0f} s; "
                "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT sets the limit",
            )

    def _drop_finished_transfers(self) -> None:
        """Forget the writes that are done; one that failed fails the room."""
        over = [write for write in self.xfer_handles if self.kv_mgr.is_settled(write)]
        for write in over:
            self.xfer_handles.remove(write)
            if write.outcome or write.abandon_reason:
                reason = (
                    f"Prefill's write to decode failed: {write.outcome or write.abandon_reason}"
                )
                self.kv_mgr.fail(self.bootstrap_room, reason)

    def has_pending_transfers(self) -> bool:
        """Whether our pages may be read."""
        return bool(self.xfer_handles)

    def abort(self):
        """The client is gone."""
        if self.conclude_state is None:
            self.kv_mgr.fail(self.bootstrap_room, ABORTED)
