"""Prefill: decode hears of requests that are refused before they have a sender.

Nobody else would tell it: it has set pages aside, and would wait for KV until it times out.
"""

from __future__ import annotations

from typing import Any


def notify_refused(manager: Any, req: Any, reason: str = "") -> None:
    """Have decode ranks hear that this request has failed, those that ask for it later, too.

    Nothing is done for one that has a sender, and with a backend whose manager has no `refuse`.

    Args:
        manager: This rank's KV manager.
        req: The scheduler's request.
        reason: What the client is told; of a request that is marked as ended that is known.
    """
    if req.disagg_kv_sender is not None or req.bootstrap_room is None:
        return
    if hasattr(manager, "refuse"):
        why = reason or _message(req) or "it is not said why"
        manager.refuse(req.bootstrap_room, f"Prefill refused the request: {why}")


def _message(req: Any) -> str:
    ends = (getattr(req, name, None) for name in ("finished_reason", "to_finish"))
    return next((end.message for end in ends if getattr(end, "message", None)), "")
