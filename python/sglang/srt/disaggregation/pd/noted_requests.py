"""Notes requests in a manager's `transfer_log` where the scheduler knows them.

Some backends, such as Mori, have a manager without one.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any, Dict, Optional

from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.pd.refused_requests import abort_message
from sglang.srt.disaggregation.transfer_log import TransferLog
from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST

ABORTED = "Aborted before it was scheduled"


def log_of(manager: Any) -> Optional[TransferLog]:
    """Returns a manager's log if it keeps one."""
    log = getattr(manager, "transfer_log", None)
    return log if isinstance(log, TransferLog) and log.is_on else None


def note_request(manager: Any, req: Any, address: str = "") -> None:
    """Notes a request that the scheduler has got, unless it is a health check or a warm-up.

    Args:
        manager: This rank's KV manager.
        req: The scheduler's request.
        address: On decode, the prefill server's bootstrap address.
    """
    log, room = log_of(manager), req.bootstrap_room
    if log is None or room is None or req.bootstrap_host == FAKE_BOOTSTRAP_HOST:
        return
    peer = manager.prefill_names.get(address, "")
    log.opened(room, str(req.rid), peer, len(req.origin_input_ids))
    status = manager.request_status.get(room)  # its peer may have asked before
    if status in (KVPoll.Failed, KVPoll.WaitingForInput):
        manager.note_status(room, status)


def note_seconds(manager: Any, where: str, start: float) -> None:
    """Notes how long the scheduler has handled KV transfers.

    Args:
        where: In which queue: `bootstrap`, `inflight`, `prealloc` or `transfer`.
        start: Since when, on the monotonic clock.
    """
    log = log_of(manager)
    if log is not None:
        log.polled(where, start)


class QueuedRequests:
    """Decode: requests whose KV has arrived, until they are scheduled or aborted."""

    def __init__(self):
        self._by_id: Dict[int, Any] = {}

    def note(
        self,
        manager: Any,
        before: Iterable[Any],
        after: Iterable[Any],
        arrived: Sequence[Any],
        waiting: Sequence[Any],
    ) -> None:
        """Notes what a poll of the transfer queue has changed, and which requests wait no longer.

        Args:
            before, after: The transfer queue's entries, each of which has a request, `req`.
            arrived: Requests whose KV has arrived; they will be in the scheduler's queue.
            waiting: The scheduler's queue.
        """
        log = log_of(manager)
        if log is None:
            return
        if self._by_id:
            still = {id(req) for req in waiting}
            for key in self._by_id.keys() - still:
                _note_end(log, self._by_id.pop(key))
        self._by_id.update((id(req), req) for req in arrived)
        left = {id(one): one.req for one in before}
        for one in after:
            left.pop(id(one), None)
        for req in left.values():
            if id(req) not in self._by_id:  # such as one whose metadata is another request's
                log.dropped(req.bootstrap_room, abort_message(req))


def _note_end(log: TransferLog, req: Any) -> None:
    """Notes the end of a request that waits no longer: it was scheduled, or aborted."""
    scheduled = getattr(req.time_stats, "forward_entry_time", None)
    if scheduled == 0.0:
        log.dropped(req.bootstrap_room, abort_message(req) or ABORTED)
    else:  # while decode resumes other requests, nothing is polled, and this is late
        ago = 0.0 if scheduled is None else time.perf_counter() - scheduled
        log.ended(req.bootstrap_room, ago)
