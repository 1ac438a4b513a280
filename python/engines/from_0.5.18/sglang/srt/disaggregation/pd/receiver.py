"""Decode: what the KV receivers of all backends share."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable

from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.pd.peer_sockets import PeerSocket

logger = logging.getLogger(__name__)


class PrefillReceiver:
    """Base of a decode rank's KV receiver, before the engine's: finds the prefill ranks it needs.

    `stop_interleaving` is `InterleavingReceiver`'s.

    Attributes:
        takes_reason: Whether the engine takes the reason of the failure after it clears the room.
        silence: Which prefill rank has been silent for how long, if the request failed for that.
    """

    is_cleared = takes_reason = False
    silence = ""

    @classmethod
    def _connect(cls, endpoint: str, is_ipv6: bool = False):
        """Returns a socket to a prefill rank, which never blocks, and a no-op for its lock."""
        return PeerSocket(endpoint, is_ipv6), contextlib.nullcontext()

    def init(self, prefill_dp_rank: int):
        """Starts the request with its prefill server.

        Extends the engine's: if the server is incompatible, fails the request. One that has failed
        keeps no rank's address, see `abort_on_unknown_ranks`; the engine does so from 0.5.23 on.
        """
        if self.conclude_state == KVPoll.Failed:
            return
        why = self.kv_mgr.incompatibility(self.bootstrap_addr)
        if why is None:
            with self.kv_mgr.servers_lock:
                return super().init(prefill_dp_rank)
        self.kv_mgr.record_failure(self.bootstrap_room, why)
        self.conclude_state = KVPoll.Failed
        self.kv_mgr.update_status(self.bootstrap_room, KVPoll.Failed)

    def fails_for_silence_of(self, rank: dict) -> bool:
        """Returns whether this prefill rank is silent; the request has then failed.

        Messages to it would only queue up. Its server is queried again at the next request.

        Raises:
            zmq.ZMQError: No socket can be opened.
        """
        manager = self.kv_mgr
        if not manager.is_silent(rank):
            return False
        manager.fail_room_waiting_for(self.bootstrap_room, rank)
        self.silence = manager.failure_records.get(self.bootstrap_room, "")
        self.conclude_state = KVPoll.Failed
        manager.drop_server(self.bootstrap_addr)
        return True

    def record_reason(self) -> None:
        """Records why the request failed, if the engine's reason is missing or says less.

        Before 0.5.23 the engine overwrites that a prefill rank was silent. If another decode rank
        found out first that the server is incompatible, this rank has recorded nothing.
        """
        manager, room, why = self.kv_mgr, self.bootstrap_room, self.silence
        if not why and room not in manager.failure_records:
            why = manager.incompatibility(self.bootstrap_addr)
        if why:
            manager.record_failure(room, why)

    def abort_on_unknown_ranks(self) -> None:
        """Aborts a failed request on prefill if this rank does not know the ranks of prefill.

        The engine notifies only prefill ranks that this decode rank knows. It knows none of them
        if the request failed before it knew the server, perhaps on another decode rank. Prefill
        would then wait until the request times out.
        """
        if getattr(self, "bootstrap_infos", None) is None:
            self.kv_mgr.abort_on_prefill(self.bootstrap_addr, self.bootstrap_room)

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

    def clear_once(self, clear: Callable[[], None]) -> None:
        """Clears the room once, and drops its failure reason unless the engine takes that.

        The engine clears a failed room again when it frees its pages, maybe half a minute later.
        The room may be another request's by then.

        Args:
            clear: The engine's.
        """
        if self.is_cleared:
            return
        self.is_cleared = True
        manager, room = self.kv_mgr, self.bootstrap_room
        self.stop_interleaving()
        if self.conclude_state == KVPoll.Failed:
            manager.transfer_log.dropped(room, "")  # maybe only another rank knows why
        manager.requested_ranks.pop(room, None)
        with manager.status_lock:
            clear()
        if room not in manager.request_status:  # else another request has it
            manager.arrived_units.pop(room, None)
            # 0.5.18's NIXL keeps all rooms that do not end by its notifications.
            manager.addr_to_rooms_tracker.get(self.bootstrap_addr, set()).discard(room)
        if not self.takes_reason:
            manager.drop_reason(room)
