"""Packing rows and interleaving them: every byte, for any width, and the memory it takes."""

import ctypes
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import pytest
import torch
from head_pools import HEADS, PAGE_SIZE, PAGES, contents, plan_between, rank_args
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from sglang.srt.disaggregation.kv_layout import (
    Buffer,
    Heads,
    Permutation,
    RankLayout,
    make_packed_plan,
    page_slots,
)
from sglang.srt.disaggregation.pd import packing
from sglang.srt.disaggregation.pd.interleaving import interleave
from sglang.srt.disaggregation.pd.memory_registration import PAGE_BYTES, packing_regions
from sglang.srt.disaggregation.pd.packing import (
    PackingBuffers,
    copies_of_unit,
    make_packing_buffers,
    pack,
)
from sglang.srt.disaggregation.pd.pool_views import PoolViews

from pd_harness.polling import wait_until

pytestmark = pytest.mark.engine

PATIENCE = 30
MEMORY = "SGLANG_PD_PACKING_MIB"
IN_A_ROW, SCATTERED = list(range(3, 27)), [61, 2, 3, 40, 8, 7, *range(11, 29)]


@settings(max_examples=150, deadline=None)
@given(
    widths=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    are_equal=st.booleans(),
    word=st.sampled_from([1, 2, 4, 8, 16]),
    pages=st.lists(st.integers(0, 9), min_size=1, max_size=6, unique=True),
    is_in_a_row=st.booleans(),
    page_size=st.sampled_from([1, 2, 16]),
)
@example([2, 2], True, 16, [4, 5, 6], True, 16)
@example([1, 3, 2], False, 8, [7, 0, 3], False, 1)
def test_interleave_moves_what_the_reference_moves(
    widths, are_equal, word, pages, is_in_a_row, page_size
):
    """All slots are compared, also those that are not the request's."""
    widths = tuple(word * width for width in (widths[:1] * len(widths) if are_equal else widths))
    one = Permutation((0,), tuple(range(len(widths))), widths, word)
    pages = range(pages[0], pages[0] + len(pages)) if is_in_a_row else pages
    slots = page_slots(pages, page_size)
    found = torch.randint(0, 256, (16 * page_size, sum(widths)), dtype=torch.uint8)
    expected = found.numpy().copy()
    one.apply(expected, slots)
    interleave(found, torch.from_numpy(slots), one)
    np.testing.assert_array_equal(found.numpy(), expected)


def rank_of_keys(rank: int, size: int, head: int) -> RankLayout:
    """A rank with K alone, whose heads have this many bytes."""
    each = HEADS // size
    held = Heads(each * rank, each * (rank + 1), HEADS)
    page = PAGE_SIZE * each * head
    kv = tuple(Buffer("k", False, layer, page, held, PAGES) for layer in range(3))
    return RankLayout(rank, size, 0, 1, PAGE_SIZE, "uint8", "DRAM", 3, kv)


@pytest.mark.parametrize(
    "head, word", [(1, 1), (2, 2), (4, 4), (8, 8), (16, 16), (3, 1), (6, 2), (20, 4), (48, 16)]
)
@pytest.mark.parametrize("pages", [IN_A_ROW, SCATTERED], ids=["in a row", "scattered"])
@pytest.mark.parametrize("capacity", [48, 1008, 1 << 14])
def test_pack_takes_one_ranks_heads_of_each_row(head, word, pages, capacity):
    """Compared with NumPy; nothing is written behind a round's rows."""
    src, dst = rank_of_keys(0, 1, head), rank_of_keys(2, HEADS, head)
    shape = (PAGES, src.kv[0].page_bytes)
    views = [torch.randint(0, 256, shape, dtype=torch.uint8) for _ in src.kv]
    ours, theirs = [view.data_ptr() for view in views], [1 << 50, 2 << 50, 3 << 50]
    plan, packed = make_packed_plan(src, dst, src.kv, ours, dst.kv, theirs), []
    for one in plan.rounds(pages, pages, capacity):
        assert one.group.word == word
        to = torch.full((capacity,), 7, dtype=torch.uint8)
        pack(one, views, PAGE_SIZE, to)
        rows = [views[i].numpy().reshape(-1, HEADS * head) for i in one.group.buffers]
        wanted = np.concatenate([each[one.slots, 2 * head : 3 * head] for each in rows])
        expected = np.full(capacity, 7, np.uint8)
        expected[: wanted.size] = wanted.reshape(-1)
        np.testing.assert_array_equal(to.numpy(), expected)
        packed += [(buffer, slot) for buffer in one.group.buffers for slot in one.slots.tolist()]
    assert len(packed) == len(set(packed)) == 3 * len(pages) * PAGE_SIZE


class AtOnce:
    """An executor that packs a round as early as it may: when it is asked to."""

    @staticmethod
    def submit(call, *given) -> Future:
        result = Future()
        result.set_result(call(*given))
        return result


def make_buffers(prefill, half: int = 4096) -> PackingBuffers:
    """Makes packing buffers for three workers.

    Args:
        half: Bytes of each half of the largest region; the others have fewer. By default fewer
            than one KV buffer needs.
    """
    buffers = PackingBuffers(prefill.views, PAGE_SIZE, PAGE_BYTES, workers=3)
    largest = buffers.free[-1][0].numel()
    buffers.free = [
        tuple(one[: half * one.numel() // largest] for one in halves) for halves in buffers.free
    ]
    return buffers


def write(copies) -> None:
    for src, dst, length in copies.arrays().T.tolist():
        ctypes.memmove(dst, src, length)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("what", ["kv", "state"])
@pytest.mark.parametrize("half, rounds", [(1 << 16, range(2, 3)), (1 << 12, range(8, 20))], ids=str)
@pytest.mark.parametrize("packs_early", [False, True])
def test_every_packed_byte_arrives(size, what, half, rounds, packs_early):
    """Each round is sent before the next one is asked for, from the half that it is in."""
    prefill = rank_args(0, 1)
    buffers = make_buffers(prefill, half)
    if packs_early:
        buffers.executor = AtOnce()
    sent = slice(0, 4) if what == "kv" else slice(4, 8)
    src, dst = (page_slots(pages, PAGE_SIZE) for pages in (IN_A_ROW, SCATTERED))
    for rank in range(size):
        decode = rank_args(rank, size)
        expected = contents(decode)
        for ours, theirs in zip(contents(prefill)[sent], expected[sent], strict=True):
            width = theirs.shape[1]
            theirs[dst] = ours[src, rank * width : (rank + 1) * width]
        plan, last = getattr(plan_between(prefill, decode), what), []
        for copies, is_last in buffers.copies(what, plan, IN_A_ROW, SCATTERED):
            write(copies)
            last.append(is_last)
        assert len(last) - 1 in rounds  # the first has what needs no packing
        assert last == [False] * (len(last) - 1) + [True]
        for found, wanted in zip(contents(decode), expected, strict=True):
            np.testing.assert_array_equal(found, wanted)


def starts_of_rounds(unit) -> Iterator[int]:
    """Where in memory each round of a unit begins."""
    for copies, _ in unit:
        if len(copies):
            yield int(copies.arrays()[0].min())


@pytest.fixture
def begin():
    """A function that begins a unit; returns it, and the two halves that it is packed into."""
    prefill, decode = rank_args(0, 1), rank_args(1, 2)
    buffers, plan = make_buffers(prefill), plan_between(prefill, decode).kv

    def begin_unit():
        unit = buffers.copies("kv", plan, IN_A_ROW, SCATTERED)
        starts = starts_of_rounds(unit)
        return unit, {next(starts), next(starts)}

    return begin_unit


def test_unit_is_packed_into_the_largest_region_that_no_other_thread_has(begin):
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
        unit, first = one.submit(begin).result()
        small_unit, second = other.submit(begin).result()
        assert not first & second
        one.submit(unit.close).result()
        other.submit(small_unit.close).result()
        _, third = other.submit(begin).result()
    assert third == first


def test_rounds_of_a_unit_are_packed_into_its_two_halves_in_turns(begin):
    unit, halves = begin()
    following = [*starts_of_rounds(unit)]
    assert len(following) > 4 and {*following[::2]}.isdisjoint(following[1::2])
    assert {*following} == halves


def test_failed_unit_that_is_kept_takes_no_second_region(begin):
    """Nor does its end take the region from the unit that its thread packs by then."""
    kept, first = begin()
    following, second = begin()
    assert second == first
    kept.close()
    with ThreadPoolExecutor(1) as thread:
        _, third = thread.submit(begin).result()
    assert not third & second
    following.close()
    assert begin()[1] == first


@pytest.mark.parametrize("mib, workers", [(1, 1), (1, 3), (5, 2), (64, 4)])
def test_packing_buffer_is_bounded_and_aligned(mib, workers):
    """MemFabric registers whole pages of 2 MiB."""
    buffers = PackingBuffers(rank_args(0, 1).views, PAGE_SIZE, mib << 20, workers)
    _, start, size = buffers.region
    assert start % PAGE_BYTES == size % PAGE_BYTES == 0
    assert size == max(PAGE_BYTES, mib // 2 * PAGE_BYTES)
    halves = [(one.data_ptr(), one.numel()) for pair in buffers.free for one in pair]
    assert len(halves) == 2 * workers
    assert [length for _, length in halves] == sorted(length for _, length in halves)
    halves.sort()
    ends = [start, *(at + length for at, length in halves)]
    assert all(end <= at for end, (at, _) in zip(ends, halves)) and ends[-1] <= start + size
    assert size - sum(length for _, length in halves) < 2 * workers * 64


@pytest.fixture
def unit():
    """A packing buffer with one thread, and one of its units of several rounds."""
    prefill, decode = rank_args(0, 1), rank_args(1, 2)
    buffers, plan = make_buffers(prefill), plan_between(prefill, decode).kv
    with ThreadPoolExecutor(1) as buffers.executor:
        yield buffers.copies("kv", plan, IN_A_ROW, SCATTERED)


def test_unit_that_is_not_sent_to_its_end_packs_no_more(monkeypatch, unit):
    """The next unit of the thread would be packed into the same half."""
    begun, ended, may_go_on = [], [], threading.Event()

    def slow(*given) -> None:
        begun.append(given)
        if len(begun) == 2:
            may_go_on.wait(PATIENCE)
        ended.append(given)

    monkeypatch.setattr(packing, "pack", slow)
    next(unit), next(unit)  # the second round is packed meanwhile
    assert wait_until(lambda: len(begun) == 2, PATIENCE)
    threading.Timer(0.1, may_go_on.set).start()
    unit.close()
    assert len(ended) == 2


def test_error_of_packing_is_raised_where_the_unit_is_sent(monkeypatch, unit):
    def fail(*given) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(packing, "pack", fail)
    assert next(unit)[1] is False
    with pytest.raises(RuntimeError, match="no memory"):
        next(unit)


def test_empty_unit_has_one_batch_of_no_copies():
    """Such as the last chunk of a request whose pages decode had before."""
    prefill, decode = rank_args(0, 1), rank_args(1, 2)
    buffers, plan = make_buffers(prefill), plan_between(prefill, decode).kv
    ((copies, is_last),) = buffers.copies("kv", plan, [], [])
    assert (len(copies), is_last) == (0, True)


def test_rows_that_become_parts_need_no_packing():
    plan = plan_between(rank_args(1, 2), rank_args(0, 1)).state
    ((copies, is_last),) = copies_of_unit(None, "state", plan, IN_A_ROW, SCATTERED)
    assert is_last and len(copies) == len(plan.copies(IN_A_ROW, SCATTERED)) > 0


def test_rank_with_several_heads_sets_memory_aside(monkeypatch):
    monkeypatch.setenv(MEMORY, "5")
    args = rank_args(0, 2)
    assert packing_regions(args) == []
    args.packing = make_packing_buffers(args, workers=2)
    assert args.packing.memory.numel() == 4 << 20
    assert packing_regions(args) == [args.packing.region]


def test_stage_with_windows_only_packs_and_interleaves(monkeypatch):
    """Its layers have no full attention."""
    monkeypatch.setenv(MEMORY, "2")
    args = rank_args(0, 1)
    args.views, args.layout = PoolViews([], args.views.state), replace(args.layout, kv=())
    assert make_packing_buffers(args, workers=1).memory.numel() == 2 << 20
    assert args.views.device.type == "cpu"


@pytest.mark.parametrize("case", ["variable", "unknown pools", "slices", "one head"])
def test_rank_that_will_not_pack_sets_no_memory_aside(monkeypatch, case):
    args = rank_args(0, HEADS if case == "one head" else 1)
    if case == "variable":
        monkeypatch.setenv(MEMORY, "0")
    elif case == "unknown pools":
        args.layout = args.views = None
    elif case == "slices":
        args.layout = replace(args.layout, whole_rows=False)
    assert make_packing_buffers(args, workers=4) is None


@pytest.mark.parametrize(
    "mib, workers",
    [("1e9", 4), ("2", 1 << 16)],
    ids=["petabyte", "less than a row for each worker"],
)
def test_rank_without_memory_to_pack_sends_slices(monkeypatch, caplog, mib, workers):
    monkeypatch.setenv(MEMORY, mib)
    assert make_packing_buffers(rank_args(0, 1), workers) is None
    (warning,) = (one.message for one in caplog.records if one.name == packing.__name__)
    assert MEMORY in warning and "token by token" in warning


def test_wrong_size_of_the_packing_buffer_is_refused(monkeypatch):
    monkeypatch.setenv(MEMORY, "much")
    with pytest.raises(ValueError, match=f"{MEMORY} is 'much'"):
        make_packing_buffers(rank_args(0, 1), workers=4)
