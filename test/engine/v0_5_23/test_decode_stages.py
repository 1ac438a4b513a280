"""Decode's pipeline stages end the same requests in the same way, whatever each of them learns."""

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
        st.sampled_from(["done", "failed", "metadata"]),
    ),
    max_size=16,
)


@settings(max_examples=300, deadline=None)
@given(events=EVENTS, lag=st.integers(0, 2))
def test_stages_always_end_the_same_requests(events, lag):
    # More rounds without events, so that all stages act on what one of them knows.
    first, *others = pp_stages.run_stages("transfer", STAGES, RIDS, events, ROUNDS + 4, 8, lag)
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


def test_reason_names_the_other_stage(monkeypatch):
    reasons = []
    monkeypatch.setattr(
        pp_stages.Poller, "record_failure", lambda self, room, reason: reasons.append(reason)
    )
    ended(CASES["failed on last"][0])
    assert reasons == ["the request failed on another pipeline stage, whose log has the reason"]
