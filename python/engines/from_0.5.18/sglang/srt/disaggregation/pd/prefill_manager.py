"""Prefill: what the KV managers of Mooncake, Ascend and NIXL override in the engine's."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.kv_layout import AuxPlan, LayoutError, PeerPlan, TransferPlan
from sglang.srt.disaggregation.pd.message_checks import check_metadata_message
from sglang.srt.disaggregation.pd.packing import make_packing_buffers
from sglang.srt.disaggregation.pd.peer_queue import PeerQueues, Peers
from sglang.srt.disaggregation.pd.peer_silence import SilenceWatch
from sglang.srt.disaggregation.pd.peers import chunk_refusal, is_dummy
from sglang.srt.disaggregation.pd.per_instance import PerInstance
from sglang.srt.disaggregation.pd.room_failures import (
    ABORTED,
    ABORTED_BY_DECODE,
    Endpoint,
    RoomFailures,
    parse_abort,
)
from sglang.srt.disaggregation.pd.unit_exchange import units_message
from sglang.srt.disaggregation.pd.verify_exchange import SentPages
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.environ import envs
from sglang.srt.utils.network import NetworkAddress

logger = logging.getLogger(__name__)

ENDED = (KVPoll.Success, KVPoll.Failed)
UNSENT = "Aborted before it was sent"


class PrefillManager(SilenceWatch, PeerQueues):
    """Base of a prefill rank's KV manager, before the engine's.

    `decode_kv_args_table` has the `PeerRegistration` of each decode rank. `verifier`, `sent_pages`,
    `status_lock` and `drop_reason` are `RankManager`'s.
    """

    failures: RoomFailures = PerInstance(RoomFailures)

    def make_packing(self) -> None:
        """Sets aside memory to pack rows in, once; the transfer engine must register it."""
        if self.disaggregation_mode == DisaggregationMode.PREFILL and self.packing is None:
            workers = envs.SGLANG_DISAGGREGATION_QUEUE_SIZE.get()
            self.kv_args.packing = make_packing_buffers(self.kv_args, workers)

    def plan_for(self, peer: str) -> PeerPlan | None:
        """Returns the plan for a decode rank; None if the engine sends its own way."""
        return getattr(self.decode_kv_args_table.get(peer), "plan", None)

    def aux_plan_for(self, peer: str) -> AuxPlan | None:
        """Returns the plan for a decode rank's metadata; None if the engine sends them."""
        plan = self.plan_for(peer)
        return plan.aux if plan is not None and plan.aux.widths else None

    def note_sending(self, peer: str, kind: str, plan: TransferPlan | None = None) -> None:
        """Notes what a worker sends next to a decode rank.

        Args:
            kind: `kv`, `state` or `aux`.
            plan: None if the engine sends in its own way.
        """
        if self.transfer_log.is_on:
            self.now_sending.set(peer, self.worker_state.room, kind, plan)

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
                interleaving = self._interleaving_peers(room)
                is_noted = self.verifier is not None or interleaving
                if is_noted and room in self.transfer_infos:
                    sent = self.sent_pages.setdefault(room, SentPages(interleaving))
                    sent.note(index_slice, kv_indices, options.get("state_indices"))
                chunk = (room, kv_indices, index_slice, is_last_chunk)
                super().add_transfer_request(*chunk, *more, **options)
                return
        except Exception as error:
            logger.exception(f"Room {room}: a chunk could not be queued")
            reason = f"Prefill could not send KV: {error!r}"
        self.conclude_failure(bootstrap_room=room, failure_reason=reason)

    def _interleaving_peers(self, room: int) -> frozenset[str]:
        """Returns the room's decode ranks that must interleave what they receive."""
        planned = self._planned_peers(room)
        return frozenset(peer for peer, _, plan in planned if plan.needs_interleaving)

    def _planned_peers(self, room: int) -> Iterator[tuple[str, object, PeerPlan]]:
        """Yields name, request and plan of each decode rank of the room that is sent to by plan."""
        for peer, info in list(self.transfer_infos.get(room, {}).items()):
            plan = None if is_dummy(info) else self.plan_for(peer)
            if plan is not None:
                yield peer, info, plan

    def _refusal_reason(self, room: int, index_slice: slice) -> str:
        """Returns why a chunk fails its room; "" if it does not."""
        if self.request_status.get(room, KVPoll.Failed) == KVPoll.Failed:
            return ""  # the room is over: none of its chunks is sent
        silent = self.silence_reason(room)
        if silent:
            return silent
        for peer, info in list(self.transfer_infos.get(room, {}).items()):
            known = self.decode_kv_args_table.get(peer)
            if known is None or is_dummy(info):  # see `_note_taken`
                continue
            why = chunk_refusal(known, index_slice, len(info.dst_kv_indices))
            if why:
                return why
        return ""

    def _note_queued(self, chunk: Any) -> Peers:
        # The engine's worker looks up the chunk's request by room, which may be another's by then.
        chunk.requests = self.transfer_infos.get(chunk.room)
        return super()._note_queued(chunk)

    def _is_left_over(self, chunk: Any) -> bool:
        """Returns whether a later request has the chunk's room, and must not get its pages."""
        requests = self.transfer_infos.get(chunk.room)
        return requests is not None and requests is not chunk.requests

    def _note_taken(self, chunk: Any) -> None:
        """Fails the room of a chunk that a worker takes, if its decode rank has not registered."""
        super()._note_taken(chunk)
        for peer, info in list(self.transfer_infos.get(chunk.room, {}).items()):
            if not is_dummy(info) and peer not in self.decode_kv_args_table:
                reason = (
                    f"decode {peer} requested room {chunk.room} and is not registered with this "
                    "prefill rank"
                )
                self.conclude_failure(bootstrap_room=chunk.room, failure_reason=reason)
                return

    def conclude_transfer(
        self,
        *,
        bootstrap_room: int,
        status: KVPoll,
        targets: list[Endpoint] | None = None,
        **more,
    ) -> KVPoll | None:
        """Concludes a room.

        Extends the engine's: first sends which chunks decode must interleave, and digests to decode
        ranks that compare, and notes which decode ranks are notified. The engine sets the room's
        status before it notifies them, and the scheduler may be done with the room in between.

        Args:
            targets: Decode ranks to notify; None for all that requested the room.
        """
        if status == KVPoll.Success:
            try:
                self._send_units(bootstrap_room)
            except Exception as error:  # without them, decode would serve wrong tokens
                reason = f"Prefill could not notify decode of the chunks to interleave: {error!r}"
                return self.conclude_failure(bootstrap_room=bootstrap_room, failure_reason=reason)
            if self.verifier is not None:
                self._send_digests(bootstrap_room)
        if targets is None:
            targets = self._room_notify_targets(bootstrap_room)
        self.failures.note_notified(bootstrap_room, targets)
        concluded = super().conclude_transfer(
            bootstrap_room=bootstrap_room, status=status, targets=targets, **more
        )
        if bootstrap_room not in self.request_status:  # the scheduler has just cleared it
            self.drop_reason(bootstrap_room)
        return concluded

    def _send_units(self, room: int) -> None:
        """Names what an open room has sent as whole rows to each decode rank that waits for it.

        Also if that is nothing: decode must notice if the message is lost.
        """
        if self.request_status.get(room, KVPoll.Failed) == KVPoll.Failed:
            return
        rank, sent = self._prefill_unique_rank(), self.sent_pages.get(room, SentPages())
        if sent.interleaving != self._interleaving_peers(room) and sent.chunks:
            raise LayoutError("decode was released, or registered anew, while KV was sent")
        for peer, info in list(self.transfer_infos.get(room, {}).items()):
            known = self.decode_kv_args_table.get(peer)
            if is_dummy(info) or known is None or not known.awaits_units:
                continue
            units = sent.units if peer in sent.interleaving else []
            self._send_to_decode(info, units_message(room, rank, self.attn_tp_size, units))

    def _send_digests(self, room: int) -> None:
        """Sends digests of what an open room has sent, to each decode rank that compares them."""
        sent = self._open_room_pages(room)
        if sent is None:
            return
        rank = self._prefill_unique_rank()
        for peer, info, plan in self._planned_peers(room):
            if not plan.layout.verifies:
                continue
            try:
                self._send_to_decode(info, sent.message(room, rank, self.verifier, plan))
            except Exception as error:
                logger.warning(f"Room {room}: could not send digests to decode {peer}: {error}")

    def _open_room_pages(self, room: int) -> SentPages | None:
        is_open = self.request_status.get(room, KVPoll.Failed) != KVPoll.Failed
        return self.sent_pages.get(room) if is_open else None

    def _send_to_decode(self, info, frames: list[bytes]) -> None:
        address = NetworkAddress(info.endpoint, info.dst_port)
        self._send_multipart_locked(address.to_tcp(), frames, is_ipv6=address.is_ipv6)

    def _prefetch_staging_reqs(self, room: int) -> None:
        """Prefetches staging buffers, once all of the room's decode ranks have requested it.

        Extends the engine's, which iterates over those ranks: none may be added meanwhile.
        """
        if self.request_status.get(room) not in (KVPoll.Failed, KVPoll.Bootstrapping):
            super()._prefetch_staging_reqs(room)

    def poison_deferred_ack_room(self, room: int) -> None:
        """Marks a room that may still be written to. Extends the engine's: keeps the last ones.

        The engine forgets a room only when it is reused.
        """
        super().poison_deferred_ack_room(room)
        oldest = self.failures.keep_poisoned(room)
        if oldest is not None:
            self._deferred_ack_poisoned_rooms.discard(oldest)
            self._staging_outstanding.pop(oldest, None)
        if room not in self.request_status:  # cleared: nobody asks for the reason
            self.drop_reason(room)

    def refuse(self, room: int, reason: str) -> None:
        """Fails a request without a sender; notifies decode ranks now, or when they request it."""
        self.transfer_log.rejected(room, reason)
        self.drop_collected_rooms()
        self.failures.run_when_stored(room, functools.partial(self._refuse, room, reason))

    def _refuse(self, room: int, reason: str) -> None:
        if room in self.failures.senders:  # another request has the room
            return
        aborted_by = self.failures.rooms_without_sender.pop(room, set())
        self.fail_room(room, reason, aborted_by)
        self._drop_room(room)

    def drop_collected_rooms(self) -> None:
        """Drops rooms whose senders were garbage-collected without being cleared.

        Call it before anything else: what arrives for such a room concerns another request.
        """
        with self.failures.lock:  # until a room is dropped, no message for it may be stored
            for room, notified in self.failures.take_collected():
                drop = functools.partial(self._drop_collected_room, room, notified)
                self.failures.run_when_stored(room, drop)

    def _drop_collected_room(self, room: int, notified: set[Endpoint]) -> None:
        if room in self.failures.senders:  # another request has the room
            return
        self.transfer_log.dropped(room, self.failure_records.get(room, UNSENT))
        status = self.request_status.get(room)
        if status not in (None, KVPoll.Bootstrapping, KVPoll.Success):
            # It failed, or the scheduler has dropped a request for which decode waits.
            self.fail_room(room, self.failure_records.get(room, ABORTED), notified)
        self._drop_room(room)
        self._drop_chunk_count(room)

    def check_peers(self) -> None:
        """Checks decode ranks. Extends `SilenceWatch`'s: also drops collected senders' rooms.

        Without other requests, nothing else would, and decode would wait.
        """
        self.drop_collected_rooms()
        super().check_peers()

    def fail_room(self, room: int, reason: str, notified: set[Endpoint]) -> None:
        """Notifies decode ranks that a request failed, now or when they request its room.

        Ranks that have requested it, and to which writes may go on, wait for their time-out.

        Args:
            notified: Decode ranks that know it or are being notified.
        """
        self.failures.record_failed_room(room, reason, notified)
        targets = self.failures.take_unnotified(room, self._room_notify_targets(room))
        if self.is_release_safe(room):
            self._send_failed_status(room, targets, reason)

    def is_release_safe(self, room: int) -> bool:
        """Returns whether decode may be notified that a room failed, and so free its pages.

        Without deferred release, decode would not wait until writes to them are over; in a poisoned
        room, nobody knows whether they are.
        """
        return (
            self.enable_deferred_decode_kv_release and room not in self._deferred_ack_poisoned_rooms
        )

    def _send_failed_status(self, room: int, targets: list[Endpoint], reason: str) -> None:
        self.send_kv_status_message(
            targets=targets, bootstrap_room=room, status=KVPoll.Failed, failure_reason=reason
        )

    def _encode_kv_status_message(
        self, *, bootstrap_room: int, status: KVPoll, failure_reason: str | None
    ) -> list[bytes]:
        """Returns a status message's frames. Extends the engine's: replaces what UTF-8 lacks.

        A client's text may have half of a surrogate pair.
        """
        reason = (failure_reason or "").encode("utf-8", "replace").decode("utf-8")
        return super()._encode_kv_status_message(
            bootstrap_room=bootstrap_room, status=status, failure_reason=reason
        )

    def _drop_room(self, room: int) -> None:
        with self.status_lock:
            tables = (self.request_status, self.transfer_infos, self.req_to_decode_prefix_len)
            for table in (*tables, self.sent_pages):
                table.pop(room, None)
        self.drop_reason(room)  # last: with a status, another thread could record it again

    def _maybe_ack_drained_abort(self, room: int) -> None:
        """Acknowledges a drained abort. Extends the engine's: drops the room's chunk count."""
        super()._maybe_ack_drained_abort(room)
        self._drop_chunk_count(room)

    def _drop_chunk_count(self, room: int) -> None:
        """Drops the chunk count of a room that has ended, once no chunk is left."""
        if room not in self.request_status and self._staging_outstanding.get(room, 1) <= 0:
            self._staging_outstanding.pop(room, None)

    def reject_failed_room(self, room: int, decode: Endpoint | None) -> bool:
        """Returns whether the room that a decode rank requests has failed; notifies it if so.

        On False, call `failures.end_message` once the engine has stored the request.

        Args:
            decode: The rank; None if it is sent nothing, and is not notified.
        """
        self.drop_collected_rooms()
        reason = self.failures.begin_message(room, decode)
        if reason is not None:
            self._send_failed_status(room, [decode], reason)
        return reason is not None

    def reject_request(self, name: str, info: Any) -> bool:
        """Returns whether the room that a decode rank requests has failed; see above.

        Args:
            name: The rank's session id or NIXL agent name.
            info: The request.

        Raises:
            ValueError: The request has negative numbers.
        """
        check_metadata_message(info)
        self.note_metadata_sender(name)
        decode = None if is_dummy(info) else (info.endpoint, info.dst_port)
        return self.reject_failed_room(info.room, decode)

    def _handle_abort_notification(self, msg: list[bytes]) -> bool:
        """Handles an abort. Extends the engine's: the aborting rank is not notified of it."""
        self.drop_collected_rooms()
        room, decode, _ = parse_abort(msg)
        if decode is not None:
            self.failures.note_abort(room, decode)
        if self.request_status.get(room) not in (None, KVPoll.Success):
            # The scheduler may close the room as soon as the engine has failed it.
            self.transfer_log.failed(room, ABORTED_BY_DECODE)
        is_taken = super()._handle_abort_notification(msg)
        if room in self.transfer_infos:
            self._fail_incomplete_room(room)
        self.track_room_without_sender(room, decode)
        return is_taken

    def _fail_incomplete_room(self, room: int) -> None:
        """Fails an aborted room that not all of its decode ranks have requested.

        The engine would forget the abort, and the request that is still to come would wait for
        them.
        """
        with self.status_lock:  # under which a cleared sender drops both entries
            if room in self.transfer_infos and room not in self.request_status:
                self.request_status[room] = KVPoll.Failed

    def track_room_without_sender(
        self, room: int | None, aborted_by: Endpoint | None = None
    ) -> None:
        """Keeps the engine's entries for the most recent rooms without a request.

        Args:
            aborted_by: The decode rank that aborts the room, and is not notified that it fails.
        """
        with self.failures.lock:
            if room in self.request_status or room in self.transfer_infos:
                oldest = self.failures.keep_without_sender(room, aborted_by)
                if oldest is not None:
                    drop = functools.partial(self._drop_room_without_sender, oldest)
                    self.failures.run_when_stored(oldest, drop)

    def _drop_room_without_sender(self, room: int) -> None:
        if room not in self.failures.senders:  # else a request has come meanwhile
            self._drop_room(room)

    def note_metadata_sender(self, name: str) -> None:
        """Notes that a decode rank that requests a room is alive."""
        info = self.decode_kv_args_table.get(name)
        if info is not None:
            self.note_peer_alive(name, info)

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
        kept = self.failures.rooms_without_sender
        rooms = list(self.transfer_infos.items())
        open_rooms = [list(peers) for room, peers in rooms if room not in kept]
        return set().union(*open_rooms, *(queue.busy_peers() for queue in self.transfer_queues))

    def handle_peer_recovered(self, name: str) -> None:
        """Called when a silent decode rank answers again; does nothing unless overridden."""
