"""Stages take and drop the same requests, whatever any of them learns at any moment."""

from types import SimpleNamespace

import pp_stages
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.pd import rank_consensus

pytestmark = pytest.mark.engine

RIDS = ["1", "2", "3"]
ROUNDS, STAGES = 3, 3
STEPS = ROUNDS * STAGES * 2
# What a stage may learn about a request in its queue.
OUTCOMES = {"bootstrap": ["ready", "failed"], "transfer": ["done", "failed"]}


def histories(kind: str):
    event = st.tuples(
        st.integers(0, STEPS - 1),
        st.integers(0, STAGES - 1),
        st.sampled_from(RIDS),
        st.sampled_from(OUTCOMES[kind]),
    )
    return st.lists(event, max_size=12)


@pytest.mark.parametrize("kind", OUTCOMES)
def test_stages_always_take_the_same_requests(kind):
    @settings(max_examples=300, deadline=None)
    @given(events=histories(kind), slots=st.sampled_from([1, 8]), lag=st.integers(0, 2))
    def check(events, slots, lag):
        # More rounds without events, so that all stages act on what one of them knows.
        first, *others = pp_stages.run_stages(kind, STAGES, RIDS, events, ROUNDS + 4, slots, lag)
        assert all(other == first for other in others), (first, others)

    check()


@pytest.mark.parametrize("kind, news", [("bootstrap", "ready"), ("transfer", "done")])
def test_no_stage_keeps_a_request_that_failed_on_another(kind, news):
    """A stage drops it at the latest when no other stage may still write to its pages."""
    for failing in range(STAGES):
        events = [[1, failing, "1", "failed"]]
        events += [[2, stage, "1", news] for stage in range(STAGES) if stage != failing]
        for taken, left in pp_stages.run_stages(kind, STAGES, RIDS, events, ROUNDS):
            assert not taken and left == ["2", "3"], failing


def test_many_failed_rooms_end_over_several_polls():
    """Only open rooms on decode: other queues conclude a failed request at once."""

    def turns(pollers) -> list[int]:
        """The number of failed requests in each poll."""
        ended = []
        while pollers:
            polls = pp_stages.poll(pollers)
            assert set(polls) <= {KVPoll.Failed, KVPoll.Transferring}
            pollers = [one for one, poll in zip(pollers, polls) if poll != KVPoll.Failed]
            ended.append(polls.count(KVPoll.Failed))
        return ended

    def failed(**more):
        return SimpleNamespace(poll=lambda: KVPoll.Failed, **more)

    most = rank_consensus.MAX_FAILURES_PER_POLL
    assert turns([failed(is_open=lambda: True) for _ in range(2 * most + 1)]) == [most, most, 1]
    assert turns([failed(is_open=lambda: False) for _ in range(2 * most)]) == [2 * most]
    assert turns([failed() for _ in range(2 * most)]) == [2 * most]


def test_agreed_requests_end_in_one_poll():
    rids = [str(number) for number in range(2 * rank_consensus.MAX_FAILURES_PER_POLL)]
    pollers = [pp_stages.Poller(KVPoll.Failed) for _ in rids]
    for poller in pollers:
        poller.is_open = lambda: True
    with rank_consensus.pinned_polls(list(zip(rids, pollers)), {}, rids):
        assert pp_stages.poll(pollers) == [KVPoll.Failed] * len(rids)
    assert pp_stages.poll(pollers).count(KVPoll.Failed) == rank_consensus.MAX_FAILURES_PER_POLL


def test_abort_after_consensus_is_honoured():
    """All stages abort a request that they agreed is done, and it ends as aborted."""
    events = [[step, step, "1", "done"] for step in range(STAGES)]
    events += [[STAGES, stage, "1", "aborted"] for stage in range(STAGES)]
    for taken, _ in pp_stages.run_stages("transfer", STAGES, RIDS, events, ROUNDS):
        assert taken == ["1 aborted"]


# A request fails on one of two stages before that stage decides; in the last, before it proposes.
RACES = [
    ("bootstrap", [[0, 0, "1", "ready"], [1, 1, "1", "ready"], [3, 1, "1", "failed"]]),
    ("bootstrap", [[0, 0, "1", "ready"], [1, 1, "1", "ready"], [2, 0, "1", "failed"]]),
    ("transfer", [[0, 0, "1", "done"], [1, 1, "1", "failed"]]),
]


@pytest.mark.parametrize("kind, events", RACES)
def test_stock_stages_diverge_where_patched_ones_agree(stock, kind, events):
    call = [kind, 2, RIDS, events, 2]
    first, second = pp_stages.run_stages(*call)
    assert first == second
    (of_stock,) = stock(["run_stages", *call])
    assert of_stock[0] != of_stock[1], of_stock
