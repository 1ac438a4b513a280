"""What a rank would say to the other side, and that it has read all that was said to it."""

from abc import ABC, abstractmethod

from rank_base import POLL_INTERVAL
from sglang.srt.disaggregation.base import KVPoll

from pd_harness.polling import wait_until

SentMessages = list[list[bytes]]


class MessageRecorder(ABC):
    """A rank, beside `RankBase`."""

    @abstractmethod
    def _messages_to_prefill(self, room: int, pages: list[int]) -> SentMessages:
        """A registration, an open room, and ABORTs of a room that was opened and that was not."""

    @abstractmethod
    def _messages_to_decode(self, room: int) -> SentMessages:
        """The room's end, good and bad, and of Mooncake its metadata."""

    @abstractmethod
    def _drop_room(self, room: int) -> None:
        """Drop a room that is over, and has neither sender nor receiver."""

    def record_messages(self, room: int, pages: list[int]) -> list[list[str]]:
        """What this rank would send for a room, each frame in hexadecimal; nobody gets it."""
        sent = (
            self._messages_to_decode(room)
            if self.is_prefill
            else self._messages_to_prefill(room, pages)
        )
        return [[bytes(frame).hex() for frame in frames] for frames in sent]

    def expect_status(self, room: int) -> dict:
        """Open a room that a message is to end."""
        self.manager.update_status(room, KVPoll.Bootstrapping)
        if not self.is_prefill:
            self.manager.required_prefill_response_num_table[room] = 1
            self.manager.prefill_response_tracker[room] = set()
        return {"state": "open"}

    def await_status(self, room: int, seconds: float) -> dict:
        """Wait for that message, with which all that its sender sent before has been read."""
        over = (KVPoll.Success, KVPoll.Failed)
        if not wait_until(lambda: self.manager.check_status(room) in over, seconds, POLL_INTERVAL):
            return {"state": "hang"}
        self._drop_room(room)
        return {"state": "ended"}
