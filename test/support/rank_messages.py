"""Records the messages that a rank would send, and waits until a rank has read all of its own."""

from abc import ABC, abstractmethod

from rank_base import POLL_INTERVAL
from sglang.srt.disaggregation.base import KVPoll

from pd_harness.polling import wait_until

SentMessages = list[list[bytes]]


class MessageRecorder(ABC):
    """Message commands of a rank, for a class that also derives from `RankBase`."""

    @abstractmethod
    def _messages_to_prefill(self, room: int, pages: list[int]) -> SentMessages:
        """Returns a registration, a room's metadata, its ABORT, and an unopened room's ABORT."""

    @abstractmethod
    def _messages_to_decode(self, room: int) -> SentMessages:
        """Returns statuses of success and of failure, and with Mooncake the room's aux data."""

    @abstractmethod
    def _drop_room(self, room: int) -> None:
        """Drops a finished room that has neither a sender nor a receiver."""

    def record_messages(self, room: int, pages: list[int]) -> list[list[str]]:
        """Returns the messages that this rank would send for a room, frames in hexadecimal."""
        sent = (
            self._messages_to_decode(room)
            if self.is_prefill
            else self._messages_to_prefill(room, pages)
        )
        return [[bytes(frame).hex() for frame in frames] for frames in sent]

    def expect_status(self, room: int) -> dict:
        """Opens a room that a later message ends; see `await_status`."""
        self.manager.update_status(room, KVPoll.Bootstrapping)
        if not self.is_prefill:
            self.manager.required_prefill_response_num_table[room] = 1
            self.manager.prefill_response_tracker[room] = set()
        return {"state": "open"}

    def await_status(self, room: int, seconds: float) -> dict:
        """Waits for the room's last message; its sender's earlier messages have been read then."""
        over = (KVPoll.Success, KVPoll.Failed)
        if not wait_until(lambda: self.manager.check_status(room) in over, seconds, POLL_INTERVAL):
            return {"state": "hang"}
        self._drop_room(room)
        return {"state": "ended"}
