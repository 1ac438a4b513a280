"""Sends and reads NIXL's notifications; `kv_layout.transfer_status` has their format.

A write brings a notification when it is done; a failed room has a notification of its own.
"""

from __future__ import annotations

import logging
from typing import Any, Dict, Optional

from sglang.srt.disaggregation.kv_layout import (
    Notification,
    format_notification,
    parse_notification,
)

logger = logging.getLogger(__name__)


class NixlNotifications:
    """Sends and reads a KV manager's notifications.

    The manager has `_notify(peer, notification)`; a room's peers have `is_dummy()`.
    """

    def _notification(self, room: int, kind: str, **more) -> bytes:
        """Formats a notification from this prefill rank."""
        return format_notification(Notification(room, kind, **more), self.sender_rank)

    def close_failed_room(self, room: int) -> str:
        """Prefill: drops a failed room, notifies its decode ranks of the reason, and returns that.

        Decode ranks that request the room later are notified then. Stock ones do not read it.
        """
        with self.rooms_lock:
            peers = self.transfer_infos.pop(room, {})
            reason = self.drop_room(room) or "another prefill rank failed"
            self.record_failed_room(room, reason, peers)
        self._notify_failed(room, peers, reason)
        return reason

    def _notify_failed(self, room: int, peers: Dict[str, Any], reason: str) -> None:
        """Notifies each peer once: a second message might reach another request with this room."""
        notification = self._notification(room, "failed", reason=reason)
        for peer, info in peers.items():
            if info.is_dummy() or hasattr(info, "is_notified"):
                continue
            if self.defers_notice(room, peer, info, reason):
                continue
            info.is_notified = True
            try:
                self._notify(peer, notification)
            except Exception as error:
                if not hasattr(info, "is_delayed"):
                    logger.warning(f"Room {room}: could not notify decode {peer} yet: {error}")
                    info.is_delayed = True
                del info.is_notified
                self.notify_later(room, peer, info, reason)

    def _notify_digests(self, peer: str, room: int, digests: Optional[bytes]) -> None:
        """Prefill: sends a decode rank digests to compare, unless it expects none (None)."""
        if digests is not None:
            self._notify(peer, self._notification(room, "digests", digests=digests))

    def update_transfer_status(self) -> None:
        """Decode: processes the notifications that have arrived since the last call."""
        with self.agent_lock:
            arrived = self.agent.get_new_notifs()
        for peer, messages in arrived.items():
            for message in messages:
                notification = parse_notification(message)
                if notification is None:
                    logger.warning(f"Dropped a notification from {peer}: {message[:80]!r}")
                # A notification for a concluded room must not open it again.
                elif notification.room in self.request_status:
                    self.transfer_statuses[notification.room].add(peer, notification)
                    if notification.kind == "digests":
                        self.arrived_digests[notification.room][peer] = notification.digests
                    if notification.kind == "failed":
                        self.record_failure(
                            notification.room, f"Prefill failed: {notification.reason}"
                        )
