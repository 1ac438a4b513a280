"""Common to all backends: compatibility checks, buffer descriptions, thread-safe room status."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.disaggregation.pd.held_pages import AckInbox, read_release_seconds
from sglang.srt.disaggregation.pd.per_instance import PerInstance
from sglang.srt.disaggregation.pd.rank_manager import RankManager
from sglang.srt.disaggregation.pd.rank_routes import RankRoutes
from sglang.srt.disaggregation.pd.receiver import PrefillReceiver
from sglang.srt.disaggregation.pd.room_failures import NotifyingSender
from sglang.srt.disaggregation.pd.status_messages import STATUS_READER, StatusReader

if TYPE_CHECKING:
    from sglang.srt.disaggregation.common.conn import (
        EngineCommonKVBootstrapServer,
        EngineCommonKVManager,
        EngineCommonKVReceiver,
        EngineCommonKVSender,
        KVPoll,
    )

RENAMED = (
    ("CommonKVManager", "EngineCommonKVManager"),
    ("CommonKVSender", "EngineCommonKVSender"),
    ("CommonKVReceiver", "EngineCommonKVReceiver"),
    ("CommonKVBootstrapServer", "EngineCommonKVBootstrapServer"),
)


class CommonKVManager(StatusReader, RankManager, EngineCommonKVManager):
    # No release before 0.5.20 allocates pages only once prefill is complete.
    deferred_bootstrap = None
    acks: AckInbox = PerInstance(AckInbox)
    release_seconds = PerInstance(read_release_seconds)
    # Override the engine's, whose text the patch set checks.
    record_failure = RankManager.record_failure
    check_status = RankManager.check_status
    _send_multipart_locked = RankManager._send_multipart_locked

    def update_status(self, bootstrap_room: int, status: KVPoll) -> None:
        """Updates a room's status, one thread at a time. Restricts the engine's.

        The scheduler may open a room just as a message from decode updates it: without a lock, the
        earlier of two states could be written last. A failed room stays failed, and one that is
        over stays closed: a late message must not open it for the next request.
        """
        with self.status_lock:
            known = self.request_status.get(bootstrap_room)
            is_opened = status in (KVPoll.Bootstrapping, KVPoll.WaitingForInput)
            if known != KVPoll.Failed and (known is not None or is_opened):
                super().update_status(bootstrap_room, status)
                self.note_status(bootstrap_room, status)

    def store_frames(self, frames: list[bytes]) -> bool:
        """Stores what prefill sends beside the engine's messages; returns whether that was it."""
        return self.acks.store(frames) or super().store_frames(frames)

    def own_frames(self) -> list[bytes]:
        """Returns what a decode rank appends to the engine's registration."""
        # With staging buffers NIXL's notifications say more than that a room is done.
        return self.append_layout([] if self.enable_staging else [STATUS_READER])


class CommonKVSender(NotifyingSender, EngineCommonKVSender):
    """Notifies decode of requests that ended on prefill."""

    # Override the engine's, whose text the patch set checks.
    abort = NotifyingSender.abort
    _check_bootstrap_timeout = NotifyingSender._check_bootstrap_timeout

    def _drop_room(self) -> None:
        """Drops the room. Extends `NotifyingSender`'s: also its chunk count, as later engines."""
        super()._drop_room()
        if self._notifies_decode():
            self.kv_mgr._drop_chunk_count(self.bootstrap_room)


class CommonKVReceiver(PrefillReceiver, EngineCommonKVReceiver):
    # Override the engine's, whose text the patch set checks.
    _connect = PrefillReceiver._connect
    init = PrefillReceiver.init
    _get_bootstrap_info_from_server = PrefillReceiver._get_bootstrap_info_from_server


class CommonKVBootstrapServer(RankRoutes, EngineCommonKVBootstrapServer):
    _handle_route_get = RankRoutes._handle_route_get
