"""NIXL: threads pack chunks into whole rows and write them, which the scheduler must not wait for.

scheduler: start    a lane for each decode rank    threads: pack, write and wait, round by round

The last round brings the chunk's notification. Several threads send to the ranks of one decode
server, but never all of them: a thread waits for a rank that accepts nothing until it is silent.
"""

from __future__ import annotations

import logging
import threading
import time
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.pd.nixl_transfers import RoomFailed, Transfer
from sglang.srt.disaggregation.pd.packing import copies_of_unit
from sglang.srt.disaggregation.pd.peer_queue import PeerQueue, Peers

if TYPE_CHECKING:
    from sglang.srt.disaggregation.nixl.conn import NixlKVManager
    from sglang.srt.disaggregation.pd.peers import Pages

logger = logging.getLogger(__name__)

PACKING_THREADS = 4
POLL_SECONDS = 0.0005


@dataclass(eq=False)
class PackedTransfer(Transfer):
    """A chunk that is written in rounds; `outcome` is set after the last one.

    Attributes:
        what: Of which buffers `src_pages` and `dst_pages` are.
        server: The decode ranks of the room, which stop together if their server does.
    """

    what: Literal["kv", "state"] = "kv"
    src_pages: Pages = ()
    dst_pages: Pages = ()
    notification: bytes = b""
    server: Peers = frozenset()


class PackedSends:
    """A prefill rank's threads that pack."""

    def __init__(self, manager: NixlKVManager):
        self.manager = manager
        self.queue = PeerQueue(
            note_queued=lambda transfer: frozenset([transfer.peer]),
            note_taken=lambda transfer: None,
            server_of=lambda transfer: transfer.server,
            workers=PACKING_THREADS,
        )
        for number in range(PACKING_THREADS):
            name = f"nixl-packing-{number}"
            threading.Thread(target=self._work, name=name, daemon=True).start()

    def start(
        self,
        peer: str,
        room: int,
        what: Literal["kv", "state"],
        src_pages: Pages,
        dst_pages: Pages,
        notification: bytes,
    ) -> PackedTransfer:
        """Has a thread write a chunk to a decode rank.

        Raises:
            LayoutError: The two sides' pages do not match.
        """
        plan = getattr(self.manager.decode_kv_args_table[peer].plan, what)
        src, dst = plan.validate_pages(src_pages, dst_pages)
        more = {"what": what, "src_pages": src, "dst_pages": dst, "notification": notification}
        server = frozenset([peer, *self.manager.transfer_infos.get(room, ())])
        transfer = PackedTransfer(room, peer, handle=None, server=server, **more)
        with self.manager.agent_lock:
            self.manager.transfers.add(transfer)
        self.queue.put(transfer)
        return transfer

    def _work(self) -> None:
        while True:
            transfer = self.queue.get()
            try:
                outcome = self._send(transfer)
            except RoomFailed:
                outcome = "the room has failed"
            except Exception as error:
                logger.exception(f"Room {transfer.room}: could not send packed KV heads")
                outcome = str(error) or repr(error)
            with self.manager.agent_lock:
                transfer.outcome = outcome
                self.manager.transfers.discard(transfer)
            del transfer

    def _send(self, transfer: PackedTransfer) -> str:
        """Writes a chunk; returns why it failed, empty if it succeeded."""
        manager, room, peer = self.manager, transfer.room, transfer.peer
        plan = getattr(manager.decode_kv_args_table[peer].plan, transfer.what)
        pages = (transfer.src_pages, transfer.dst_pages)
        if transfer.abandon_reason:
            return transfer.abandon_reason
        if manager.check_status(room) == KVPoll.Failed:  # while the chunk was queued
            raise RoomFailed
        packing = manager.kv_args.packing
        # Closed at once, also by an error: the room's pages are read until then.
        with closing(copies_of_unit(packing, transfer.what, plan, *pages)) as unit:
            for copies, is_last in unit:
                if transfer.abandon_reason:  # the pages may be another request's
                    return transfer.abandon_reason
                if not len(copies):
                    if is_last:
                        manager._notify(peer, transfer.notification)
                    continue
                manager.now_sending.set(peer, room, transfer.what, plan)
                notification = transfer.notification if is_last else b""
                write = manager.start_copies(peer, room, copies, notification)
                while not self._is_over(write, transfer):
                    time.sleep(POLL_SECONDS)
                if write.abandon_reason:
                    return write.abandon_reason
                if write.outcome:
                    return write.outcome
        return ""

    def _is_over(self, write: Transfer, transfer: PackedTransfer) -> bool:
        """Whether a round is written, or is abandoned because its chunk is.

        A round of an abandoned chunk must be abandoned before its state is checked, or decode could
        conclude the room as a success: see `NixlTransfers._invalidate`.
        """
        with self.manager.agent_lock:
            if transfer.abandon_reason:
                self.manager.abandon(write, transfer.abandon_reason)
                return True
            return self.manager.has_finished(write)
