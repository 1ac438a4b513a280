"""Mooncake's status messages: prefill ranks notify decode when their part of a room concludes.

    (room, status, sender's number, reason, digests)

The reason is for ranks that read it, digests are for ranks that compare them (`verify`).

Each prefill rank notifies each decode rank of the room once, when it writes no more.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable
from typing import Any, Dict, List, Optional, Set

import zmq
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.pd.message_checks import start_reader_thread
from sglang.srt.disaggregation.pd.room_failures import ENDED
from sglang.srt.utils import format_tcp_address, is_valid_ipv6_address

logger = logging.getLogger(__name__)


class MooncakeStatus:
    """Sends and reads a KV manager's status messages.

    The manager has `_peer_name(room_info)`; each room's information has `is_dummy`.
    """

    # Prefill

    def _send_conclusion(self, room: int, status: KVPoll, reason: str = "") -> None:
        """Notifies the room's decode ranks of how it concluded on this rank."""
        with self.rooms_lock:
            peers = self.transfer_infos.get(room, {})
            untold = [
                req for req in peers.values() if not (req.is_dummy or hasattr(req, "is_notified"))
            ]
            for req in untold:
                req.is_notified = True
            if room in self.request_status:
                if reason:
                    self.record_failure(room, reason)
                self.update_status(room, status)
            # Failed, if its request was aborted while its last chunk was written.
            status = self.check_status(room)
            # `close_failed_room` needs a failed room's peers, to record who was notified.
            if self.request_status.get(room) != KVPoll.Failed:
                self.transfer_infos.pop(room, None)
            known = self.failed_rooms.get(room)
            reason = (
                self.failure_records.get(room)
                or (known.reason if known else self.aborted_before_request.get(room))
                or reason
                or "another prefill rank failed"
            )
        for req in untold:
            self._notify_when_settled(req, status, reason)

    def _notify_when_settled(self, req: Any, status: KVPoll, reason: str) -> None:
        """Notifies decode when it may free its pages; a timer waits for that, not the caller."""
        seconds = getattr(req, "unsettled_until", 0.0) - time.monotonic()
        if seconds <= 0:
            self._send_status(req, status, reason)
            return
        later = threading.Timer(seconds, self._send_status, (req, status, reason))
        later.daemon = True
        try:
            later.start()
        except RuntimeError as error:  # out of threads: decode waits until its timeout
            logger.error(f"Room {req.room}: could not notify decode {req.endpoint}: {error}")

    def _send_status(self, req: Any, status: KVPoll, reason: str) -> None:
        frames = [str(number).encode("ascii") for number in (req.room, status, self.sender_rank)]
        known = self.decode_kv_args_table.get(self._peer_name(req))  # None if it was dropped
        if known is not None and known.reads_reasons:
            frames.append(reason.encode("utf-8", "backslashreplace"))
        if getattr(req, "digests", None) is not None:
            frames.append(req.digests)
        address = format_tcp_address(req.endpoint, req.dst_port)
        try:
            self._connect(address, is_valid_ipv6_address(req.endpoint)).send_multipart(frames)
        except zmq.ZMQError as error:
            logger.warning(f"Room {req.room}: could not notify decode {address}: {error}")

    def _notify_failed(self, room: int, peers: Dict[str, Any], reason: str) -> None:
        for req in peers.values():
            if not req.is_dummy:
                self._send_status(req, KVPoll.Failed, reason)

    def close_failed_room(self, room: int) -> str:
        """Drops a failed room and returns why it failed; notifies decode once no write runs."""
        with self.rooms_lock:
            reason = self.drop_room(room) or "another prefill rank failed"
            told: Iterable[str] = self.transfer_infos.get(room, ())
            self.record_failed_room(room, reason, told)
        self.conclude_failure(room, reason)
        return reason

    # Decode

    def read_status_messages(self) -> None:
        """Starts the thread that reads prefill ranks' messages and drops unreadable ones."""
        # Rooms requested from prefill, and those of them that one sender has failed while others
        # may still write.
        self.requested_rooms: Set[int] = set()
        self.failing_rooms: Set[int] = set()
        self.rebind_server_socket()
        start_reader_thread(self.server_socket, self._handle_decode_message)

    def _handle_decode_message(self, frames: List[bytes]) -> None:
        self._handle_status(frames)

    def _handle_status(self, frames: List[bytes]) -> None:
        room, status, sender, *reason = frames
        if int(status) not in ENDED:
            raise ValueError("not a status message")
        said = reason[0].decode("utf-8", "replace") if reason else "no reason given"
        digests = reason[1:2]
        with self.rooms_lock:
            if int(room) in self.requested_rooms:  # otherwise it has concluded
                failure = said if int(status) == KVPoll.Failed else None
                if digests:
                    self.arrived_digests[int(room)][int(sender)] = digests[0]
                self._count_status(int(room), int(sender), failure)

    def _count_status(self, room: int, sender: int, failure: Optional[str]) -> None:
        """Records a prefill rank's result, `failure` or None; concludes the room after the last."""
        if failure is not None:
            self.record_failure(room, f"Prefill failed: {failure}")
            self.failing_rooms.add(room)
        self.prefill_response_tracker[room].add(sender)
        needed = self.required_prefill_response_num_table[room]
        if len(self.prefill_response_tracker[room]) >= needed:
            failed = room in self.failing_rooms
            self.update_status(room, KVPoll.Failed if failed else KVPoll.Success)
