"""Prefill: notifies decode of requests that are refused before they have a sender.

Without that, decode, which has allocated pages, would wait for KV until its timeout.
"""

from __future__ import annotations

from typing import Any


def notify_refused(manager: Any, req: Any, reason: str = "") -> None:
    """Notifies decode ranks that this request failed, including those that request it later.

    Does nothing for a request with a sender, or with a backend whose manager has no `refuse`.

    Args:
        manager: This rank's KV manager.
        req: The scheduler's request.
        reason: The client's error message; by default the one in `req`.
    """
    if req.disagg_kv_sender is not None or req.bootstrap_room is None:
        return
    if hasattr(manager, "refuse"):
        why = reason or abort_message(req) or "no reason given"
        manager.refuse(req.bootstrap_room, f"Prefill refused the request: {why}")


def abort_message(req: Any) -> str:
    """Returns the message with which a request was aborted; empty if it was not, or has none."""
    ends = (getattr(req, name, None) for name in ("finished_reason", "to_finish"))
    return next((end.message for end in ends if getattr(end, "message", None)), "")
