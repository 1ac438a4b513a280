"""What NIXL's notifications say, on both sides; `kv_layout.transfer_status` has their wording.

A write brings one when it is done; that a room failed is said by one of its own.
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
    """A KV manager's; it has `_notify(peer, notification)`, and `is_dummy()` of a room's peer."""

    def _notification(self, room: int, kind: str, **more) -> bytes:
        """A notification of this prefill rank."""
        return format_notification(Notification(room, kind, **more), self.sender_rank)

    def close_failed_room(self, room: int) -> str:
        """Prefill: end a failed room and tell its decode ranks why; returns that.

        Those that ask for the room only now are told when they do. Stock ones do not read it.
        """
        with self.rooms_lock:
            peers = self.transfer_infos.pop(room, {})
            reason = self.drop_room(room) or "another prefill rank failed"
            self.record_failed_room(room, reason, peers)
        self._notify_failed(room, peers, reason)
        return reason

    def _notify_failed(self, room: int, peers: Dict[str, Any], reason: str) -> None:
        """Once each, for the number may be another request's when a second message arrives."""
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
                    logger.warning(f"Room {room}: decode {peer} is not told yet: {error}")
                    info.is_delayed = True
                del info.is_notified
                self.notify_later(room, peer, info, reason)

    def _notify_digests(self, peer: str, room: int, digests: Optional[bytes]) -> None:
        """Prefill: send a decode rank what it compares; nothing where it awaits none."""
        if digests is not None:
            self._notify(peer, self._notification(room, "digests", digests=digests))

    def update_transfer_status(self) -> None:
        """Decode: take in the notifications that have come since the last call."""
        with self.agent_lock:
            arrived = self.agent.get_new_notifs()
        for peer, messages in arrived.items():
            for message in messages:
                notification = parse_notification(message)
                if notification is None:
                    logger.warning(f"Dropped a notification from {peer}: {message[:80]!r}")
                # What comes for a room that is over must not open it again.
                elif notification.room in self.request_status:
                    self.transfer_statuses[notification.room].add(peer, notification)
                    if notification.kind == "digests":
                        self.arrived_digests[notification.room][peer] = notification.digests
                    if notification.kind == "failed":
                        self.record_failure(
                            notification.room, f"Prefill failed: {notification.reason}"
                        )
