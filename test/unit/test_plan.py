"""All representations of a transfer plan's copies agree with each other, and with plain loops."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_layout import Buffer, BufferPair, LayoutError, make_plan, prepare

PAGE_SIZE = 3
# Bytes per page of each buffer on either side; a slice is 10 bytes of a row.
PAGE_BYTES = {"src": [60, 90, 120], "dst": [120, 90, 60]}
POINTERS = {"src": [1000, 5000, 9000], "dst": [20_000_000, 60_000_000, 90_000_000]}
WHOLE_PAGE = BufferPair(1, 1, True, 0, 0, 90)


def plan_of_whole_pages(src_pages, dst_pages, dst_pointers):
    """Returns a plan for buffers with pages of 90 bytes, of these numbers on either side."""
    src, dst = (
        [Buffer("k", False, i, 90, None, count) for i, count in enumerate(counts)]
        for counts in (src_pages, dst_pages)
    )
    pairs = [BufferPair(i, i, True, 0, 0, 90) for i in range(len(src))]
    return make_plan(pairs, PAGE_SIZE, src, [1000, 2000], dst, dst_pointers)


def plan_for(pairs):
    buffers = {
        side: [Buffer("k", False, i, size) for i, size in enumerate(sizes)]
        for side, sizes in PAGE_BYTES.items()
    }
    return make_plan(
        pairs, PAGE_SIZE, buffers["src"], POINTERS["src"], buffers["dst"], POINTERS["dst"]
    )


@st.composite
def buffer_pairs(draw):
    """A mix of whole pages and slices, the latter of buffers with equal or different pages."""
    pairs = []
    for _ in range(draw(st.integers(0, 5))):
        if draw(st.booleans()):
            pairs.append(WHOLE_PAGE)
        else:
            at = draw(st.integers(0, 9)), draw(st.integers(0, 9))
            src, dst = draw(st.sampled_from([0, 2])), draw(st.sampled_from([0, 2]))
            pairs.append(BufferPair(src, dst, False, *at, 10))
    return pairs


def pages():
    both = st.tuples(st.integers(0, 9), st.integers(0, 9))
    return st.lists(both, max_size=8, unique_by=(lambda one: one[0], lambda one: one[1]))


def copies_by_loops(pairs, pages):
    """Source, destination and bytes of each copy, buffer after buffer."""
    found = []
    for pair in pairs:
        size = {side: PAGE_BYTES[side][getattr(pair, side)] for side in PAGE_BYTES}
        first = {side: POINTERS[side][getattr(pair, side)] for side in PAGE_BYTES}
        for i, (src, dst) in enumerate(pages):
            at = first["src"] + src * size["src"] + pair.src_offset
            to = first["dst"] + dst * size["dst"] + pair.dst_offset
            if not pair.whole:
                for token in range(PAGE_SIZE):
                    row = {side: size[side] // PAGE_SIZE * token for side in size}
                    found.append((at + row["src"], to + row["dst"], 10))
            elif i and (src - 1, dst - 1) == pages[i - 1]:
                at, to, length = found.pop()
                found.append((at, to, length + 90))
            else:
                found.append((at, to, 90))
    return found


@settings(max_examples=150, deadline=None)
@given(pairs=buffer_pairs(), pages=pages())
def test_all_representations_of_copies_agree(pairs, pages):
    src, dst = (np.array([one[side] for one in pages], dtype=np.int32) for side in (0, 1))
    copies = plan_for(pairs).copies(src, dst)
    lists = copies.lists()
    found = list(zip(*lists))
    assert sorted(found) == sorted(copies_by_loops(pairs, pages))
    assert len(copies) == len(found)
    assert all(type(number) is int for column in lists for number in column)
    assert copies.arrays().tolist() == [list(column) for column in lists]
    here, there = copies.descriptors(5, 7)
    for side in (here, there):  # NIXL would copy, or refuse, anything else
        assert side.shape == (len(found), 3)
        assert side.dtype == np.int64 and side.flags.c_contiguous
    assert here.tolist() == [[src, size, 5] for src, _, size in found]
    assert there.tolist() == [[dst, size, 7] for _, dst, size in found]


def byte_mapping(copies):
    """The source and the destination of each byte."""
    return sorted((src + i, dst + i) for src, dst, size in copies for i in range(size))


@settings(max_examples=100, deadline=None)
@given(pairs=buffer_pairs(), pages=pages(), more=st.tuples(st.integers(0, 3), st.integers(0, 3)))
def test_prepared_blocks_match_copies(pairs, pages, more):
    """The sides have different numbers of pages, and some buffers have no slice."""
    prepared = prepare(plan_for(pairs), *(10 + count for count in more))
    src, dst = prepared.blocks([src for src, _ in pages], [dst for _, dst in pages])
    assert src.dtype == dst.dtype == np.int32 and src.shape == dst.shape
    ours, theirs = (
        [(at + i * stride, size) for at, size, stride, count in runs for i in range(count)]
        for runs in (prepared.src, prepared.dst)
    )
    moved = [(ours[i], theirs[j]) for i, j in zip(src.tolist(), dst.tolist())]
    assert all(here[1] == there[1] for here, there in moved)
    found = [(here[0], there[0], here[1]) for here, there in moved]
    assert byte_mapping(found) == byte_mapping(copies_by_loops(pairs, pages))


def test_prepare_prefers_described_page_counts():
    prepared = prepare(plan_of_whole_pages([5], [4], [9000]), 8, 8)
    assert (prepared.src, prepared.dst) == ([(1000, 90, 90, 5)], [(9000, 90, 90, 4)])
    with pytest.raises(LayoutError, match="prefill sends pages 1 to 3 of 5"):
        prepared.blocks([1, 3], [4, 2])


def test_prepare_refuses_more_than_int32_blocks():
    plan = plan_for([WHOLE_PAGE])
    assert prepare(plan, 2**31 - 1, 5).src[0][3] == 2**31 - 1
    with pytest.raises(LayoutError, match="2147483648 KV blocks on one side"):
        prepare(plan, 2**31, 5)


def test_prepared_blocks_refuse_pages_outside_stock_peer():
    with pytest.raises(LayoutError, match="nothing is written outside"):
        prepare(plan_for([WHOLE_PAGE]), 5, 5).blocks([1], [5])


def test_copies_keep_buffer_and_page_order():
    """Copies are in order of buffers, then of pages; whole pages come first."""
    pairs = [BufferPair(0, 0, False, 5, 0, 10), WHOLE_PAGE, BufferPair(0, 0, False, 0, 3, 10)]
    pages = [(4, 0), (5, 1), (2, 2)]
    found = list(zip(*plan_for(pairs).copies([4, 5, 2], [0, 1, 2]).lists()))
    assert found == copies_by_loops([pairs[1], pairs[0], pairs[2]], pages)


@settings(max_examples=100, deadline=None)
@given(pairs=buffer_pairs(), pages=pages(), at_most=st.integers(1, 40))
def test_split_copies_add_up_to_all(pairs, pages, at_most):
    copies = plan_for(pairs).copies([src for src, _ in pages], [dst for _, dst in pages])
    parts = copies.split(at_most)
    together = [copy for part in parts for copy in zip(*part.lists())]
    assert together == list(zip(*copies.lists()))
    for part in parts:
        buffers = sum(some.src.size for some in part.groups)
        assert buffers == 1 or len(part) <= at_most


def test_lists_equal_arrays_beyond_one_chunk():
    """`lists` works in chunks of several buffers, or of one buffer larger than a chunk."""
    for count, buffers in ((3000, 5), (9000, 2)):
        pages = np.arange(count)[::-1]
        copies = plan_for([WHOLE_PAGE] * buffers).copies(pages, pages)
        assert len(copies) == count * buffers
        assert [list(column) for column in copies.arrays()] == list(copies.lists())


@settings(max_examples=200, deadline=None)
@given(
    held=st.tuples(st.integers(0, 6), st.integers(0, 6)),
    pages=st.lists(st.tuples(st.integers(-2, 8), st.integers(-2, 8)), max_size=4),
    kind=st.sampled_from([np.int32, np.int64]),
)
def test_copies_outside_buffers_are_refused(held, pages, kind):
    """`held` is each side's number of pages; if 0, it is unknown, and only negatives are wrong."""
    src, dst = (np.array([one[side] for one in pages], dtype=kind) for side in (0, 1))
    plan = plan_of_whole_pages(held[:1], held[1:], [9000])
    right = [0 <= page < (held[i] or 99) for both in pages for i, page in enumerate(both)]
    if all(right):
        plan.copies(src, dst)
    else:
        with pytest.raises(LayoutError, match="nothing is written outside"):
            plan.copies(src, dst)


def test_refusal_names_pages_of_both_sides():
    """Of either side's buffers the one with the fewest pages counts."""
    plan = plan_of_whole_pages([5, 4], [5, 4], [9000, 9900])
    said = "prefill sends pages 1 to 3 of 4, decode has set aside pages 2 to 4 of 4"
    with pytest.raises(LayoutError, match=said):
        plan.copies([1, 3], [4, 2])


@pytest.mark.parametrize("page_count", [0, 9])
def test_peer_pages_end_at_its_next_buffer(page_count):
    """Also if the peer describes more: its third page would be the next buffer's first."""
    counts = [page_count] * 2
    plan = plan_of_whole_pages(counts, counts, [9000, 9180])
    plan.copies([5, 6], [0, 1])
    with pytest.raises(LayoutError, match="decode has set aside pages 1 to 2 of 2"):
        plan.copies([5, 6], [1, 2])


@pytest.mark.parametrize("pointers", [[9000, 9000], [9000, 9050]])
def test_overlapping_peer_buffers_imply_no_page_limit(pointers):
    plan = plan_of_whole_pages([0, 0], [0, 0], pointers)
    assert len(plan.copies([5, 9], [0, 1000])) == 4


@pytest.mark.parametrize("side", ["src", "dst"])
def test_slice_outside_row_is_refused(side):
    """A row has 20 bytes on prefill, and 40 on decode."""
    plan_for([BufferPair(0, 0, False, 10, 30, 10)])
    offsets = (11, 30) if side == "src" else (10, 31)
    with pytest.raises(LayoutError, match="bytes after the start of a row of"):
        plan_for([BufferPair(0, 0, False, *offsets, 10)])


@pytest.mark.parametrize("pairs", [[], [WHOLE_PAGE], [BufferPair(0, 2, False, 0, 0, 10)]])
def test_refuses_unequal_page_counts(pairs):
    plan = plan_for(pairs)
    with pytest.raises(LayoutError, match="sends 2 pages where decode has set aside 1"):
        plan.copies([0, 1], [0])
    with pytest.raises(LayoutError, match="sends 1 pages where decode has set aside 2"):
        plan.copies([0], [0, 1])
    assert len(plan.copies([], [])) == 0
