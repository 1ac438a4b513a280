"""Prefill: a worker reads a chunk's pages only after the forward pass that writes them.

With overlap scheduling that pass may still run when the scheduler queues a cached prefix.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.disaggregation.base.conn import KVPoll


class ForwardEvents:
    """Base of a prefill rank's KV manager, before `PrefillManager`.

    A release provides `forward_event(chunk)`, called when a chunk is queued: the event of the pass
    that may still write its pages, or None.
    """

    def _note_queued(self, chunk: Any) -> frozenset[str]:
        chunk.wait_event = self.forward_event(chunk)
        return super()._note_queued(chunk)

    def _note_taken(self, chunk: Any) -> None:
        super()._note_taken(chunk)
        event, chunk.wait_event = chunk.wait_event, None
        if event is None or self.request_status.get(chunk.room, KVPoll.Failed) == KVPoll.Failed:
            return
        try:
            event.synchronize()
        except Exception as error:
            reason = f"Prefill could not wait for the pages of a cached prefix: {error}"
            self.conclude_failure(bootstrap_room=chunk.room, failure_reason=reason)
