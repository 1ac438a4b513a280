"""NIXL's agent as the engine's managers see it.

prefill's workers    their transfers are noted, to wait for them if one fails; a silent decode rank
                     fails them; a lost connection is noted; decode ranks that read
                     `pd.status_messages` get no notifications
decode's scheduler   gets notifications of open rooms that it can read
"""

from __future__ import annotations

import logging
from typing import Any

from sglang.srt.disaggregation.pd.nixl_sends import CONNECTION_LOST

logger = logging.getLogger(__name__)

# By tag: which parts of a notification, separated by underscores, are numbers.
NUMBERS = {"kv": slice(2, 5), "stg": slice(2, 8), "state": slice(2, 3), "aux": slice(3, 5)}
# The parts of a `kv` notification that tell which segment of a chunk has arrived, of how many.
SEGMENT = slice(6, 8)


class WatchedAgent:
    """Wraps an agent.

    The manager has `connection` and `sending`, in which each worker notes what it does, and
    `worker_state` and `silent_peers`.
    """

    def __init__(self, agent: Any, manager: Any):
        self.agent, self.manager = agent, manager

    def __getattr__(self, name: str):
        return getattr(self.agent, name)

    def _is_worker(self) -> bool:
        return self.manager.sending.room is not None

    def _notification(self, given: bytes) -> bytes:
        is_read = self._is_worker() and self.manager.reads_status(self.manager.sending.room)
        return b"" if is_read else given

    def initialize_xfer(self, kind: str, ours, theirs, peer: str, notification=b"", *more):
        """Creates a transfer to this peer."""
        self.manager.connection.peer = peer
        notification = self._notification(notification)
        return self._noted(
            self.agent.initialize_xfer(kind, ours, theirs, peer, notification, *more)
        )

    def make_prepped_xfer(self, kind: str, ours, src, theirs, dst, notification=b"", *more):
        """Creates a transfer of listed blocks, to the peer in `connection`."""
        notification = self._notification(notification)
        return self._noted(
            self.agent.make_prepped_xfer(kind, ours, src, theirs, dst, notification, *more)
        )

    def _noted(self, handle: Any) -> Any:
        if handle and self._is_worker():
            self.manager.sending.handles.append(handle)
        return handle

    def send_notif(self, peer: str, notification: bytes, *more) -> None:
        if self._notification(notification):
            self.agent.send_notif(peer, notification, *more)

    def transfer(self, handle: Any, *more) -> str:
        """Starts a transfer; notes its peer if its connection is lost."""
        try:
            return self.agent.transfer(handle, *more)
        except Exception as error:
            if CONNECTION_LOST in str(error):
                self.manager.connection.lost.add(self.manager.connection.peer)
            raise

    def check_xfer_state(self, handle: Any) -> str:
        """Returns a transfer's state.

        Raises:
            RuntimeError: A worker waits for a decode rank that is silent.
        """
        if self._is_worker():
            for peer in self.manager.worker_state.peers:
                if peer in self.manager.silent_peers:
                    raise RuntimeError(self.manager.silent_peers[peer])
        return self.agent.check_xfer_state(handle)

    def get_new_notifs(self, *more) -> dict[str, list[bytes]]:
        """Returns new notifications by peer: those of open rooms, which the engine can read."""
        arrived = self.agent.get_new_notifs(*more)
        return {peer: [*filter(self._is_readable, some)] for peer, some in arrived.items()}

    def _is_readable(self, notification: bytes) -> bool:
        try:
            room, tag, *_ = parts = notification.decode("ascii").split("_", 8)
            if int(room) not in self.manager.request_status:
                return False  # it is over, and must not be opened again
            _ = [int(part) for part in parts[NUMBERS.get(tag, slice(0))]]
            if tag == "kv" and "part" in parts[5:6]:
                number, count = map(int, parts[SEGMENT])
                if not 0 <= number < count:
                    raise ValueError("no such segment")
        except ValueError as error:
            logger.error(f"Dropped a notification: {error}: {notification[:80]!r}")
            return False
        return True
