"""NIXL's agent as the engine's managers see it.

prefill's workers    their transfers are noted, to wait for them if one fails; a silent decode rank
                     fails them; a lost connection is noted; decode ranks that read
                     `pd.status_messages` get no notifications
decode's scheduler   gets one notification at a time
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sglang.srt.disaggregation.pd.nixl_sends import CONNECTION_LOST


class WatchedAgent:
    """Wraps an agent.

    The manager has `connection` and `sending`, in which each worker notes what it does, and
    `worker_state` and `silent_peers`.
    """

    def __init__(self, agent: Any, manager: Any):
        self.agent, self.manager = agent, manager
        self.current: dict[str, list[bytes]] = {}

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
        handle = self.agent.initialize_xfer(kind, ours, theirs, peer, notification, *more)
        return self._noted(handle)

    def make_prepped_xfer(self, kind: str, ours, src, theirs, dst, notification=b"", *more):
        """Creates a transfer of listed blocks, to the peer in `connection`."""
        notification = self._notification(notification)
        handle = self.agent.make_prepped_xfer(kind, ours, src, theirs, dst, notification, *more)
        return self._noted(handle)

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

    def each_notification(self) -> Iterator[bytes]:
        """Yields what has arrived, one by one; `get_new_notifs` returns only that one meanwhile."""
        for peer, some in self.agent.get_new_notifs().items():
            for notification in some:
                self.current = {peer: [notification]}
                yield notification

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        """Returns the notification that the engine is to read now, by peer."""
        return self.current
