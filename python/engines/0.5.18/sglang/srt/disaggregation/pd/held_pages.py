"""Decode keeps a failed room's pages until prefill writes no more. Later engines do so themselves.

fails on any TP rank       each rank aborts the room on its prefill ranks; polls: still transferring
prefill ranks acknowledge  once none of their workers has a chunk of the room
all have, on all TP ranks  the request fails, and the scheduler frees its pages
after 30 s                 the same: a stock prefill rank acknowledges nothing, nor does one that
                           does not know whether its writes are over
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
import zmq
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.pd.environment import seconds_of
from sglang.srt.disaggregation.pd.peer_sockets import PeerSocket
from sglang.srt.disaggregation.pd.room_failures import abort_message
from sglang.srt.disaggregation.pd.unit_exchange import InterleavingReceiver
from sglang.srt.disaggregation.pd.verify_exchange import VerifyingReceiver

logger = logging.getLogger(__name__)

ACK = b"ABORT_ACK"
# Later releases have the same variable.
RELEASE_VARIABLE = "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT"
RELEASE_SECONDS = 30.0


def read_release_seconds() -> float:
    """Returns how long decode keeps a failed room's pages; raises as `seconds_of`."""
    return seconds_of(RELEASE_VARIABLE, RELEASE_SECONDS, 0.0)


def ack_message(room: int, sender: int, generation: int) -> list[bytes]:
    """Returns the frames by which a prefill rank acknowledges decode's abort of a room."""
    return [ACK, b"%d" % room, b"%d" % sender, b"%d" % generation]


class AckInbox:
    """Which prefill ranks have acknowledged the abort of each room that is kept."""

    def __init__(self):
        # By room: its abort's number, unlike that of an earlier request, and the prefill ranks.
        self.rooms: dict[int, tuple[int, set[int]]] = {}
        self._generations = itertools.count(1)

    def begin(self, room: int) -> int:
        """Returns the number of a new abort of a room."""
        generation = next(self._generations)
        self.rooms[room] = (generation, set())
        return generation

    def count(self, room: int) -> int:
        """Returns how many prefill ranks have acknowledged the room's abort."""
        return len(self.rooms[room][1]) if room in self.rooms else 0

    def store(self, frames: list[bytes]) -> bool:
        """Stores an acknowledgement; returns whether the message is one.

        Ignores that of a stock prefill rank, which does not wait for its writes.
        """
        if frames[0] != ACK:
            return False
        if len(frames) > 3:
            room, sender, generation = (int(frame) for frame in frames[1:4])
            known = self.rooms.get(room)
            if known is not None and known[0] == generation:
                known[1].add(sender)
        return True


class RankSocket:
    """Sends to a prefill rank; notes who may know the pages, adds our frames to registrations."""

    def __init__(self, receiver: HoldingReceiver, info: dict):
        self.receiver, self.info = receiver, info

    def send_multipart(self, frames: Sequence[bytes]) -> None:
        """Queues a message, without waiting.

        Raises:
            zmq.Again: The rank is silent, for which this and all later messages would only queue
                up; its room has failed. Or see `PeerSocket.send_multipart`.
        """
        if self.receiver.fails_for_silence_of(self.info):
            raise zmq.Again
        is_registration = b"None" in frames[:2]
        if is_registration and self.info.get("reads_layouts"):
            frames = [*frames, *self.receiver.kv_mgr.own_frames()]
        PeerSocket.to(self.info["rank_ip"], self.info["rank_port"]).send_multipart(frames)
        if not is_registration and self.info not in self.receiver.requested:
            self.receiver.requested += (self.info,)


class HoldingReceiver(VerifyingReceiver, InterleavingReceiver):
    """Base of a decode rank's KV receiver, before a backend's.

    Attributes:
        is_requested: Whether it was requested from prefill, or that was tried.
        requested: The prefill ranks that may know its pages.
        held_until: Until when they are kept, on the monotonic clock; None before the room fails.
    """

    is_requested = False
    requested: tuple[dict, ...] = ()
    held_until: float | None = None

    def _connect_to_bootstrap_server(self, bootstrap_info: dict):
        return RankSocket(self, bootstrap_info), contextlib.nullcontext()

    def send_metadata(self, *where, **more):
        """Sends the metadata. Extends the engine's: notes which prefill ranks are awaited."""
        infos = getattr(self, "bootstrap_infos", None)
        self.is_requested = bool(infos)
        super().send_metadata(*where, **more)
        if self.init_time is not None:
            self.kv_mgr.requested_ranks[self.bootstrap_room] = infos

    def _send_abort_notification(self):
        """Aborts the room on its prefill ranks, which acknowledge it once they write no more."""
        manager, room = self.kv_mgr, self.bootstrap_room
        place, generation = (manager.local_ip, manager.rank_port), manager.acks.begin(room)
        for info in self.bootstrap_infos:
            awaited = generation if info in self.requested else None
            with contextlib.suppress(zmq.ZMQError):  # it is gone, or silent
                socket = PeerSocket.to(info["rank_ip"], info["rank_port"])
                socket.send_multipart(abort_message(room, place, awaited))

    def is_held(self) -> bool:
        """Whether the pages of the room, which has failed on some rank, must be kept for now."""
        if not self.is_requested or self.is_cleared:
            return False
        if not self.abort_notified:
            self._send_abort_notification()
            self.abort_notified = True
        now = time.monotonic()
        if self.held_until is None:
            self.held_until = now + self.kv_mgr.release_seconds
        waits = self.kv_mgr.acks.count(self.bootstrap_room) < len(self.requested)
        if waits and now >= self.held_until:
            logger.warning(
                f"Room {self.bootstrap_room}: not all prefill ranks have acknowledged that they "
                f"write no more within {self.kv_mgr.release_seconds:g} s ({RELEASE_VARIABLE})"
            )
        return waits and now < self.held_until

    def clear(self) -> None:
        """Clears the room, once, see `PrefillReceiver.clear_once`."""
        self.clear_once(super().clear)
        manager, room = self.kv_mgr, self.bootstrap_room
        if room not in manager.request_status:  # else another request has it
            manager.acks.rooms.pop(room, None)

    def failure_exception(self):
        """Raises the reason. Extends the engine's: aborts the request on prefill, too."""
        self.takes_reason = True  # which the engine does after it clears the room
        self.abort_on_unknown_ranks()
        self.record_reason()
        super().failure_exception()


def keep_held(pollers: Sequence, polls: list[int], group: dist.ProcessGroup) -> list[int]:
    """Returns the polls of a group of ranks; a failed request whose pages are held is transferring.

    Args:
        pollers: Senders or receivers.
        polls: What the group has agreed on.
    """
    receivers = [getattr(getattr(one, "decode_req", one), "kv_receiver", one) for one in pollers]
    failed = [
        number
        for number, poll in enumerate(polls)
        if poll == KVPoll.Failed and hasattr(receivers[number], "is_held")
    ]
    if not failed:
        return polls
    held = torch.tensor([receivers[number].is_held() for number in failed], dtype=torch.uint8)
    dist.all_reduce(held, op=dist.ReduceOp.MAX, group=group)
    polls = list(polls)
    for number, is_held in zip(failed, held.tolist()):
        if is_held:
            polls[number] = int(KVPoll.Transferring)
    return polls
