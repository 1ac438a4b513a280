"""Keeps pipeline stages in step: all take and drop the same requests, whatever one learns."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.pd.rank_consensus import pinned_polls
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.managers.utils import get_logprob_dict_from_result

if TYPE_CHECKING:
    import torch
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.utils import GenerationBatchResult


class SchedulerPPMixin:
    def process_bootstrapped_queue(self: Scheduler, bootstrapped_rids: list[list[str]] | None):
        """Prefill: takes the requests that all stages can take, drops those that failed on one.

        `bootstrapped_rids` has the ids to take and those to drop. Returns what this stage did, for
        the next one to do the same; None for None.
        """
        if bootstrapped_rids is None:
            return None
        good, failed = bootstrapped_rids
        queue = self.disagg_prefill_bootstrap_queue
        requests = [(req.rid, req.disagg_kv_sender) for req in queue.queue]
        with pinned_polls(requests, dict.fromkeys(good, KVPoll.WaitingForInput), failed):
            taken, dropped = queue.pop_bootstrapped(True, [*good, *failed])
        self.waiting_queue.extend(taken)
        return [[req.rid for req in taken], [req.rid for req in dropped]]

    def _pp_pd_get_decode_transferred_ids(self: Scheduler) -> list[list[str]]:
        """Decode: returns requests concluded on all stages so far, and which of them failed."""
        queue = self.disagg_decode_transfer_queue.queue
        done, failed = map(set, self.get_rids(queue, False, [KVPoll.Success], [KVPoll.Failed]))
        over = done | failed
        if not self.pp_group.is_first_rank:
            over_before, failed_before = map(set, self._pp_recv_pyobj_from_prev_stage())
            over &= over_before
            failed |= failed_before
        return [sorted(over), sorted(failed & over)]

    def process_prealloc_queue(self: Scheduler, prealloc_rids: list[list[str]] | None):
        """Decode: preallocates the requests that all stages can, drops those that failed on one.

        Takes no request while retracted ones wait. Arguments and result are those of
        `process_bootstrapped_queue`.
        """
        queue = self.disagg_decode_prealloc_queue
        if queue.retracted_queue:
            return [[], []]
        if prealloc_rids is None:
            return None
        good, failed = prealloc_rids
        requests = [(one.req.rid, one.kv_receiver) for one in queue.queue]
        for one in queue.queue:
            # The queue does not poll a request again once it waits for input.
            one.waiting_for_input &= one.req.rid not in failed
        with pinned_polls(requests, dict.fromkeys(good, KVPoll.WaitingForInput), failed):
            taken, dropped = queue.pop_preallocated([*good, *failed])
        self.disagg_decode_transfer_queue.extend(taken)
        return [[one.req.rid for one in taken], [one.req.rid for one in dropped]]

    def process_decode_transfer_queue(self: Scheduler, release_rids: list[list[str]] | None):
        """Decode: concludes the requests that are over on all stages; fails those that one failed.

        `release_rids` has the ids that are over, and those of them that failed. Returns what this
        stage did, for the next one to do the same; None for None.
        """
        if release_rids is None:
            return None
        over, failed = release_rids
        queue = self.disagg_decode_transfer_queue
        requests = [(one.req.rid, one.kv_receiver) for one in queue.queue]
        with pinned_polls(requests, dict.fromkeys(over, KVPoll.Success), failed):
            taken = queue.pop_transferred(over)
        # Requests aborted on all stages after the stages had agreed that they are done.
        aborted = {
            rid for rid, receiver in requests if getattr(receiver, "aborted_by_engine", False)
        }
        for req in taken:
            if req.rid in aborted:
                req.to_finish = FINISH_ABORT()
        self.waiting_queue.extend(taken)
        left = {one.req.rid for one in queue.queue}
        return [[rid for rid in rids if rid not in left] for rids in release_rids]

    def _pp_prepare_tensor_dict(
        self: Scheduler, result: GenerationBatchResult, batch: ScheduleBatch
    ) -> dict[str, torch.Tensor]:
        """Returns the last stage's results; requests fresh from prefill have no logprobs."""
        found = {"next_token_ids": result.next_token_ids}
        if batch.return_logprob and result.logits_output is not None:
            found.update(get_logprob_dict_from_result(result))
        return found
