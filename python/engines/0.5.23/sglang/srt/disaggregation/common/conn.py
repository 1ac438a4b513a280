"""Common to all backends: compatibility checks, buffer descriptions, thread-safe room status."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Literal

import zmq
from sglang.srt.disaggregation.kv_layout import is_extension_frame
from sglang.srt.disaggregation.pd.rank_manager import RankManager
from sglang.srt.disaggregation.pd.rank_routes import RankRoutes
from sglang.srt.disaggregation.pd.receiver import PrefillReceiver
from sglang.srt.disaggregation.pd.room_failures import NotifyingSender
from sglang.srt.disaggregation.pd.unit_exchange import InterleavingReceiver
from sglang.srt.disaggregation.pd.verify_exchange import VerifyingReceiver

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


class CommonKVManager(RankManager, EngineCommonKVManager):
    # Override the engine's, whose text the patch set checks.
    record_failure = RankManager.record_failure
    check_status = RankManager.check_status
    _send_multipart_locked = RankManager._send_multipart_locked

    def update_status(self, bootstrap_room: int, status: KVPoll) -> None:
        """Updates a room's status, one thread at a time. Extends the engine's: takes a lock.

        The scheduler may open a room just as a message from decode updates it. Without the lock,
        the thread that reads first and writes last would win, and the request would wait forever.
        Likewise, a room that fails just as the scheduler closes it would be kept forever.
        """
        # No `super()`, and ours may be missing: the engine's tests call this on other objects.
        note = getattr(self, "note_status", lambda room, status: None)
        with getattr(self, "status_lock", contextlib.nullcontext()):
            if status != KVPoll.Failed:
                EngineCommonKVManager.update_status(self, bootstrap_room, status)
                note(bootstrap_room, status)
                return
            if bootstrap_room not in self.request_status:
                return
            self.request_status[bootstrap_room] = status
        note(bootstrap_room, status)
        if self.deferred_bootstrap is not None:  # notifying decode may take long: no lock
            self._notify_bootstrap(bootstrap_room, self.deferred_bootstrap.fail(bootstrap_room))


class CommonKVSender(NotifyingSender, EngineCommonKVSender):
    """Notifies decode of requests that ended on prefill."""

    # These two are ours, and the engine's on other objects, on which its tests call them.

    def abort(self):
        """Aborts the request, see `NotifyingSender.abort`."""
        (NotifyingSender if isinstance(self, NotifyingSender) else EngineCommonKVSender).abort(self)

    def _check_bootstrap_timeout(self) -> KVPoll | None:
        """Checks for a time-out, see `NotifyingSender`'s."""
        kind = NotifyingSender if isinstance(self, NotifyingSender) else EngineCommonKVSender
        return kind._check_bootstrap_timeout(self)


class CommonKVReceiver(
    VerifyingReceiver, InterleavingReceiver, PrefillReceiver, EngineCommonKVReceiver
):
    # Override the engine's, whose text the patch set checks.
    _connect = PrefillReceiver._connect
    init = PrefillReceiver.init
    _get_bootstrap_info_from_server = PrefillReceiver._get_bootstrap_info_from_server

    def send_metadata(self, *where, **more):
        """Sends the metadata. Extends the engine's: notes which prefill ranks are awaited."""
        super().send_metadata(*where, **more)
        if self.init_time is not None:
            self.kv_mgr.requested_ranks[self.bootstrap_room] = self.bootstrap_infos

    def failure_exception(self):
        """Raises the reason. Extends the engine's: aborts the request on prefill, too."""
        self.takes_reason = True  # which the engine does after it clears the room
        if self._owns_bootstrap_room:
            self.abort_on_unknown_ranks()
            self.record_reason()
        super().failure_exception()

    def _clear(self) -> None:
        self.clear_once(super()._clear)

    def _send_bootstrap_message(
        self,
        *,
        bootstrap_info: dict,
        message: list[bytes],
        operation: Literal["_register_kv_args", "send_metadata"],
    ) -> bool:
        """Sends a message to a prefill rank; returns whether that succeeded.

        Extends the engine's: omits our extension frames for ranks that do not read them, and fails
        the room of a silent rank, for which this and all later messages would only queue up.
        """
        try:
            if self.fails_for_silence_of(bootstrap_info):
                return False
        except zmq.ZMQError as error:  # such as no free file descriptor
            place = f"{bootstrap_info['rank_ip']}:{bootstrap_info['rank_port']}"
            reason = f"Could not open a socket to prefill rank {place}: {error}"
            self.kv_mgr.record_failure(self.bootstrap_room, reason)
            self.conclude_state = KVPoll.Failed
            self.kv_mgr.update_status(self.bootstrap_room, KVPoll.Failed)
            return False
        if not bootstrap_info.get("reads_layouts"):
            message = [frame for frame in message if not is_extension_frame(frame)]
        return super()._send_bootstrap_message(
            bootstrap_info=bootstrap_info, message=message, operation=operation
        )


class CommonKVBootstrapServer(RankRoutes, EngineCommonKVBootstrapServer):
    _handle_route_get = RankRoutes._handle_route_get
