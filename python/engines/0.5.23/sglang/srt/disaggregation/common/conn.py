"""Common to all backends: compatibility checks, buffer descriptions, thread-safe room status."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import threading
from typing import TYPE_CHECKING, Literal

import zmq
from aiohttp import web
from sglang.srt.disaggregation.kv_layout import RankLayout, encode_layout, is_extension_frame
from sglang.srt.disaggregation.pd.compatibility import AbortNotifier
from sglang.srt.disaggregation.pd.interleaving import Interleaver
from sglang.srt.disaggregation.pd.packed_mode import is_packed_mode
from sglang.srt.disaggregation.pd.packing import PackingBuffers
from sglang.srt.disaggregation.pd.peer_sockets import PeerSocket
from sglang.srt.disaggregation.pd.per_instance import PerInstance
from sglang.srt.disaggregation.pd.prefill_servers import PrefillServers
from sglang.srt.disaggregation.pd.room_failures import NotifyingSender
from sglang.srt.disaggregation.pd.unit_exchange import InterleavingReceiver, UnitInbox
from sglang.srt.disaggregation.pd.verify import Verifier
from sglang.srt.disaggregation.pd.verify_exchange import DigestInbox, SentPages, VerifyingReceiver
from sglang.srt.disaggregation.pd.verify_mode import verify_mode
from sglang.srt.disaggregation.pd.verify_reports import VerifyRoutes

if TYPE_CHECKING:
    from sglang.srt.disaggregation.common.conn import (
        AbortNotification,
        DisaggregationMode,
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


class EngineAttributes:
    """Defaults of the engine's attributes, which a manager made without `__init__` lacks."""

    disaggregation_mode: DisaggregationMode | None = None
    request_status: dict[int, KVPoll] = PerInstance(dict)
    failure_records: dict[int, str] = PerInstance(dict)
    failure_lock = PerInstance(threading.Lock)
    transfer_infos: dict[int, dict] = PerInstance(dict)
    decode_kv_args_table: dict = PerInstance(dict)
    _deferred_ack_poisoned_rooms: set[int] = PerInstance(set)


class CommonKVManager(PrefillServers, EngineAttributes, EngineCommonKVManager):
    status_lock = PerInstance(threading.RLock)
    # By room, see `pd.verify_exchange`.
    sent_pages: dict[int, SentPages] = PerInstance(dict)
    arrived_digests: DigestInbox = PerInstance(DigestInbox)
    # By room, see `pd.unit_exchange`.
    arrived_units: UnitInbox = PerInstance(UnitInbox)

    @property
    def layout(self) -> RankLayout | None:
        """This rank's buffers; None leaves them to the engine, as does a `KVArgs` without it."""
        return getattr(getattr(self, "kv_args", None), "layout", None)

    @property
    def memory(self) -> str:
        """Where this rank's KV is: `DRAM` or `VRAM`."""
        return getattr(getattr(self, "kv_args", None), "memory", "VRAM")

    @property
    def packing(self) -> PackingBuffers | None:
        """This prefill rank's memory for packed rows; None if it sends slices."""
        return getattr(getattr(self, "kv_args", None), "packing", None)

    @functools.cached_property
    def interleaver(self) -> Interleaver:
        """Interleaves what this decode rank receives."""
        return Interleaver(self.kv_args)

    @property
    def verifier(self) -> Verifier | None:
        """Compares digests of what is sent with what arrives; None if nothing is compared."""
        return getattr(getattr(self, "kv_args", None), "verifier", None)

    def update_status(self, bootstrap_room: int, status: KVPoll) -> None:
        """Updates a room's status, one thread at a time. Extends the engine's: takes a lock.

        The scheduler may open a room just as a message from decode updates it. Without the lock,
        the thread that reads first and writes last would win, and the request would wait forever.
        Likewise, a room that fails just as the scheduler closes it would be kept forever.
        """
        # No `super()`, and the lock may be missing: the engine's tests call this on other objects.
        with getattr(self, "status_lock", contextlib.nullcontext()):
            if status != KVPoll.Failed:
                return EngineCommonKVManager.update_status(self, bootstrap_room, status)
            if bootstrap_room not in self.request_status:
                return
            self.request_status[bootstrap_room] = status
        if self.deferred_bootstrap is not None:  # notifying decode may take long: no lock
            self._notify_bootstrap(bootstrap_room, self.deferred_bootstrap.fail(bootstrap_room))

    def record_failure(self, bootstrap_room: int, failure_reason: str) -> None:
        """Records why a room failed. Restricts the engine's to open rooms.

        The scheduler closes a room before it takes the reason; a later reason would be taken for
        that of the next request in this room.
        """
        with self.failure_lock:
            if bootstrap_room in self.request_status:
                self.failure_records[bootstrap_room] = failure_reason

    def drop_reason(self, room: int) -> None:
        """Drops the reason why this room failed, which nobody will request any more."""
        with self.failure_lock:
            self.failure_records.pop(room, None)

    def check_status(self, bootstrap_room: int) -> KVPoll:
        """Returns a room's status; `Failed` for a room that another thread has just dropped.

        NIXL's manager has its own: `WaitingForInput` for such a room.
        """
        return self.request_status.get(bootstrap_room, KVPoll.Failed)

    def _send_multipart_locked(
        self, endpoint: str, parts: list[bytes], is_ipv6: bool = False
    ) -> None:
        """Queues a message to a decode rank, without waiting.

        Replaces the engine's, which closes a socket that another thread may be sending over,
        crashing the process, and waits half a minute for a rank that is gone.

        Raises:
            zmq.Again: See `PeerSocket.send_multipart`.
        """
        PeerSocket(endpoint, is_ipv6).send_multipart(parts)

    @staticmethod
    def placeholder_prefill_info() -> PrefillServerInfo:
        """Returns the record of a server with one rank, of which nothing else is known."""
        sizes = {"attn_tp_size": 1, "attn_cp_size": 1, "dp_size": 1, "pp_size": 1}
        unknown = {"page_size": None, "kv_cache_dtype": None, "follow_bootstrap_room": True}
        return PrefillServerInfo(**sizes, **unknown)

    def store_frames(self, frames: list[bytes]) -> bool:
        """Stores what prefill sends beside the engine's messages; returns whether that was it."""
        inboxes = (self.arrived_digests, self.arrived_units)
        with self.status_lock:  # a room that is cleared meanwhile would leave its entry
            return any(inbox.store(frames, self.request_status) for inbox in inboxes)

    def append_layout(self, message: list[bytes]) -> list[bytes]:
        """Returns a registration's frames with this rank's layout appended, if it is known."""
        layout = self.layout
        return message if layout is None else [*message, encode_layout(layout)]

    def abort_on_prefill(self, bootstrap_addr: str, room: int) -> None:
        """Aborts a room that decode never requests, on all ranks of a prefill server."""
        if self.attn_tp_rank == 0 and self.pp_rank == 0:
            if not hasattr(self, "abort_notifier"):
                self.abort_notifier = AbortNotifier(self._send_abort_to_rank)
            self.abort_notifier.add(bootstrap_addr, room)

    def _send_abort_to_rank(self, rank: dict, room: int) -> None:
        if room in self.request_status:  # another request has reused the room
            return
        sock, lock = CommonKVReceiver._connect_to_bootstrap_server(rank)
        told = AbortNotification(room, self.local_ip, self.rank_port, None).to_zmq()
        with lock:
            sock.send_multipart(told)


class CommonKVSender(NotifyingSender, EngineCommonKVSender):
    """Notifies decode of requests that ended on prefill."""

    # These two name the engine's class, because its tests call them on other objects.

    def abort(self):
        """Aborts the request, notifies the decode ranks that requested it, and drops the room.

        Extends the engine's, which drops it when it polls the request again, perhaps never.
        """
        if getattr(self, "is_cleared", False):
            return
        EngineCommonKVSender.abort(self)
        if isinstance(self, NotifyingSender):
            self.handle_abort()

    def _check_bootstrap_timeout(self) -> KVPoll | None:
        """Checks for a time-out. Extends the engine's: notifies decode ranks that requested it."""
        status = EngineCommonKVSender._check_bootstrap_timeout(self)
        if status is not None and isinstance(self, NotifyingSender):
            self.notify_failed()
        return status


class CommonKVReceiver(VerifyingReceiver, InterleavingReceiver, EngineCommonKVReceiver):
    is_cleared = takes_reason = False

    @classmethod
    def _connect(cls, endpoint: str, is_ipv6: bool = False):
        """Returns a socket to a prefill rank, which never blocks, and a no-op for its lock."""
        return PeerSocket(endpoint, is_ipv6), contextlib.nullcontext()

    def init(self, prefill_dp_rank: int):
        """Starts the request with its prefill server.

        Extends the engine's: if the server is incompatible, fails the request.
        """
        why = self.kv_mgr.incompatibility(self.bootstrap_addr)
        if why is None or self.conclude_state == KVPoll.Failed:
            with self.kv_mgr.servers_lock:
                return super().init(prefill_dp_rank)
        self.kv_mgr.record_failure(self.bootstrap_room, why)
        self.conclude_state = KVPoll.Failed
        self.kv_mgr.update_status(self.bootstrap_room, KVPoll.Failed)

    def send_metadata(self, *where, **more):
        """Sends the metadata. Extends the engine's: notes which prefill ranks are awaited."""
        super().send_metadata(*where, **more)
        if self.init_time is not None:
            self.kv_mgr.requested_ranks[self.bootstrap_room] = self.bootstrap_infos

    def failure_exception(self):
        """Raises the reason. Extends the engine's: aborts the request on prefill, too.

        The engine notifies only prefill ranks that this decode rank knows. It knows none of them
        if the request failed before it knew the server, perhaps on another decode rank. Prefill
        would then wait until the request times out.
        """
        self.takes_reason = True  # which the engine does after it clears the room
        if self._owns_bootstrap_room and getattr(self, "bootstrap_infos", None) is None:
            self.kv_mgr.abort_on_prefill(self.bootstrap_addr, self.bootstrap_room)
        super().failure_exception()

    def _clear(self) -> None:
        """Clears the room once, and drops its failure reason unless the engine takes that.

        Extends the engine's, which clears a failed room again when it frees its pages, up to half
        a minute later. The room may be another request's by then.
        """
        if self.is_cleared:
            return
        self.is_cleared = True
        self.stop_interleaving()
        self.kv_mgr.requested_ranks.pop(self.bootstrap_room, None)
        with self.kv_mgr.status_lock:
            super()._clear()
        if self.bootstrap_room not in self.kv_mgr.request_status:  # else another request has it
            self.kv_mgr.arrived_units.pop(self.bootstrap_room, None)
        if not self.takes_reason:
            self.kv_mgr.drop_reason(self.bootstrap_room)

    def _get_bootstrap_info_from_server(
        self, prefill_dp_rank, prefill_cp_rank, target_tp_rank, target_pp_rank
    ):
        """Returns the address of a prefill rank; None also if the server's answer lacks it.

        Extends the engine's: queries the bootstrap server only for ranks that are not cached.
        """
        rank = (prefill_dp_rank, prefill_cp_rank, target_tp_rank, target_pp_rank)
        info = self.kv_mgr.cached_rank(self.bootstrap_addr, rank)
        info = info or super()._get_bootstrap_info_from_server(*rank)
        if (
            info is None
            or isinstance(info.get("rank_ip"), str)
            and type(info.get("rank_port")) is int
        ):
            return info
        logger.error(
            f"Bootstrap server {self.bootstrap_addr} returned no usable address for rank {rank}: "
            f"{info}"
        )
        return None

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
            is_silent = self.kv_mgr.is_silent(bootstrap_info)
        except zmq.ZMQError as error:  # such as no free file descriptor
            place = f"{bootstrap_info['rank_ip']}:{bootstrap_info['rank_port']}"
            reason = f"Could not open a socket to prefill rank {place}: {error}"
            self.kv_mgr.record_failure(self.bootstrap_room, reason)
            self.conclude_state = KVPoll.Failed
            self.kv_mgr.update_status(self.bootstrap_room, KVPoll.Failed)
            return False
        if is_silent:
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
        """Answers a route query. Extends the engine's: adds what the rank supports."""
        response = await super()._handle_route_get(request)
        if response.status != 200:
            return response
        known = json.loads(response.text)
        # Not for the whole server: stock decode servers reject new fields in that answer.
        if "rank_port" in known:
            known.update(
                reads_layouts=True, verifies=bool(verify_mode()), names_units=is_packed_mode()
            )
        return web.json_response(known)
