"""Decode's thread interleaves a request's rows: when its pages may be read, and what stops it."""

import threading

import numpy as np
import pytest
from head_pools import contents, land_as_parts, rank_args
from sglang.srt.disaggregation.kv_layout import permutation
from sglang.srt.disaggregation.pd import interleaving
from sglang.srt.disaggregation.pd.interleaving import Interleaver

from pd_harness.polling import wait_until

pytestmark = pytest.mark.engine

PATIENCE = 30
PAGES = np.array([7, 2, 3, 11, 40, 5], np.int32)
STATE_PAGES = [4, 1, 30]
UNITS = [(0, 3), (3, 3), (3, 5)]  # the second chunk is empty; the last page did not arrive as parts
BUFFERS = 8


class Request:
    """A request whose rows have arrived at a decode rank.

    Attributes:
        arrived, wanted: All bytes of the rank now, and once the rows are interleaved.
    """

    def __init__(
        self,
        prefill_tp: int = 2,
        rank: int = 0,
        size: int = 1,
        interleaver=None,
        units=UNITS,
        state_units=(STATE_PAGES,),
    ):
        self.prefill_tp = prefill_tp
        self.interleaver = interleaver or Interleaver(rank_args(rank, size))
        self.args = self.interleaver.args
        self.wanted = contents(self.args)
        parts = prefill_tp // size
        for buffer in self.args.views.kv:
            for first, end in units:
                land_as_parts(buffer, PAGES[first:end], parts)
        for buffer in self.args.views.state:
            for pages in state_units:
                land_as_parts(buffer, pages, parts)
        self.arrived = contents(self.args)

    def start(self, units=UNITS, pages=PAGES, state_pages=STATE_PAGES):
        return self.interleaver.start(self.prefill_tp, units, pages, state_pages)

    def is_as(self, then: list) -> list[bool]:
        """Whether each buffer has these contents, KV before state."""
        now = contents(self.args)
        return [np.array_equal(*both) for both in zip(now, then, strict=True)]


@pytest.fixture
def arrived():
    return Request()


def test_long_unit_is_interleaved_block_by_block(monkeypatch):
    """Prefill cuts it at the same pages; a page has 4 tokens."""
    monkeypatch.setattr(permutation, "BLOCK_TOKENS", 8)
    request = Request(units=[(0, 2), (2, 4), (4, 5)], state_units=[[4, 1], [30]])
    job = request.start(units=[(0, 5)])
    assert wait_until(job.is_done, PATIENCE)
    assert all(request.is_as(request.wanted))


def assert_aborted(job) -> None:
    for _ in range(2):
        with pytest.raises(RuntimeError, match="aborted"):
            job.is_done()


@pytest.mark.parametrize("prefill_tp, rank, size", [(2, 0, 1), (4, 0, 1), (4, 1, 2)])
def test_all_chunks_of_kv_and_the_state_are_interleaved(prefill_tp, rank, size):
    """K and V differ in width; no other byte of the rank changes."""
    request = Request(prefill_tp, rank, size)
    assert request.is_as(request.wanted) == [False] * BUFFERS
    assert wait_until(request.start().is_done, PATIENCE)
    assert request.is_as(request.wanted) == [True] * BUFFERS


def test_one_thread_serves_prefill_servers_of_different_tp_sizes(arrived):
    assert wait_until(arrived.start().is_done, PATIENCE)
    another = Request(4, interleaver=arrived.interleaver)
    assert wait_until(another.start().is_done, PATIENCE)
    assert another.is_as(another.wanted) == [True] * BUFFERS


@pytest.mark.parametrize("state_pages", [None, [], np.array([], np.int32)], ids=str)
def test_request_without_state_pages_leaves_the_state(arrived, state_pages):
    assert wait_until(arrived.start(state_pages=state_pages).is_done, PATIENCE)
    assert arrived.is_as(arrived.wanted) == [True] * 4 + [False] * 4
    assert arrived.is_as(arrived.arrived) == [False] * 4 + [True] * 4


def test_request_of_which_decode_had_all_pages_is_done(arrived):
    job = arrived.start([(0, 0)], PAGES[:0], None)
    assert wait_until(job.is_done, PATIENCE)
    assert arrived.is_as(arrived.arrived) == [True] * BUFFERS


def test_request_waits_for_those_before_it(arrived):
    may_go_on = threading.Event()
    arrived.interleaver.executor.submit(may_go_on.wait, PATIENCE)
    job = arrived.start()
    assert not job.is_done()
    may_go_on.set()
    assert wait_until(job.is_done, PATIENCE)
    assert job.is_done()


def test_error_of_the_thread_is_raised_at_each_poll(arrived, monkeypatch):
    """So that the request fails; the next one has nothing to do with it."""

    def fail(*given) -> None:
        raise RuntimeError("no memory")

    with monkeypatch.context() as failing:
        failing.setattr(interleaving, "interleave", fail)
        job = arrived.start()
        for _ in range(2):
            with pytest.raises(RuntimeError, match="no memory"):
                wait_until(job.is_done, PATIENCE)
    job.cancel()  # as when the failed request is cleared
    assert wait_until(arrived.start().is_done, PATIENCE)
    assert arrived.is_as(arrived.wanted) == [True] * BUFFERS


def test_aborted_request_that_has_not_begun_is_not_touched(arrived):
    may_go_on, executor = threading.Event(), arrived.interleaver.executor
    executor.submit(may_go_on.wait, PATIENCE)
    job = arrived.start()
    job.cancel()
    may_go_on.set()
    executor.submit(int).result(PATIENCE)  # whatever was queued before is over
    assert arrived.is_as(arrived.arrived) == [True] * BUFFERS
    assert_aborted(job)


def test_abort_waits_for_the_buffer_at_hand_and_stops_there(arrived, monkeypatch):
    """Afterwards the pages may be another request's."""
    begun, may_go_on, interleave = threading.Event(), threading.Event(), interleaving.interleave

    def slow(*given) -> None:
        begun.set()
        may_go_on.wait(PATIENCE)
        interleave(*given)

    monkeypatch.setattr(interleaving, "interleave", slow)
    job = arrived.start()
    assert begun.wait(PATIENCE)
    aborts = threading.Thread(target=job.cancel)
    aborts.start()
    assert wait_until(lambda: job.is_cancelled, PATIENCE)
    assert aborts.is_alive()
    may_go_on.set()
    aborts.join(PATIENCE)
    assert not aborts.is_alive()
    assert arrived.is_as(arrived.arrived) == [False] + [True] * (BUFFERS - 1)
    assert_aborted(job)


def test_request_that_is_aborted_once_it_is_done_stays_aborted(arrived):
    job = arrived.start()
    assert wait_until(job.is_done, PATIENCE)
    job.cancel()
    assert_aborted(job)
