"""Prefill: a decode rank that does not answer holds up nobody else's requests."""

from __future__ import annotations

from typing import Any, Set

from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.pd.peer_queue import PeerQueues
from sglang.srt.disaggregation.pd.peer_silence import SilenceWatch

ENDED = (KVPoll.Success, KVPoll.Failed)


class SilentPeers(SilenceWatch, PeerQueues):
    """A prefill rank's KV manager, over `Ended` and the engine's."""

    def fail_room_of_silent_peer(self, room: int, reason: str) -> None:
        """Fail an open room, of which a decode rank is silent.

        The others keep its pages until we say that nothing is written; the engine says so.
        """
        if self.request_status.get(room, KVPoll.Failed) not in ENDED:
            if self.is_release_safe(room):
                self.conclude_failure(bootstrap_room=room, failure_reason=reason)
            else:
                self.record_failure(room, reason)
                self.update_status(room, KVPoll.Failed)
        self.track_room_without_sender(room)  # who asked for it may never give it up

    def peers_in_use(self) -> Set[str]:
        """As `SilenceWatch`; also those that are written to, whose rooms may be cleared.

        Not those of rooms that are over, which are kept in case that a request comes.
        """
        rooms = list(self.transfer_infos.items())
        open_rooms = [list(peers) for room, peers in rooms if room not in self.rooms_without_sender]
        return set().union(*open_rooms, *(queue.busy_peers() for queue in self.transfer_queues))

    def handle_peer_recovered(self, name: str) -> None:
        """A silent decode rank answers again."""

    def note_metadata_sender(self, name: str) -> None:
        """A decode rank asks for a room."""
        info: Any = self.decode_kv_args_table.get(name)
        if info is not None:
            self.note_peer_alive(name, info)
