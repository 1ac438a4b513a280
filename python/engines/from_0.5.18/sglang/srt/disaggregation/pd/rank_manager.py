"""What the KV managers of both roles and of all backends share."""

from __future__ import annotations

import functools
import threading

from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.kv_layout import RankLayout, encode_layout
from sglang.srt.disaggregation.pd.compatibility import AbortNotifier
from sglang.srt.disaggregation.pd.interleaving import Interleaver
from sglang.srt.disaggregation.pd.noted_transfers import NotedTransfers
from sglang.srt.disaggregation.pd.packing import PackingBuffers
from sglang.srt.disaggregation.pd.peer_sockets import PeerSocket
from sglang.srt.disaggregation.pd.per_instance import PerInstance
from sglang.srt.disaggregation.pd.prefill_servers import PrefillServers
from sglang.srt.disaggregation.pd.room_failures import abort_message
from sglang.srt.disaggregation.pd.unit_exchange import UnitInbox
from sglang.srt.disaggregation.pd.verify import Verifier
from sglang.srt.disaggregation.pd.verify_exchange import DigestInbox, SentPages


class EngineAttributes:
    """Defaults of the engine's attributes, which a manager made without `__init__` lacks."""

    disaggregation_mode = None
    request_status: dict[int, KVPoll] = PerInstance(dict)
    failure_records: dict[int, str] = PerInstance(dict)
    failure_lock = PerInstance(threading.Lock)
    transfer_infos: dict[int, dict] = PerInstance(dict)
    decode_kv_args_table: dict = PerInstance(dict)
    _deferred_ack_poisoned_rooms: set[int] = PerInstance(set)


class RankManager(NotedTransfers, PrefillServers, EngineAttributes):
    """Base of a rank's KV manager, before the engine's."""

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

    def record_failure(self, bootstrap_room: int, failure_reason: str) -> None:
        """Records why a room failed. Restricts the engine's to open rooms.

        The scheduler closes a room before it takes the reason; a later reason would be taken for
        that of the next request in this room.
        """
        with self.failure_lock:
            if bootstrap_room in self.request_status:
                self.failure_records[bootstrap_room] = failure_reason
                self.transfer_log.failed(bootstrap_room, failure_reason)

    def drop_reason(self, room: int) -> None:
        """Drops the reason why this room failed, which nobody will request any more."""
        with self.failure_lock:
            self.failure_records.pop(room, None)

    def prefill_kinds(self) -> dict[str, int]:
        """Returns how many prefill servers are `patched`, `stock`, `refused` and `silent`."""
        kinds = {}
        for address in list(self.prefill_info_table):
            _, ranks = self.routes.get(address, (None, {}))
            is_patched = any(rank.get("reads_layouts") for rank in list(ranks.values()))
            kinds[address] = "patched" if is_patched else "stock"
            if address in self.incompatible:
                kinds[address] = "refused"
            elif any(self.has_gone_silent(rank) for rank in list(ranks.values())):
                kinds[address] = "silent"
        return self.count_prefills(kinds)

    def _query_sizes(self, address: str) -> bool:
        """Queries a server. Extends `PrefillServers`': notes the name of one that has answered."""
        is_known = super()._query_sizes(address)
        if is_known:
            self.note_prefill(address)
        return is_known

    def check_status(self, bootstrap_room: int) -> KVPoll:
        """Returns a room's status; `Failed` for a room that another thread has just dropped.

        In 0.5.23 NIXL's manager has its own: `WaitingForInput` for such a room.
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
        if room not in self.request_status:  # else another request has reused the room
            abort = abort_message(room, (self.local_ip, self.rank_port))
            PeerSocket.to(rank["rank_ip"], rank["rank_port"]).send_multipart(abort)

    @staticmethod
    def placeholder_prefill_info():
        """Returns the engine's record of a server with one rank, of which nothing else is known."""
        # Not at the top: the module imports this one.
        from sglang.srt.disaggregation.common.conn import PrefillServerInfo

        sizes = {"attn_tp_size": 1, "attn_cp_size": 1, "dp_size": 1, "pp_size": 1}
        unknown = {"page_size": None, "kv_cache_dtype": None, "follow_bootstrap_room": True}
        return PrefillServerInfo(**sizes, **unknown)
