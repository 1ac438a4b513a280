"""Keeps pipeline stages in step: prefill's start the same requests, and decode's end the same."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.pd.per_instance import PerInstance

if TYPE_CHECKING:
    from sglang.srt.disaggregation.common.conn import CommonKVReceiver
    from sglang.srt.managers.scheduler_pp_mixin import EngineSchedulerPPMixin

RENAMED = (("SchedulerPPMixin", "EngineSchedulerPPMixin"),)

FAILED_ON_STAGE = "the request failed on another pipeline stage, whose log has the reason"


class SchedulerPPMixin(EngineSchedulerPPMixin):
    # What earlier stages have done and this one still must do: requests to admit, and to drop.
    postponed_rids: list[list[str]] = PerInstance(lambda: [[], []])
    # Requests that earlier stages have ended, and of which this one still holds the pages.
    unended_rids: list[str] = PerInstance(list)

    def process_bootstrapped_queue(self, *decided: list[list[str]] | None) -> Any:
        """Prefill: takes the requests that the stages have decided on out of the bootstrap queue.

        Extends the engine's if it takes what they have decided, as before 0.5.22: it also drops a
        request that has failed on this stage since it voted. The stages before this one may compute
        that request. All stages drop it once they have voted again.

        Args:
            decided: The requests to compute and those to drop; None in a round without an exchange;
                nothing from 0.5.22 on, where the stages decide elsewhere.

        Returns:
            What the engine's returns; before 0.5.22 the requests that this stage computes, and all
            to drop, also those that only a later stage has.
        """
        if decided in ((), (None,)):
            return super().process_bootstrapped_queue(*decided)
        to_compute, to_drop = decided[0]
        queue = self.disagg_prefill_bootstrap_queue
        waiting = queue.queue
        named = {*to_compute, *to_drop}
        decided_on = [one for one in waiting if one.rid in named]
        queue.queue = decided_on
        computed, _ = super().process_bootstrapped_queue(*decided)
        ended = {id(one) for one in decided_on} - {id(one) for one in queue.queue}
        queue.queue = [one for one in waiting if id(one) not in ended]
        return [computed, to_drop]

    def process_prealloc_queue(
        self, prealloc_rids: list[list[str]] | None
    ) -> list[list[str]] | None:
        """Decode: admits the requests that are ready on all stages; drops those that failed on one.

        Extends the engine's, by which a later stage that lacks memory for a request just then, as
        while prefill may still write to pages of one that failed, never admits it: the first stage
        names it only once.

        Args:
            prealloc_rids: The requests to admit, and those to drop; None in a round without an
                exchange.

        Returns:
            Which of these this stage has admitted and dropped, for the next stage; None for None.
        """
        if prealloc_rids is None or self.pp_group.is_first_rank:
            return super().process_prealloc_queue(prealloc_rids)
        held = {request.req.rid for request in self.disagg_decode_prealloc_queue.queue}
        wanted = [
            [*(rid for rid in before if rid in held), *rids]
            for before, rids in zip(self.postponed_rids, prealloc_rids, strict=True)
        ]
        done = super().process_prealloc_queue(wanted)
        ended = {rid for rids in done for rid in rids}
        self.postponed_rids = [[rid for rid in rids if rid not in ended] for rids in wanted]
        return done

    def _pp_pd_get_decode_transferred_ids(self) -> list[list[str]]:
        """Decode: returns requests that are over on all stages so far, and those that failed.

        Replaces the engine's, which returns no failures, and does not wait for metadata.
        """
        queue = self.disagg_decode_transfer_queue
        poll = queue._poll_with_staging if queue.enable_staging else queue._poll_with_metadata_gate
        status = {one.req.rid: state for one, state in zip(queue.queue, poll())}
        failed = {rid for rid, state in status.items() if state == KVPoll.Failed}
        over = failed | {rid for rid, state in status.items() if state == KVPoll.Success}
        if not self.pp_group.is_first_rank:
            over_before, failed_before = map(set, self._pp_recv_pyobj_from_prev_stage())
            queued = {one.req.rid for one in self.disagg_decode_prealloc_queue.queue}
            # Their clients left while this stage had no memory for them.
            gone = over_before - status.keys() - queued
            over = (over & over_before) | gone
            failed |= failed_before
            failed |= gone
        return [sorted(over), sorted(failed)]

    def process_decode_transfer_queue(
        self, release_rids: list[list[str]] | None
    ) -> list[list[str]] | None:
        """Decode: ends the requests that are over on all stages; fails those that failed on one.

        Extends the engine's, which returns no failed request, so that later stages keep its pages.
        A later stage ends a request of which it holds the pages in a later round: the first one
        names it only once.

        Args:
            release_rids: The requests that are over, and those that failed on a stage; None in a
                round without an exchange.

        Returns:
            Which requests this stage has ended, for the next stage to do the same, and those that
            failed; None for None.
        """
        if release_rids is None:
            return super().process_decode_transfer_queue(None)
        over, failed = release_rids
        over = [*self.unended_rids, *over]
        queue = self.disagg_decode_transfer_queue
        for request in queue.queue:
            if request.req.rid in failed and request.kv_receiver.poll() != KVPoll.Failed:
                _fail(request.kv_receiver)  # also if this stage would wait for its time-out
        # Stages may have admitted these in different orders, and must run them in the same one.
        queue.queue.sort(key=lambda request: request.req.rid)
        super().process_decode_transfer_queue(over)
        left = {request.req.rid for request in queue.queue}
        if not self.pp_group.is_first_rank:
            self.unended_rids = [rid for rid in over if rid in left]
        return [[rid for rid in over if rid not in left], failed]


def _fail(receiver: CommonKVReceiver) -> None:
    receiver.abort()
    receiver.kv_mgr.record_failure(receiver.bootstrap_room, FAILED_ON_STAGE)
