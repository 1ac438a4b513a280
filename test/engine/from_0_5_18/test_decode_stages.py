"""Decode's pipeline stages end the same requests in the same way, whatever each of them learns."""

from types import SimpleNamespace
from unittest import mock

import pp_stages
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.managers import scheduler_pp_mixin
from sglang.srt.managers.scheduler_pp_mixin import SchedulerPPMixin

pytestmark = pytest.mark.engine

RIDS = ["1", "2", "3"]
ROUNDS, STAGES = 3, 3
EVENTS = st.lists(
    st.tuples(
        st.integers(0, ROUNDS * STAGES * 2 - 1),  # the step
        st.integers(0, STAGES - 1),
        st.sampled_from(RIDS),
        st.sampled_from(["done", "failed", "metadata"]),
    ),
    max_size=16,
)


@settings(max_examples=300, deadline=None)
@given(events=EVENTS, lag=st.integers(0, 2), held=st.integers(0, 2))
def test_stages_always_end_the_same_requests(events, lag, held):
    # More rounds without events, so that all stages act on what one of them knows.
    sizes = (ROUNDS + 10, 8, lag, held)
    first, *others = pp_stages.run_stages("transfer", STAGES, RIDS, events, *sizes)
    assert all(other == first for other in others), (first, others)


def ended(events: list) -> list:
    """Returns [accepted, queued] of two stages after two rounds."""
    return pp_stages.run_stages("transfer", 2, RIDS, events, 2)


DONE = [[0, 0, "1", "done"], [0, 1, "1", "done"]]
FAILED = [[0, 0, "1", "failed"], [0, 1, "1", "failed"]]
# What the stages learn of request 1, and what each of them has accepted and still has queued.
CASES = {
    "success": (DONE, [["1"], ["2", "3"]]),
    "failure": (FAILED, [[], ["2", "3"]]),
    "failed on first": ([FAILED[0], DONE[1]], [[], ["2", "3"]]),
    "failed on last": ([DONE[0], FAILED[1]], [[], ["2", "3"]]),
    "no metadata on last": ([*DONE, [99, 1, "1", "metadata"]], [[], RIDS]),
}


@pytest.mark.parametrize("case", CASES)
def test_stages_agree(case):
    events, wanted = CASES[case]
    assert ended(events) == [wanted, wanted]


@pytest.mark.parametrize("case", list(CASES)[1:])
def test_stock_stages_diverge(stock, case):
    (found,) = stock(["run_stages", "transfer", 2, RIDS, CASES[case][0], 2])
    assert found[0] != found[1], found


@pytest.mark.parametrize("stage", range(3))
def test_stages_that_still_wait_learn_of_a_failure(stage):
    """What they wait for may never fail on its own, or only by a time-out of minutes."""
    found = pp_stages.run_stages("transfer", 3, RIDS, [[0, stage, "1", "failed"]], 3)
    assert found == [[[], ["2", "3"]]] * 3


@pytest.mark.parametrize("stages", [2, 3])
def test_stage_that_holds_pages_ends_their_request_later(stages):
    """The first stage has ended it by then, and names it no more."""
    done = [[0, stage, "1", "done"] for stage in range(1, stages)]
    events = [FAILED[0], *done]
    found = pp_stages.run_stages("transfer", stages, RIDS, events, 6, held=1)
    assert found == [[[], ["2", "3"]]] * stages


@pytest.mark.parametrize("is_first", [False, True])
def test_later_stage_still_ends_what_it_could_not_end_at_once(is_first):
    """It is told only once; the first stage names it again itself."""
    pp_stages.group()
    stage = pp_stages.TransferStage(0 if is_first else 1, RIDS, 8)
    assert stage.decide([["1"], []]) == [[], []]
    stage.pollers["1"].set_state("done")
    assert stage.decide([[], []]) == [[] if is_first else ["1"], []]
    assert stage.remaining() == (RIDS if is_first else RIDS[1:])


def test_reason_names_the_other_stage(monkeypatch):
    reasons = []
    monkeypatch.setattr(
        pp_stages.Poller, "record_failure", lambda self, room, reason: reasons.append(reason)
    )
    ended(CASES["failed on last"][0])
    assert reasons == ["the request failed on another pipeline stage, whose log has the reason"]


def test_requests_run_in_one_order():
    """A stage that lacked memory for a request at first has admitted them in another order."""
    pp_stages.group()
    first, later = stages = [pp_stages.TransferStage(number, RIDS, 8) for number in (0, 1)]
    later.disagg_decode_transfer_queue.queue.reverse()
    for stage in stages:
        for rid in RIDS[1:]:
            stage.pollers[rid].set_state("done")
    later.previous_output = first.propose()
    decision = later.propose()
    for stage in stages:
        decision = stage.decide(decision)
    assert first.accepted() == later.accepted() == RIDS[1:]
    assert first.remaining() == later.remaining() == RIDS[:1]


class AdmittingQueue:
    """A queue of requests to admit, of which some do not fit until `room` is raised."""

    def __init__(self, rids: list[str], room: int):
        self.queue = [SimpleNamespace(req=SimpleNamespace(rid=rid)) for rid in rids]
        self.room, self.retracted_queue = room, []

    def pop_preallocated(self, pp_good_rids, pp_bad_rids):
        good = [one for one in self.queue if one.req.rid in pp_good_rids][: self.room]
        bad = [one for one in self.queue if one.req.rid in pp_bad_rids]
        self.room -= len(good)
        self.queue = [one for one in self.queue if one not in (*good, *bad)]
        return good, bad


@pytest.mark.parametrize("is_first", [False, True])
def test_stage_without_memory_admits_a_request_later(is_first):
    """The first stage names a request once; it decides itself what fits."""
    stage = object.__new__(SchedulerPPMixin)
    stage.pp_group = SimpleNamespace(is_first_rank=is_first)
    stage.disagg_decode_prealloc_queue = queue = AdmittingQueue(RIDS, room=1)
    stage.disagg_decode_transfer_queue = admitted = []
    assert stage.process_prealloc_queue([["1", "2"], []]) == [["1"], []]
    assert stage.process_prealloc_queue(None) is None
    queue.room = 2
    later = [["2"], ["3"]] if not is_first else [[], ["3"]]
    assert stage.process_prealloc_queue([[], ["3"]]) == later
    assert stage.process_prealloc_queue([[], []]) == [[], []]
    assert [one.req.rid for one in admitted] == ["1", *later[0]]


def test_stock_stage_without_memory_never_admits_it():
    stage = object.__new__(getattr(scheduler_pp_mixin, "EngineSchedulerPPMixin", SchedulerPPMixin))
    stage.pp_group = SimpleNamespace(is_first_rank=False)
    stage.disagg_decode_prealloc_queue = queue = AdmittingQueue(RIDS, room=1)
    stage.disagg_decode_transfer_queue = []
    assert stage.process_prealloc_queue([["1", "2"], []]) == [["1"], []]
    queue.room = 2
    assert stage.process_prealloc_queue([[], []]) == [[], []]
    assert [one.req.rid for one in queue.queue] == ["2", "3"]


def test_stage_that_takes_no_new_requests_drops_none_of_them():
    """While it has retracted requests it admits no others."""
    stage = object.__new__(SchedulerPPMixin)
    stage.pp_group = SimpleNamespace(is_first_rank=False)
    stage.disagg_decode_prealloc_queue = queue = AdmittingQueue(RIDS, room=3)
    stage.disagg_decode_transfer_queue = []
    queue.retracted_queue = ["4"]
    assert stage.process_prealloc_queue([["1"], ["2"]]) == [[], []]
    queue.retracted_queue = []
    assert stage.process_prealloc_queue([[], []]) == [["1"], ["2"]]


@pytest.mark.parametrize("state", ["failed", "done"])
@pytest.mark.parametrize("is_queued", [False, True], ids=["client left", "not admitted yet"])
def test_request_that_only_the_first_stage_has(state, is_queued):
    """A later stage had no memory for it. If its client leaves then, that stage drops it."""
    with mock.patch.object(pp_stages.decode_module, "release_kv_cache", mock.Mock()):
        pp_stages.group()
        first, later = stages = [pp_stages.TransferStage(number, RIDS, 8) for number in (0, 1)]
        held = later.disagg_decode_transfer_queue.queue.pop(0)
        later.disagg_decode_prealloc_queue.queue = [held] if is_queued else []
        first.pollers["1"].set_state(state)
        later.previous_output = first.propose()
        decision = later.propose()
        for stage in stages:
            decision = stage.decide(decision)
    assert first.remaining() == (RIDS if is_queued else RIDS[1:])
    assert later.remaining() == RIDS[1:]
    assert first.accepted() == later.accepted() == []
