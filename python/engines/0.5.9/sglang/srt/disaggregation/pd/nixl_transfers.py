"""A NIXL agent's transfers, which reconnect after a lost connection, and their sender."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, List, Optional, Set, Tuple
from weakref import WeakSet

from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.pd.peer_sockets import LOST_SECONDS, PeerSocket
from sglang.srt.disaggregation.pd.per_instance import PerInstance
from sglang.srt.disaggregation.pd.sender import ABORTED

logger = logging.getLogger(__name__)

# After this long, a transfer counts as finished if NIXL can neither read its state nor release it.
UNREADABLE_SECONDS = 30.0
# A chunk number that no request has.
NO_CHUNK = 1 << 31
# Failure notices that wait to be sent.
MAX_PENDING_NOTICES = 4096
# NIXL's errors for a lost connection, and for one that could not be made again. NIXL also reports
# the second for other mistakes; replacing a good connection then does no harm.
CONNECTION_LOST = ("NIXL_ERR_REMOTE_DISCONNECT", "NIXL_ERR_NOT_FOUND")


def _is_lost(error: Exception) -> bool:
    return any(name in str(error) for name in CONNECTION_LOST)


class RoomFailed(Exception):
    """The room has failed; nothing more is written for it."""


@dataclass(eq=False)
class Transfer:
    """One transfer to a decode rank.

    Attributes:
        outcome: None while it may write; then why it failed, empty if it succeeded.
        abandon_reason: Why no sender waits for it: the decode rank is silent, or NIXL rejected it.
        unreadable_since: When reading its state first failed, on the monotonic clock.
        is_invalidated: Decode cannot conclude the room as a success any more.
        is_partly_posted: NIXL failed to start it, but may have posted a part.
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
    """Starts and tracks a KV manager's transfers; placed before `SilenceWatch`.

    The manager has the `agent`, its peers' metadata in `decode_kv_args_table`, `_notify_failed`,
    `_notification`, which formats one, and in `connecting` the peers it is connecting to.
    """

    # The scheduler and the bootstrap thread take turns with the agent: NIXL before 1.2 has no
    # locks of its own, and a connection must not be replaced while a write starts to use it.
    agent_lock = PerInstance(threading.RLock)
    unreachable_peers: Set[str] = PerInstance(set)
    # Transfers under way. Those of a garbage-collected sender go with it; NIXL cancels them.
    transfers: WeakSet[Transfer] = PerInstance(WeakSet)
    # Transfers that no sender waits for, and failure notices to send once transfers finish.
    abandoned_transfers: List[Transfer] = PerInstance(list)
    pending_notices: List[Tuple[int, str, Any, str]] = PerInstance(list)

    def _start(self, peer: str, room: int, src, dst, notification: bytes) -> Transfer:
        """Starts a write of NIXL's descriptors, which notifies the peer when it is done.

        Raises:
            RoomFailed: The room has failed.
        """

        def start() -> Transfer:
            if self.check_status(room) == KVPoll.Failed:
                raise RoomFailed
            handle = self.agent.initialize_xfer("WRITE", src, dst, peer, notification)
            write = Transfer(room, peer, handle)
            try:
                if not handle or self.agent.transfer(handle) == "ERR":
                    note = notification.decode("ascii")
                    raise RuntimeError(f"NIXL did not start the transfer {note} to {peer}")
            except Exception as error:
                if handle and not _is_lost(error):  # a lost connection delivers nothing
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
        """Calls `act`, and once more over a new connection if NIXL has lost the one to this peer.

        NIXL does not reconnect by itself: without this, a live peer would stay unreachable.
        """
        with self.agent_lock:
            try:
                return act()
            except Exception as error:
                if not _is_lost(error) or not self._reconnect(peer):
                    raise
                return act()

    def _reconnect(self, peer: str) -> bool:
        """Makes a new connection, unless a write over the old one is under way; returns success.

        The scheduler calls this, so nothing here waits for the peer. UCX keeps a socket for each
        refused connection: a peer that has been disconnected briefly gets one attempt, a peer
        disconnected for longer gets none, until it requests another room.
        """
        of_peer = [write for write in self.transfers if write.peer == peer]
        under_way = [write for write in of_peer if not write.is_partly_posted]
        if peer in self.unreachable_peers or peer in self.connecting:
            return False
        if not all(map(self.has_finished, under_way)):
            return False
        info = self.decode_kv_args_table[peer]
        try:
            with contextlib.suppress(Exception):  # NIXL may have dropped it already
                self.agent.remove_remote_agent(peer)
            messages = PeerSocket.to(info.endpoint, info.dst_port)
            # `lost_for` is up to date; `silent_for` also counts a rank that was never connected.
            seconds = max(messages.lost_for(), messages.silent_for())
            if seconds > LOST_SECONDS:
                place = f"{info.endpoint}:{info.dst_port}"
                raise ConnectionError(f"no connection for messages to {place} for {seconds:.1f} s")
            if seconds:
                self.unreachable_peers.add(peer)
            self.agent.add_remote_agent(info.agent_metadata)
        except Exception as error:
            logger.warning(f"Could not reconnect to decode {peer}: {error}")
            self.unreachable_peers.add(peer)
            return False
        logger.info(f"Reconnected to decode {peer}")
        return True

    def has_finished(self, write: Transfer) -> bool:
        """Whether the transfer writes no more; `write.outcome` then has its result."""
        with self.agent_lock:
            if write.outcome is not None:
                return True
            if write.abandon_reason and not write.is_invalidated:
                self._invalidate(write)
            try:
                if write.is_partly_posted:
                    raise RuntimeError(write.abandon_reason)
                state = self.agent.check_xfer_state(write.handle)
                reason = "NIXL reported an error"
            except Exception as error:
                state, reason = self._state_if_unreadable(write), str(error)
            if state not in ("DONE", "ERR"):
                return False
            write.outcome, write.handle = reason if state == "ERR" else "", None
            self.transfers.discard(write)
            return True

    def _invalidate(self, write: Transfer) -> None:
        """Keeps decode from concluding the room as a success: its source pages are unprotected.

        NIXL notifies decode of a finished write when its state is checked; an extra chunk makes
        decode, of any release, wait for the notification that the room failed.
        """
        notification = self._notification(write.room, "kv", chunk=NO_CHUNK)
        with contextlib.suppress(Exception):  # this connection then delivers no notification
            self.agent.send_notif(write.peer, notification)
            write.is_invalidated = True

    def _state_if_unreadable(self, write: Transfer) -> str:
        """Returns "ERR" if NIXL releases the write, or after `UNREADABLE_SECONDS`; else "PROC"."""
        now = time.monotonic()
        write.unreadable_since = write.unreadable_since or now
        with contextlib.suppress(Exception):
            if not write.is_partly_posted:  # NIXL cannot revoke what it has posted
                self.agent.release_xfer_handle(write.handle)
                return "ERR"
        return "PROC" if now - write.unreadable_since < UNREADABLE_SECONDS else "ERR"

    def is_settled(self, write: Transfer) -> bool:
        """Whether its sender need not wait: it has finished, or its decode rank is silent."""
        with self.agent_lock:
            if write.abandon_reason or self.has_finished(write):
                return True
            write.abandon_reason = self.silent_peers.get(write.peer, "")
            if write.abandon_reason:
                self.abandoned_transfers.append(write)
            return bool(write.abandon_reason)

    def check_peers(self) -> None:
        """Checks for silent peers. Extends `SilenceWatch`'s: sends pending failure notices."""
        super().check_peers()
        if not (self.abandoned_transfers or self.pending_notices):
            return  # NIXL may hold the lock for long while it adds a decode rank
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
        """Defers a room's failure notice while a write may go on; returns whether it does.

        The write is abandoned, or belongs to another request with this room. Decode must keep the
        room's pages until `check_peers` notifies it of the failure.
        """
        with self.agent_lock:
            of_room = [one for one in self.transfers if (one.room, one.peer) == (room, peer)]
            is_written_to = not all(map(self.has_finished, of_room))
            if is_written_to:
                self.notify_later(room, peer, info, reason)
            return is_written_to

    def notify_later(self, room: int, peer: str, info: Any, reason: str) -> None:
        """Queues a failure notice to a decode rank, which `check_peers` sends."""
        with self.agent_lock:
            self.pending_notices.append((room, peer, info, reason))
            del self.pending_notices[:-MAX_PENDING_NOTICES]

    def drop_pending_notices(self, peer: str, room: Optional[int] = None) -> None:
        """Drops a decode rank's failure notices for this room, or for all rooms if None."""
        with self.agent_lock:
            self.pending_notices = [
                one for one in self.pending_notices if one[1] != peer or room not in (None, one[0])
            ]

    def handle_peer_recovered(self, name: str) -> None:
        """Allows a new connection to a decode rank that is alive."""
        with self.agent_lock:
            self.unreachable_peers.discard(name)

    def conclude_failure(self, room: int, reason: str) -> None:
        """Notifies the room's decode ranks of its failure; while writes run, its sender will."""
        with self.agent_lock:
            of_room = [write for write in self.transfers if write.room == room]
            if all(map(self.has_finished, of_room)):
                self._notify_failed(room, self.transfer_infos.get(room, {}), reason)
        if room not in self.request_status:  # its request has not arrived
            self.transfer_infos.pop(room, None)


class TransferSender:
    """A KV sender with its transfers in `xfer_handles`; `has_sent` once the last one has begun."""

    xfer_handles: List[Transfer]

    def poll(self) -> KVPoll:
        """Returns the room's status; it concludes once this rank's last transfer has finished."""
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
        """Fails a room that decode does not request in time; decode may lack the request."""
        manager, room = self.kv_mgr, self.bootstrap_room
        waited = time.monotonic() - self.started_at
        is_waiting = manager.check_status(room) == KVPoll.Bootstrapping
        if is_waiting and waited >= manager.bootstrap_timeout:
            manager.fail(
                room,
                f"Decode did not request this room within {waited:.0f} s; "
                "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT sets the limit",
            )

    def _drop_finished_transfers(self) -> None:
        """Drops settled transfers; one that failed or was abandoned fails the room."""
        over = [write for write in self.xfer_handles if self.kv_mgr.is_settled(write)]
        for write in over:
            self.xfer_handles.remove(write)
            if write.outcome or write.abandon_reason:
                reason = (
                    f"Prefill's write to decode failed: {write.outcome or write.abandon_reason}"
                )
                self.kv_mgr.fail(self.bootstrap_room, reason)

    def has_pending_transfers(self) -> bool:
        """Whether a transfer may still read our pages."""
        return bool(self.xfer_handles)

    def abort(self):
        """Fails the room, because its client has left."""
        if self.conclude_state is None:
            self.kv_mgr.fail(self.bootstrap_room, ABORTED)
