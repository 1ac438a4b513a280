"""Prefill's pipeline stages compute and drop the same requests, whatever each of them learns."""

import pp_stages
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.engine

RIDS = ["1", "2", "3"]
ROUNDS, STAGES = 3, 3
EVENTS = st.lists(
    st.tuples(
        st.integers(0, ROUNDS * STAGES * 2 - 1),  # the step
        st.integers(0, STAGES - 1),
        st.sampled_from(RIDS),
        st.sampled_from(["ready", "failed"]),
    ),
    max_size=12,
)


@settings(max_examples=300, deadline=None)
@given(events=EVENTS, slots=st.sampled_from([1, 8]), lag=st.integers(0, 2))
def test_stages_always_take_the_same_requests(events, slots, lag):
    # More rounds without events, so that all stages act on what one of them knows.
    found = pp_stages.run_stages("bootstrap", STAGES, RIDS, events, ROUNDS + 4, slots, lag)
    assert found == [found[0]] * STAGES


def test_stage_computes_what_the_stages_agreed_on(stock):
    """They vote for it in the second round, and decide on that in the third.

    Stock's last stage drops what fails in between, when it decides on the first round's votes; the
    first stage computes it.
    """
    events = [[2, 0, "1", "ready"], [3, 1, "1", "ready"], [5, 1, "1", "failed"]]
    call = ["bootstrap", 2, RIDS, events, 3, 8, 1]
    assert pp_stages.run_stages(*call) == [[["1"], ["2", "3"]]] * 2
    (of_stock,) = stock(["run_stages", *call])
    assert of_stock == [[["1"], ["2", "3"]], [[], ["2", "3"]]]


@pytest.mark.parametrize("stage", range(3))
def test_stages_drop_what_failed_on_one(stage):
    found = pp_stages.run_stages("bootstrap", 3, RIDS, [[0, stage, "1", "failed"]], 2)
    assert found == [[[], ["2", "3"]]] * 3


def test_later_stage_drops_what_only_it_has():
    pp_stages.group()
    first, later = stages = [pp_stages.PrefillStage(number, RIDS, 8) for number in (0, 1)]
    first.disagg_prefill_bootstrap_queue.queue.pop(0)
    later.pollers["1"].set_state("failed")
    later.previous_output = first.propose()
    decision = later.propose()
    for stage in stages:
        decision = stage.decide(decision)
    assert first.remaining() == later.remaining() == RIDS[1:]


@pytest.mark.parametrize("rooms", [1, 2])
def test_requests_of_one_id_leave_one_by_one(rooms):
    """There may be a metadata row for only one of them."""
    pp_stages.group()
    stage = pp_stages.PrefillStage(0, ["1", "1", "2"], rooms)
    assert stage.decide([["1"], []]) == [["1"] * rooms, []]
    assert stage.remaining() == ["1"] * (2 - rooms) + ["2"]
