"""Prefill: notifies decode of requests that are refused before they have a sender.

Without that, decode, which has allocated pages, would wait for KV until its timeout.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.disaggregation import utils


def answer_rejected(scheduler: Any, req: Any) -> bool:
    """Answers the client if the scheduler has rejected this request, for example as too long.

    Returns whether it has. Engines before 0.5.21 would queue the request with a prompt of one token
    instead, and send that token's KV to decode, which would answer with wrong tokens. Later engines
    answer the client themselves.
    """
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    end = req.to_finish
    is_rejected = isinstance(end, FINISH_ABORT) and req.disagg_kv_sender is None
    if not is_rejected or hasattr(utils, "is_unadmitted_reject"):
        return False
    utils.prepare_abort(req, end.message, status_code=end.status_code)
    streamer = getattr(scheduler, "output_streamer", scheduler)  # 0.5.9's scheduler streams itself
    streamer.stream_output([req], req.return_logprob)
    if (session := getattr(req, "session", None)) is not None:  # a request of 0.5.9 has none
        session.abort_req()  # else it waits for this request's end
    return True


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
