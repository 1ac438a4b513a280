"""Pipeline stages of one server in this process, with the engine's real queues and PP mixin.

The rest is a stand-in: a request's sender or receiver has the state that the test sets, and a
stage's output is passed to the next one directly. This works in the stock engine, too.
"""

import itertools
from collections import deque
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
from sglang.srt.disaggregation import decode as decode_module
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.decode import DecodePreallocQueue, DecodeRequest, DecodeTransferQueue
from sglang.srt.disaggregation.prefill import PrefillBootstrapQueue
from sglang.srt.disaggregation.utils import ReqToMetadataIdxAllocator, poll_and_all_reduce
from sglang.srt.managers.scheduler_pp_mixin import SchedulerPPMixin

# States of a sender or receiver, by the names that tests use.
STATES = {"failed": KVPoll.Failed, "ready": KVPoll.WaitingForInput, "done": KVPoll.Success}


class Poller:
    """Stands in for a sender or receiver; like the engine's, it never leaves a final state.

    Args:
        held: At how many polls, once it has failed, its pages may still be written to; of interest
            on 0.5.18 only.
    """

    bootstrap_room = 0

    def __init__(self, state: int, held: int = 0):
        self.state, self.held = state, held
        self.is_over = self.aborted_by_engine = False
        self.reason = ""
        self.kv_mgr = self  # which records the reason

    def set_state(self, state: str) -> None:
        if state == "aborted":
            self.aborted_by_engine = True
            return
        state = STATES[state]
        if self.state not in (KVPoll.Failed, KVPoll.Success) and not self.is_over:
            self.state = state

    def poll(self) -> int:
        return self.state

    def init(self, *args) -> None:
        """Does nothing, because no KV is sent."""

    def pop_decode_prefix_len(self) -> int:
        return 0

    def is_held(self) -> bool:
        self.held -= 1
        return self.held >= 0

    def abort(self) -> None:
        self.state = KVPoll.Failed

    def record_failure(self, room: int, reason: str) -> None:
        self.reason = reason

    def clear(self) -> None:
        self.is_over = True

    def failure_exception(self) -> None:
        self.is_over = True
        raise RuntimeError("as the test says")


class Request(SimpleNamespace):
    """Stands in for a `Req`, with the attributes that the queues use."""

    def __init__(self, rid: str, **more):
        super().__init__(
            rid=rid,
            bootstrap_room=int(rid),
            bootstrap_host="",
            origin_input_ids=[1, 2, 3],
            output_ids=[],
            return_logprob=False,
            finished_reason=None,
            to_finish=None,
            time_stats=mock.Mock(),
            add_latency=lambda stage: None,
            **more,
        )


class Stage(SchedulerPPMixin):
    """A stage's scheduler, reduced to what the exchange between stages needs."""

    def __init__(self, number: int, rids: list[str], slots: int, held: int = 0):
        self.pp_group = SimpleNamespace(is_first_rank=number == 0)
        self.attn_tp_cpu_group = self.attn_cp_cpu_group = dist.group.WORLD
        self.waiting_queue = []
        self.enable_metrics = self.enable_hicache_storage = False
        self.enable_decode_hicache = self.enable_hisparse = False
        self.metrics_reporter = SimpleNamespace(enable_metrics=False)
        self.server_args = SimpleNamespace(disaggregation_transfer_backend="nixl")
        self.stream_output = lambda reqs, return_logprob: None
        self.output_streamer = SimpleNamespace(stream_output=self.stream_output)
        self.previous_output = None
        self.pollers, self.held = {}, held
        self.free = ReqToMetadataIdxAllocator(slots)
        self._make_queues(rids)

    def _pp_recv_pyobj_from_prev_stage(self):
        return self.previous_output

    def accepted(self) -> list[str]:
        return [f"{req.rid}{' aborted' * bool(req.to_finish)}" for req in self.waiting_queue]


class PrefillStage(Stage):
    def _make_queues(self, rids: list[str]) -> None:
        queue = self.disagg_prefill_bootstrap_queue = object.__new__(PrefillBootstrapQueue)
        queue.__dict__.update(
            queue=[],
            gloo_group=dist.group.WORLD,
            req_to_metadata_buffer_idx_allocator=self.free,
            token_to_kv_pool=SimpleNamespace(page_size=1),
            scheduler=self,
            tp_rank=0,
            pp_size=2,  # more than one, as 0.5.18 asks
            kv_manager=None,  # it would note what happens
        )
        self.token_to_kv_pool_allocator = queue.token_to_kv_pool
        self.server_args.optimistic_prefill_attempts = 0
        for rid in rids:
            self.pollers[rid] = Poller(KVPoll.Bootstrapping)
            queue.queue.append(
                Request(
                    rid,
                    disagg_kv_sender=self.pollers[rid],
                    metadata_buffer_index=-1,
                    pending_bootstrap=True,
                    prefill_attempt_count=0,
                )
            )

    def handle_bootstrap_failure(self, req: Request) -> None:
        """Does nothing, because 0.5.18's scheduler only frees the request's memory."""

    def propose(self):
        return self._pp_pd_get_bootstrapped_ids()

    def decide(self, pinned_polls):
        return self.process_bootstrapped_queue(pinned_polls)

    def remaining(self) -> list[str]:
        return [req.rid for req in self.disagg_prefill_bootstrap_queue.queue]


class TransferStage(Stage):
    """A decode stage with requests whose KV is being transferred."""

    def _make_queues(self, rids: list[str]) -> None:
        self.rooms = torch.ones((len(rids), 1), dtype=torch.int64)  # metadata that has arrived
        self.free = ReqToMetadataIdxAllocator(len(rids))
        self.disagg_decode_prealloc_queue = object.__new__(DecodePreallocQueue)
        self.disagg_decode_prealloc_queue.queue = []
        self.disagg_decode_prealloc_queue.kv_manager = None
        queue = self.disagg_decode_transfer_queue = object.__new__(DecodeTransferQueue)
        queue.__dict__.update(
            queue=[],
            gloo_group=dist.group.WORLD,
            req_to_metadata_buffer_idx_allocator=self.free,
            scheduler=self,
            tree_cache=mock.Mock(),
            tp_rank=0,
            metadata_buffers=mock.Mock(bootstrap_room=self.rooms),
            enable_staging=False,
            enable_deferred_kv_release=False,
            _deferred_releases=[],
        )
        queue._commit_transfer_to_req = self._commit
        for rid in rids:
            self.pollers[rid] = Poller(KVPoll.WaitingForInput, self.held)
            queue.queue.append(
                DecodeRequest(
                    Request(rid), self.pollers[rid], metadata_buffer_index=self.free.alloc()
                )
            )

    @staticmethod
    def _commit(request: DecodeRequest) -> bool:
        request.kv_receiver.clear()
        return True

    def propose(self):
        return self._pp_pd_get_decode_transferred_ids()

    def decide(self, pinned_polls):
        return self.process_decode_transfer_queue(pinned_polls)

    def remaining(self) -> list[str]:
        return [one.req.rid for one in self.disagg_decode_transfer_queue.queue]


def group():
    """Returns a process group with this process as its only member."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return dist.group.WORLD


def poll(pollers: list) -> list[int]:
    """Polls as a scheduler does."""
    return poll_and_all_reduce(pollers, group())


def run_stages(
    kind: str,
    stages: int,
    rids: list[str],
    events: list,
    rounds: int,
    slots: int = 8,
    lag: int = 0,
    held: int = 0,
) -> list:
    """Runs the stages; returns [accepted requests, queued requests] of each one.

    In a round, the stages first propose one after the other, and then decide one after the other
    on what was proposed `lag` rounds before.

    Args:
        kind: `bootstrap` (prefill) or `transfer` (decode).
        stages: Number of stages.
        rids: Ids of the requests.
        events: [step, stage, rid, state] each: before that step, the stage's sender or receiver
            of the request gets that state; for `metadata`, the request's metadata arrives, which
            else has arrived from the start.
        slots: Metadata slots of each stage.
        held: At how many polls a decode stage holds a request that has failed there.
    """
    make = {"bootstrap": PrefillStage, "transfer": TransferStage}[kind]
    with mock.patch.object(decode_module, "release_kv_cache", mock.Mock()):
        group()
        fleet = [make(number, rids, slots, held) for number in range(stages)]
        for _, stage, rid, state in events:
            if state == "metadata":
                fleet[stage].rooms[rids.index(rid)] = 0
        steps = itertools.count()

        def apply_events() -> None:
            step = next(steps)
            for at, stage, rid, state in events:
                if at == step and state == "metadata":
                    fleet[stage].rooms[rids.index(rid)] = 1
                elif at == step:
                    fleet[stage].pollers[rid].set_state(state)

        proposed = deque()
        for _ in range(rounds):
            proposal = None
            for stage in fleet:
                apply_events()
                stage.previous_output = proposal
                proposal = stage.propose()
            proposed.append(proposal)
            if len(proposed) <= lag:
                continue
            decision = proposed.popleft()
            for stage in fleet:
                apply_events()
                decision = stage.decide(decision)
    return [[stage.accepted(), stage.remaining()] for stage in fleet]
