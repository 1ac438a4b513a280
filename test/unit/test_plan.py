"""The forms of a plan's copies agree with one another, and with loops that know no arrays."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_layout import Buffer, LayoutError, Pair, make_plan

PAGE_SIZE = 3
PAGE_BYTES = {"src": [60, 90], "dst": [120, 90]}


@st.composite
def plans(draw):
    """Some pairs, whole pages and slices mixed; returns their plan and the pairs."""
    pairs = []
    for _ in range(draw(st.integers(0, 5))):
        if draw(st.booleans()):
            pairs.append(Pair(1, 1, True, 0, 0, 90))
        else:
            pairs.append(Pair(0, 0, False, draw(st.integers(0, 9)), draw(st.integers(0, 29)), 10))
    buffers = {
        side: [Buffer("k", False, i, size) for i, size in enumerate(sizes)]
        for side, sizes in PAGE_BYTES.items()
    }
    pointers = {"src": [1000, 5000], "dst": [20_000, 60_000]}
    plan = make_plan(
        pairs, PAGE_SIZE, buffers["src"], pointers["src"], buffers["dst"], pointers["dst"]
    )
    return plan, pairs


def pages(most=8):
    both = st.tuples(st.integers(0, 9), st.integers(0, 9))
    return st.lists(both, max_size=most, unique_by=(lambda one: one[0], lambda one: one[1]))


def in_loops(pairs, pages):
    """Source, destination, bytes of each copy: whole pages first, buffer after buffer."""
    found = []
    for _ in (pair for pair in pairs if pair.whole):
        for i, (src, dst) in enumerate(pages):
            if i and (src - 1, dst - 1) == pages[i - 1]:
                at, to, size = found.pop()
                found.append((at, to, size + 90))
            else:
                found.append((5000 + src * 90, 60_000 + dst * 90, 90))
    for pair in (pair for pair in pairs if not pair.whole):
        for src, dst in pages:
            for token in range(PAGE_SIZE):
                at = 1000 + src * 60 + token * 20 + pair.src_offset
                found.append((at, 20_000 + dst * 120 + token * 40 + pair.dst_offset, 10))
    return found


@settings(max_examples=150, deadline=None)
@given(made=plans(), pages=pages())
def test_all_forms_are_the_same_copies(made, pages):
    plan, pairs = made
    src, dst = (np.array([one[side] for one in pages], dtype=np.int32) for side in (0, 1))
    wanted = in_loops(pairs, pages)
    copies = plan.copies(src, dst)
    assert list(zip(copies.src.tolist(), copies.dst.tolist(), copies.length.tolist())) == wanted
    assert len(copies) == len(wanted) <= plan.most_copies(len(pages))
    assert list(zip(*plan.lists(src, dst))) == wanted
    assert all(type(number) is int for column in plan.lists(src, dst) for number in column)
    here, there = plan.descriptors(src, dst, 5, 7)
    assert here.tolist() == [[src, size, 5] for src, _, size in wanted]
    assert there.tolist() == [[dst, size, 7] for _, dst, size in wanted]


@settings(max_examples=100, deadline=None)
@given(made=plans(), pages=pages(), at_most=st.integers(1, 40))
def test_parts_are_the_whole(made, pages, at_most):
    plan, _ = made
    src, dst = [src for src, _ in pages], [dst for _, dst in pages]
    parts = plan.parts(len(pages), at_most)
    together = [copy for part in parts for copy in zip(*part.lists(src, dst))]
    assert together == list(zip(*plan.lists(src, dst)))
    for part in parts:
        pairs = sum(group.length.size for group in part.groups)
        assert pairs == 1 or part.most_copies(len(pages)) <= at_most


def test_descriptors_are_what_nixl_takes():
    """C-contiguous `[n, 3]` of 64 bits: anything else it would copy or refuse."""
    plan = make_plan(
        [Pair(0, 0, True, 0, 0, 90)] * 2,
        PAGE_SIZE,
        [Buffer("k", False, 0, 90)],
        [0],
        [Buffer("k", False, 0, 90)],
        [0],
    )
    for side in plan.descriptors([1, 2, 5], [0, 1, 2], 0, 0):
        assert side.shape == (4, 3) and side.dtype == np.int64 and side.flags.c_contiguous


@pytest.mark.parametrize("form", ["copies", "lists", "descriptors"])
def test_all_forms_refuse_other_page_counts(form):
    plan = make_plan([], PAGE_SIZE, [], [], [], [])
    devices = (0, 0) if form == "descriptors" else ()
    with pytest.raises(LayoutError, match="sends 2 pages where decode has set aside 1"):
        getattr(plan, form)([0, 1], [0], *devices)
    assert sum(map(len, plan.lists([], []))) == 0
