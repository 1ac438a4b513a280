"""Notes requests in a manager's `transfer_log` where the scheduler knows them.

Some backends, such as Mori, have a manager without one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Dict, Optional

from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.transfer_log import TransferLog
from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST


def log_of(manager: Any) -> Optional[TransferLog]:
    """Returns a manager's log if it keeps one."""
    log = getattr(manager, "transfer_log", None)
    return log if isinstance(log, TransferLog) and log.is_on else None


def note_request(manager: Any, req: Any, peer: str = "") -> None:
    """Notes a request that the scheduler has got, unless it is a health check or a warm-up.

    Args:
        manager: This rank's KV manager.
        req: The scheduler's request.
        peer: The prefill server, on decode.
    """
    log, room = log_of(manager), req.bootstrap_room
    if log is None or room is None or req.bootstrap_host == FAKE_BOOTSTRAP_HOST:
        return
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
        log.took(where, start)


class QueuedRequests:
    """Decode: requests whose KV has arrived, until they are scheduled or leave the queue."""

    def __init__(self):
        self._by_id: Dict[int, Any] = {}

    def note(self, manager: Any, arrived: Iterable[Any], waiting: Sequence[Any]) -> None:
        """Notes requests that have arrived, and those that are no longer waiting.

        Args:
            arrived: They will be in the queue.
            waiting: The scheduler's queue.
        """
        log = log_of(manager)
        if log is None:
            return
        if self._by_id:
            still = {id(req) for req in waiting}
            for key in self._by_id.keys() - still:
                log.ended(self._by_id.pop(key).bootstrap_room)
        self._by_id.update((id(req), req) for req in arrived)
