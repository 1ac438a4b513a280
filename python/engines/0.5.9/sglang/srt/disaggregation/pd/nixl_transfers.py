"""What a NIXL agent sends: transfers, and notices of failed rooms, over connections that may break.

A write brings a notification when it is done; a failed room has a notification of its own, which
waits until no write of the room to that decode rank is under way. `kv_layout.transfer_status` has
the format.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar
from weakref import WeakSet

from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.kv_layout import Notification, format_notification
from sglang.srt.disaggregation.pd.peer_sockets import LOST_SECONDS, PeerSocket
from sglang.srt.disaggregation.pd.peers import RoomRequest
from sglang.srt.disaggregation.pd.per_instance import PerInstance
from sglang.srt.disaggregation.pd.room_failures import FAILED_ELSEWHERE

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

Result = TypeVar("Result")


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
    outcome: str | None = None
    abandon_reason: str = ""
    unreadable_since: float | None = None
    is_invalidated: bool = False
    is_partly_posted: bool = False


class NixlTransfers:
    """Starts and tracks a prefill rank's transfers, and sends its notices of failed rooms.

    A base of its KV manager, before `SilenceWatch`. The manager has the `agent`, decode ranks'
    metadata in `decode_kv_args_table`, and `end_early_connection`, which says whether NIXL may
    remove a rank.
    """

    # The scheduler, the bootstrap thread and those that pack take turns with the agent: NIXL before
    # 1.2 has no locks, and a connection must not be replaced while a write starts to use it.
    agent_lock = PerInstance(threading.RLock)
    # Decode ranks that get no new connection until they request another room; see `_reconnect`.
    unreachable_peers: set[str] = PerInstance(set)
    # Transfers under way. Those of a garbage-collected sender go with it, and NIXL cancels
    # them; a packed one is kept until its thread has finished with it.
    transfers: WeakSet[Transfer] = PerInstance(WeakSet)
    # Transfers that no sender waits for, and failure notices to send once transfers finish: room,
    # decode rank, the rank's request for the room, reason.
    abandoned_transfers: list[Transfer] = PerInstance(list)
    pending_notices: list[tuple[int, str, RoomRequest, str]] = PerInstance(list)

    def _start(
        self, peer: str, room: int, src: object, dst: object, notification: bytes
    ) -> Transfer:
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

    def _notification(self, room: int, kind: str, **more) -> bytes:
        """Formats a notification from this prefill rank; `more` are a `Notification`'s fields."""
        return format_notification(Notification(room, kind, **more), self.sender_rank)

    def _notify(self, peer: str, notification: bytes) -> None:
        self._with_reconnect(peer, lambda: self.agent.send_notif(peer, notification))

    def _with_reconnect(self, peer: str, act: Callable[[], Result]) -> Result:
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

        The scheduler calls this, too, so nothing here waits for the peer. UCX keeps a socket for
        each refused connection, and may abort this process: only a peer whose process listens gets
        an attempt. A peer that has been disconnected briefly gets one attempt, a peer disconnected
        for longer gets none, until it requests another room.
        """
        if peer in self.unreachable_peers or not self.end_early_connection(peer):
            return False
        info = self.decode_kv_args_table.get(peer)
        if info is None:  # it was dropped, and must register again
            return False
        # A packed transfer has no handle: each of its rounds is a write of its own.
        of_peer = [write for write in self.transfers if write.peer == peer and write.handle]
        if not all(self.has_finished(write) for write in of_peer if not write.is_partly_posted):
            return False
        try:
            with contextlib.suppress(Exception):  # NIXL may have dropped it already
                self.agent.remove_remote_agent(peer)
            messages = PeerSocket.to(info.endpoint, info.dst_port)
            # `lost_for` is up to date; `silent_for` also counts a rank that was never connected.
            seconds = max(messages.lost_for(), messages.silent_for())
            place = f"{info.endpoint}:{info.dst_port}"
            if seconds > LOST_SECONDS:
                raise ConnectionError(f"no connection for messages to {place} for {seconds:.1f} s")
            if not messages.is_listening():
                raise ConnectionError(f"no process listens at {place}")
            if seconds:
                self.unreachable_peers.add(peer)
            self.agent.add_remote_agent(info.agent_metadata)
            info.is_connected, info.can_retry = True, False
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
            if write.handle is None and not write.is_partly_posted:
                return False  # a thread sends it round by round (`packed_sends`)
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
            reason = self.silent_peers.get(write.peer, "")
            if reason:
                self.abandon(write, reason)
            return bool(reason)

    def abandon(self, write: Transfer, reason: str) -> None:
        """Keeps a transfer until it has finished, though no sender waits for it."""
        with self.agent_lock:
            write.abandon_reason = reason
            self.abandoned_transfers.append(write)

    def _is_writing(self, room: int | None = None, peer: str | None = None) -> bool:
        """Whether a write may go on, of this room or any, to this decode rank or any."""
        with self.agent_lock:
            of_both = [
                write
                for write in self.transfers
                if room in (None, write.room) and peer in (None, write.peer)
            ]
            return not all(map(self.has_finished, of_both))

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
                self._notify_later(room, peer, info, reason)
            else:
                self._notify_failed(room, {peer: info}, reason)

    def conclude_failure(self, room: int, reason: str) -> None:
        """Notifies the room's decode ranks of its failure; while its sender writes, that will."""
        has_sender = room in self.request_status  # otherwise its request has not arrived
        with self.agent_lock:
            # A write of an earlier request does not count: see `_notify_failed`.
            if not (has_sender and self._is_writing(room)):
                self._notify_failed(room, self.transfer_infos.get(room, {}), reason)
        if not has_sender:
            self.transfer_infos.pop(room, None)

    def close_failed_room(self, room: int) -> str:
        """Drops a failed room, notifies its decode ranks of the reason, and returns that.

        Decode ranks that request the room later are notified then. Stock ones do not read it.
        """
        with self.rooms_lock:
            peers = self.transfer_infos.pop(room, {})
            reason = self.drop_room(room) or FAILED_ELSEWHERE
            self.record_failed_room(room, reason, peers)
        self._notify_failed(room, peers, reason)
        return reason

    def _notify_failed(self, room: int, peers: Mapping[str, RoomRequest], reason: str) -> None:
        """Notifies decode ranks of a room's failure, once: the room may soon be another request's.

        A rank that is notified may free its pages. While a write of this room to it goes on, which
        was abandoned or is another request's, it is not notified yet: `check_peers` does so later.

        Args:
            peers: The ranks' requests for the room, by name.
        """
        notification = self._notification(room, "failed", reason=reason)
        for peer, info in peers.items():
            if info.is_dummy() or info.is_notified:
                continue
            if self._is_writing(room, peer):
                self._notify_later(room, peer, info, reason)
                continue
            info.is_notified = True
            try:
                self._notify(peer, notification)
            except Exception as error:
                if not info.is_delayed:
                    logger.warning(f"Room {room}: could not notify decode {peer} yet: {error}")
                info.is_delayed, info.is_notified = True, False
                self._notify_later(room, peer, info, reason)

    def _notify_later(self, room: int, peer: str, info: RoomRequest, reason: str) -> None:
        """Queues a failure notice to a decode rank, which `check_peers` sends."""
        with self.agent_lock:
            self.pending_notices.append((room, peer, info, reason))
            del self.pending_notices[:-MAX_PENDING_NOTICES]

    def drop_pending_notices(self, peer: str, room: int | None = None) -> None:
        """Drops a decode rank's failure notices for this room, or for all rooms if None."""
        with self.agent_lock:
            self.pending_notices = [
                one for one in self.pending_notices if one[1] != peer or room not in (None, one[0])
            ]

    def handle_peer_recovered(self, name: str) -> None:
        """Allows a new connection to a decode rank that is alive."""
        with self.agent_lock:
            self.unreachable_peers.discard(name)
