"""Prefill: overrides of the engine's methods that the KV managers of all backends share."""

from __future__ import annotations

import logging

import numpy as np
import numpy.typing as npt
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.kv_layout import AuxPlan, PeerPlan
from sglang.srt.disaggregation.pd.peer_queue import PeerQueues
from sglang.srt.disaggregation.pd.peer_silence import SilenceWatch
from sglang.srt.disaggregation.pd.peers import chunk_refusal
from sglang.srt.utils.network import NetworkAddress

logger = logging.getLogger(__name__)

ENDED = (KVPoll.Success, KVPoll.Failed)


class PrefillManager(SilenceWatch, PeerQueues):
    """Base of a prefill rank's KV manager, before `RoomFailures` and the engine's.

    `decode_kv_args_table` has the `PeerRegistration` of each decode rank.
    """

    def plan_for(self, peer: str) -> PeerPlan | None:
        """Returns the plan for a decode rank; None if the engine sends its own way."""
        return getattr(self.decode_kv_args_table.get(peer), "plan", None)

    def aux_plan_for(self, peer: str) -> AuxPlan | None:
        """Returns the plan for a decode rank's metadata; None if the engine sends them."""
        plan = self.plan_for(peer)
        return plan.aux if plan is not None and plan.aux.widths else None

    def add_transfer_request(
        self,
        bootstrap_room: int,
        kv_indices: npt.NDArray[np.int32],
        index_slice: slice,
        is_last_chunk: bool,
        *more,
        **options,
    ) -> None:
        """Queues one chunk. Extends the engine's: an error only fails its room, on both sides."""
        room = bootstrap_room
        try:
            reason = self._refusal_reason(room, index_slice)
            if not reason:
                if self.verifier is not None and room in self.transfer_infos:
                    state = options.get("state_indices")
                    self.sent_pages.note(room, index_slice, kv_indices, state)
                chunk = (room, kv_indices, index_slice, is_last_chunk)
                super().add_transfer_request(*chunk, *more, **options)
                return
        except Exception as error:
            logger.exception(f"Room {room}: a chunk could not be queued")
            reason = f"Prefill could not send KV: {error!r}"
        self.conclude_failure(bootstrap_room=room, failure_reason=reason)

    def _refusal_reason(self, room: int, index_slice: slice) -> str:
        """Returns why a chunk fails its room; "" if it does not."""
        if self.request_status.get(room, KVPoll.Failed) == KVPoll.Failed:
            return ""  # the room is over: none of its chunks is sent
        silent = self.silence_reason(room)
        if silent:
            return silent
        for peer, info in list(self.transfer_infos.get(room, {}).items()):
            if info.is_dummy:
                continue
            known = self.decode_kv_args_table.get(peer)
            why = chunk_refusal(room, peer, known, index_slice, len(info.dst_kv_indices))
            if why:
                return why
        return ""

    def conclude_transfer(self, *, bootstrap_room: int, status: KVPoll, **more) -> KVPoll | None:
        """Concludes a room. Extends the engine's: first sends digests to ranks that compare."""
        if status == KVPoll.Success and self.verifier is not None:
            self._send_digests(bootstrap_room)
        return super().conclude_transfer(bootstrap_room=bootstrap_room, status=status, **more)

    def _send_digests(self, room: int) -> None:
        """Sends digests of what an open room has sent, to each decode rank that compares them."""
        sent, status = self.sent_pages.get(room), self.request_status.get(room, KVPoll.Failed)
        if sent is None or status == KVPoll.Failed:
            return
        rank = self._prefill_unique_rank()
        for peer, info in list(self.transfer_infos.get(room, {}).items()):
            plan = None if info.is_dummy else self.plan_for(peer)
            if plan is None or not plan.layout.verifies:
                continue
            frames = sent.message(room, rank, self.verifier, plan)
            address = NetworkAddress(info.endpoint, info.dst_port)
            try:
                self._send_multipart_locked(address.to_tcp(), frames, is_ipv6=address.is_ipv6)
            except Exception as error:
                logger.warning(f"Room {room}: could not send digests to decode {peer}: {error}")

    def fail_room_of_silent_peer(self, room: int, reason: str) -> None:
        """Fails an open room, one of whose decode ranks is silent.

        The other decode ranks keep its pages until the engine acknowledges that writes are over.
        """
        if self.request_status.get(room, KVPoll.Failed) not in ENDED:
            if self.is_release_safe(room):
                self.conclude_failure(bootstrap_room=room, failure_reason=reason)
            else:
                self.record_failure(room, reason)
                self.update_status(room, KVPoll.Failed)
        self.track_room_without_sender(room)  # the silent rank may never abort it

    def peers_in_use(self) -> set[str]:
        """Returns the decode ranks with open rooms, and those that are being written to.

        A rank may be written to after its room is cleared. Rooms that are over, and kept only in
        case a request comes, do not count.
        """
        rooms = list(self.transfer_infos.items())
        open_rooms = [list(peers) for room, peers in rooms if room not in self.rooms_without_sender]
        return set().union(*open_rooms, *(queue.busy_peers() for queue in self.transfer_queues))

    def handle_peer_recovered(self, name: str) -> None:
        """Called when a silent decode rank answers again; does nothing unless overridden."""

    def note_metadata_sender(self, name: str) -> None:
        """Notes that a decode rank that requests a room is alive."""
        info = self.decode_kv_args_table.get(name)
        if info is not None:
            self.note_peer_alive(name, info)
