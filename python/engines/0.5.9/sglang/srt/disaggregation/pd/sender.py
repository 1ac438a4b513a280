"""One request on a prefill rank."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, List, Optional

from sglang.srt.disaggregation.base.conn import KVPoll

if TYPE_CHECKING:
    from sglang.srt.disaggregation.pd.room_failures import RoomTable

ABORTED = "Aborted by AbortReq."


class Sender:
    """What every backend's KV sender is; its manager has `close_failed_room(room)`, but for Mori's."""

    conclude_state: Optional[KVPoll] = None
    # The room is aborted or forgotten; `conclude_state` may say before how it will end.
    is_closed = False

    def __init__(
        self,
        mgr: RoomTable,
        bootstrap_addr: str,
        bootstrap_room: int,
        dest_tp_ranks: List[int],
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
        """The request leaves before it is sent, for its client is gone: decode must not wait."""
        if not self.is_closed and hasattr(self.kv_mgr, "close_failed_room"):
            self.kv_mgr.record_failure(self.bootstrap_room, ABORTED)
            self._close_failed_room()

    def _close_failed_room(self) -> str:
        """End the room, which has failed; returns why. Decode is told when we write no more."""
        self.is_closed, self.conclude_state = True, KVPoll.Failed
        return self.kv_mgr.close_failed_room(self.bootstrap_room)

    def clear(self) -> None:
        """Forget the room, which has succeeded."""
        self.is_closed = True
        self.kv_mgr.drop_room(self.bootstrap_room)

    def fail_with_group(self) -> None:
        """Another rank of this stage failed the room."""
        if self.conclude_state is None:
            self.kv_mgr.fail(self.bootstrap_room, "another prefill rank failed")
