"""Prefill tells decode how a room ended there, over the same messages whatever the backend.

decode rank registers with STATUS_READER       prefill sends it (PD_STATUS, room, status, prefill
                                               rank, reason), and no NIXL notifications
without                                        what stock sends: Mooncake's three frames, or NIXL's
                                               notifications, which report no failure
"""

from __future__ import annotations

import logging

from sglang.srt.disaggregation.base.conn import KVPoll

logger = logging.getLogger(__name__)

STATUS = b"PD_STATUS"
# The frame of a registration by which a decode rank announces that it reads these messages.
STATUS_READER = b"PD_READS_STATUS"
ENDED = (KVPoll.Success, KVPoll.Failed)


def status_message(room: int, status: KVPoll, sender: int, reason: str) -> list[bytes]:
    """Returns the frames that tell decode how a room ended on prefill rank `sender`."""
    return [STATUS, b"%d" % room, b"%d" % status, b"%d" % sender, reason.encode("utf-8", "replace")]


class StatusReader:
    """Base of a decode rank's KV manager, before the engine's: reads these messages."""

    def store_frames(self, frames: list[bytes]) -> bool:
        """Stores what prefill sends beside the engine's messages; returns whether that was it.

        Raises:
            ValueError or IndexError: The message is invalid.
        """
        if frames[0] != STATUS:
            return super().store_frames(frames)
        room, status, sender = (int(frame) for frame in frames[1:4])
        if status not in ENDED:
            raise ValueError(f"status {status} of room {room}, expected that it has ended")
        self.apply_status(room, status, sender, frames[4].decode("utf-8", "replace"))
        return True

    def apply_status(self, room: int, status: KVPoll, sender: int, reason: str) -> None:
        """Notes how an open room ended on a prefill rank; the last of them to succeed ends it."""
        with self.status_lock:
            if status == KVPoll.Failed:
                if room not in self.failure_records:
                    self.record_failure(room, f"Prefill failed: {reason}")
                self.update_status(room, status)
                return
            needed = self.required_prefill_response_num_table.get(room)
            if room not in self.request_status or needed is None:
                return  # it is over, or was not requested
            done = self.prefill_response_tracker.setdefault(room, set())
            done.add(sender)
            if len(done) >= needed:
                self.update_status(room, status)
