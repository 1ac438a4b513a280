"""One request on a prefill rank."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.pd.room_failures import FAILED_ELSEWHERE

if TYPE_CHECKING:
    from sglang.srt.disaggregation.pd.room_failures import RoomTable

ABORTED = "Aborted by AbortReq."


class Sender:
    """The base of every backend's KV sender.

    Its manager has `close_failed_room(room)`, except Mori's.
    """

    conclude_state: KVPoll | None = None
    # Whether the room was dropped; `conclude_state` may be set before that.
    is_closed = False

    def __init__(
        self,
        mgr: RoomTable,
        bootstrap_addr: str,
        bootstrap_room: int,
        dest_tp_ranks: list[int],
        pp_rank: int,
    ):
        self.kv_mgr = mgr
        self.bootstrap_room = bootstrap_room
        self.bootstrap_server_url = bootstrap_addr
        self.aux_index = None
        self.curr_idx = 0
        self.started_at = time.monotonic()
        mgr.register_sender(bootstrap_room, self)

    def abandon(self) -> None:
        """Aborts a request that is dropped before it is sent: decode must not wait for it."""
        if not self.is_closed and hasattr(self.kv_mgr, "close_failed_room"):
            self.kv_mgr.record_failure(self.bootstrap_room, ABORTED)
            self._close_failed_room()

    def _close_failed_room(self) -> str:
        """Drops the failed room and returns why; notifies decode once this rank writes no more."""
        self.is_closed, self.conclude_state = True, KVPoll.Failed
        return self.kv_mgr.close_failed_room(self.bootstrap_room)

    def clear(self) -> None:
        """Drops the room, which has succeeded."""
        self.is_closed = True
        self.kv_mgr.drop_room(self.bootstrap_room)

    def fail_with_group(self) -> None:
        """Fails the room, which another rank of this stage failed."""
        if self.conclude_state is None:
            self.kv_mgr.fail(self.bootstrap_room, FAILED_ELSEWHERE)
