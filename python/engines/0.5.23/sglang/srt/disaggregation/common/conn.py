"""Servers that do not fit are told apart; registrations say what each buffer holds; no state of a
request is lost between threads.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
from typing import TYPE_CHECKING, List, Literal

from aiohttp import web
from sglang.srt.disaggregation.kv_layout import encode_layout, is_extension_frame
from sglang.srt.disaggregation.pd.compatibility import AbortNotifier, CompatibilityCheck
from sglang.srt.disaggregation.pd.peer_sockets import PeerSocket
from sglang.srt.disaggregation.pd.prefill_servers import PrefillServers
from sglang.srt.disaggregation.pd.room_failures import NotifyingSender
from sglang.srt.disaggregation.pd.verify_exchange import DigestInbox, VerifyingReceiver
from sglang.srt.disaggregation.pd.verify_mode import verify_mode
from sglang.srt.disaggregation.pd.verify_reports import VerifyRoutes

if TYPE_CHECKING:
    from sglang.srt.disaggregation.common.conn import (
        AbortNotification,
        EngineCommonKVBootstrapServer,
        EngineCommonKVManager,
        EngineCommonKVReceiver,
        EngineCommonKVSender,
        KVPoll,
        PrefillServerInfo,
    )

logger = logging.getLogger(__name__)

RENAMED = (
    ("CommonKVManager", "EngineCommonKVManager"),
    ("CommonKVSender", "EngineCommonKVSender"),
    ("CommonKVReceiver", "EngineCommonKVReceiver"),
    ("CommonKVBootstrapServer", "EngineCommonKVBootstrapServer"),
)


class CommonKVManager(PrefillServers, CompatibilityCheck, DigestInbox, EngineCommonKVManager):
    def __new__(cls, *args, **kwargs):
        self = super().__new__(cls)
        self.status_lock = threading.RLock()
        return self

    def update_status(self, bootstrap_room: int, status: KVPoll) -> None:
        """As the engine's, by one thread at a time.

        The scheduler opens a room just as a message of decode's does: what is read before the
        other writes, and written after it, would be the last word, and the request wait for ever.
        It also closes one just as that fails, which would be kept for ever: under this lock, too.
        """
        with self.status_lock:
            if status != KVPoll.Failed:
                return super().update_status(bootstrap_room, status)
            if bootstrap_room not in self.request_status:
                return
            self.request_status[bootstrap_room] = status
        if self.deferred_bootstrap is not None:  # decode is told, which may take its time
            self._notify_bootstrap(bootstrap_room, self.deferred_bootstrap.fail(bootstrap_room))

    def record_failure(self, bootstrap_room: int, failure_reason: str) -> None:
        """As the engine's, but only for an open room.

        The scheduler closes a room and then takes its reason; a later one would be taken for that
        of the next request with this number.
        """
        with self.failure_lock:
            if bootstrap_room in self.request_status:
                self.failure_records[bootstrap_room] = failure_reason

    def drop_reason(self, room: int) -> None:
        """Nobody asks any more why this room failed."""
        with self.failure_lock:
            self.failure_records.pop(room, None)

    def check_status(self, bootstrap_room: int) -> KVPoll:
        """As the engine's; a room that another thread has dropped just now is over."""
        return self.request_status.get(bootstrap_room, KVPoll.Failed)

    def _send_multipart_locked(
        self, endpoint: str, parts: List[bytes], is_ipv6: bool = False
    ) -> None:
        """Hand over a message to a decode rank; nobody waits for it.

        The engine's closes a socket that another thread may be sending over, which ends the
        process, and waits for half a minute for a rank that is gone.

        Raises:
            zmq.Again: See `PeerSocket.send_multipart`.
        """
        PeerSocket(endpoint, is_ipv6).send_multipart(parts)

    @staticmethod
    def placeholder_prefill_info() -> PrefillServerInfo:
        """A server of one rank, of which nothing else is known."""
        sizes = {"attn_tp_size": 1, "attn_cp_size": 1, "dp_size": 1, "pp_size": 1}
        unknown = {"page_size": None, "kv_cache_dtype": None, "follow_bootstrap_room": True}
        return PrefillServerInfo(**sizes, **unknown)

    def append_layout(self, message: List[bytes]) -> List[bytes]:
        """A registration that says what each of our buffers holds, where that is known."""
        layout = self.kv_args.layout
        return message if layout is None else [*message, encode_layout(layout)]

    def abort_on_prefill(self, bootstrap_addr: str, room: int) -> None:
        """Have all ranks of a prefill server end a room that it is never asked for."""
        if self.attn_tp_rank == 0 and self.pp_rank == 0:
            if not hasattr(self, "abort_notifier"):
                self.abort_notifier = AbortNotifier(self._send_abort_to_rank)
            self.abort_notifier.add(bootstrap_addr, room)

    def _send_abort_to_rank(self, rank: dict, room: int) -> None:
        if room in self.request_status:  # another request has its number by now
            return
        sock, lock = CommonKVReceiver._connect_to_bootstrap_server(rank)
        told = AbortNotification(room, self.local_ip, self.rank_port, None).to_zmq()
        with lock:
            sock.send_multipart(told)


class CommonKVSender(NotifyingSender, EngineCommonKVSender):
    """Decode hears of requests that have ended here."""


class CommonKVReceiver(VerifyingReceiver, EngineCommonKVReceiver):
    is_cleared = takes_reason = False

    @classmethod
    def _connect(cls, endpoint: str, is_ipv6: bool = False):
        """A socket to a prefill rank, and what the engine holds as it sends; nobody waits."""
        return PeerSocket(endpoint, is_ipv6), contextlib.nullcontext()

    def init(self, prefill_dp_rank: int):
        """As the engine's; a prefill server that does not fit fails the request, and is told."""
        why = self.kv_mgr.incompatibility(self.bootstrap_addr)
        if why is None or self.conclude_state == KVPoll.Failed:
            with self.kv_mgr.servers_lock:
                return super().init(prefill_dp_rank)
        self.kv_mgr.record_failure(self.bootstrap_room, why)
        self.conclude_state = KVPoll.Failed
        self.kv_mgr.update_status(self.bootstrap_room, KVPoll.Failed)
        self.kv_mgr.abort_on_prefill(self.bootstrap_addr, self.bootstrap_room)

    def send_metadata(self, *where, **more):
        """As the engine's; it is known which prefill ranks the request waits for."""
        super().send_metadata(*where, **more)
        if self.init_time is not None:
            self.kv_mgr.requested_ranks[self.bootstrap_room] = self.bootstrap_infos

    def failure_exception(self):
        self.takes_reason = True  # once the room is cleared
        super().failure_exception()

    def _clear(self) -> None:
        """As the engine's; why the room failed is dropped, if nobody asks.

        Once: the engine clears a failed room again when it frees its pages, up to half a minute
        later. The room may be another request's then.
        """
        if self.is_cleared:
            return
        self.is_cleared = True
        self.kv_mgr.requested_ranks.pop(self.bootstrap_room, None)
        with self.kv_mgr.status_lock:
            super()._clear()
        if not self.takes_reason:
            self.kv_mgr.drop_reason(self.bootstrap_room)

    def _get_bootstrap_info_from_server(self, *rank):
        """As the engine's, of what is known by now; None also for an answer without an address."""
        info = self.kv_mgr.cached_rank(self.bootstrap_addr, rank)
        info = info or super()._get_bootstrap_info_from_server(*rank)
        if (
            info is None
            or isinstance(info.get("rank_ip"), str)
            and type(info.get("rank_port")) is int
        ):
            return info
        logger.error(f"Bootstrap server {self.bootstrap_addr} says of rank {rank}: {info}")
        return None

    def _send_bootstrap_message(
        self,
        *,
        bootstrap_info: dict,
        message: List[bytes],
        operation: Literal["_register_kv_args", "send_metadata"],
    ) -> bool:
        """As the engine's; what our buffers hold goes to ranks that read it.

        Nothing goes to one that is silent, where it would wait with all that is sent after it.
        """
        if self.kv_mgr.is_silent(bootstrap_info):
            self.kv_mgr.fail_room_waiting_for(self.bootstrap_room, bootstrap_info)
            self.conclude_state = KVPoll.Failed
            self.kv_mgr.drop_server(self.bootstrap_addr)
            return False
        if not bootstrap_info.get("reads_layouts"):
            message = [frame for frame in message if not is_extension_frame(frame)]
        return super()._send_bootstrap_message(
            bootstrap_info=bootstrap_info, message=message, operation=operation
        )


class CommonKVBootstrapServer(VerifyRoutes, EngineCommonKVBootstrapServer):
    async def _handle_route_get(self, request: web.Request):
        """As the engine's; each rank's address comes with what it reads."""
        response = await super()._handle_route_get(request)
        if response.status != 200:
            return response
        known = json.loads(response.text)
        # Not in the server's own answer, in which stock decode servers bear nothing new.
        if "rank_port" in known:
            known.update(reads_layouts=True, verifies=bool(verify_mode()))
        return web.json_response(known)
