"""Queues chunks, which worker threads write by the transfer engine's synchronous calls.

scheduler: add_transfer_request    a lane for each group of decode ranks    worker threads
"""

from __future__ import annotations

import concurrent.futures
import logging
import time
from typing import Any

import numpy as np
import numpy.typing as npt
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.kv_layout import LayoutError, PeerPlan, TransferPlan
from sglang.srt.disaggregation.pd.copy_batches import write_copies
from sglang.srt.disaggregation.pd.peer_queue import PeerQueues

logger = logging.getLogger(__name__)


class TransferQueue(PeerQueues):
    """Queues a KV manager's chunks for the engine's sends; placed before `MooncakeStatus`.

    A chunk is the engine's object: `room`, `prefill_kv_indices`, `index_slice` (its place among all
    pages of the request), `is_last`, and in the last one `prefill_aux_index` and `state_indices`. A
    last chunk without `prefill_aux_index` concludes a failed room.
    """

    def _enqueue(self, chunk: Any) -> None:
        """Queues a chunk for its decode ranks; does nothing if none has requested the room."""
        if self.transfer_infos.get(chunk.room):
            self.transfer_queues[0].put(chunk)

    def transfer_worker(self, queue: Any, executor: concurrent.futures.ThreadPoolExecutor) -> None:
        """Sends chunk after chunk. An error fails the chunk's room and never stops this thread."""
        while True:
            chunk = queue.get()
            try:
                self._send_chunk(chunk, executor)
            except Exception as error:
                logger.exception(f"Room {chunk.room}: could not send KV")
                reason = f"Prefill could not send KV: {error}"
                try:
                    self._send_conclusion(chunk.room, KVPoll.Failed, reason)
                except Exception:
                    logger.exception(f"Room {chunk.room}: could not notify decode")

    def _send_chunk(self, chunk: Any, executor: concurrent.futures.ThreadPoolExecutor) -> None:
        if self.request_status.get(chunk.room, KVPoll.Failed) == KVPoll.Failed:
            self._send_conclusion(chunk.room, KVPoll.Failed)
            return
        if chunk.is_last and chunk.prefill_aux_index is None:
            return  # the chunk concludes an earlier request with this room
        self.note_chunk(chunk.room, chunk.index_slice, chunk.prefill_kv_indices)
        for req in list(self.transfer_infos.get(chunk.room, {}).values()):
            if not req.is_dummy:
                self._send_to_peer(req, chunk, executor)
        if chunk.is_last:
            self._send_conclusion(chunk.room, KVPoll.Success)

    def _send_to_peer(
        self, req: Any, chunk: Any, executor: concurrent.futures.ThreadPoolExecutor
    ) -> None:
        session, dst_pages = self._peer_name(req), req.dst_kv_indices[chunk.index_slice]
        info = self.decode_kv_args_table[session]

        def check(what: str, status: int) -> None:
            if status != 0:
                req.unsettled_until = time.monotonic() + self.unsettled_seconds
                raise RuntimeError(
                    f"the transfer engine returned {status} for {what} to decode session {session}"
                )

        with self.back_off.attempt(session):
            pages = (chunk.prefill_kv_indices, info.dst_kv_ptrs, dst_pages)
            check("KV", self.send_kvcache(session, *pages, executor))
            if not chunk.is_last:
                return
            if chunk.state_indices is not None:
                state = (req, chunk.state_indices, info.dst_state_data_ptrs, executor, info)
                check("state", self.maybe_send_extra(*state))
            check("metadata", self.send_aux(req, chunk.prefill_aux_index, info.dst_aux_ptrs))
        req.digests = self.room_digests(chunk.room, info, chunk.state_indices)

    def _plan_for(self, session: str) -> PeerPlan:
        info = self.decode_kv_args_table[session]
        if info.plan is None:
            raise LayoutError(info.refusal)
        return info.plan

    def _transfer(
        self,
        session: str,
        plan: TransferPlan,
        src_pages: npt.NDArray[np.int32],
        dst_pages: npt.NDArray[np.int32],
        executor: concurrent.futures.ThreadPoolExecutor,
    ) -> int:
        copies = plan.copies(src_pages, dst_pages)
        in_threads = self.enable_custom_mem_pool
        return write_copies(self.engine, session, copies, executor, plan.is_sliced, in_threads)
