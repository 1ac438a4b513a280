"""The chunks that decode must interleave: how they are sent, and when they are believed."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kv_layout import LayoutError, agreed_units, decode_units, encode_units

FIRST, SECOND = (0, 3), (3, 5)
pages = st.integers(-2, 9)
units = st.lists(st.tuples(pages, pages), max_size=4)


@pytest.mark.parametrize(
    "by_sender, senders, agreed",
    [
        ([], 2, []),  # a stock prefill server, or one that sends slices
        ([[], set()], 2, []),
        ([[FIRST, SECOND]], 1, [FIRST, SECOND]),
        ([{SECOND, FIRST}, [FIRST, SECOND], [SECOND, FIRST]], 3, [FIRST, SECOND]),
        ([[SECOND, (5, 5), FIRST]] * 2, 2, [FIRST, SECOND, (5, 5)]),  # an empty last chunk
        ([[(0, 0)]], 1, [(0, 0)]),  # decode had all pages before
    ],
)
def test_units_are_agreed_in_the_requests_order(by_sender, senders, agreed):
    assert agreed_units(by_sender, senders, pages=5) == agreed


@pytest.mark.parametrize(
    "by_sender, senders, said",
    [
        ([[FIRST], []], 2, "1 of 2 prefill ranks"),
        ([[FIRST]], 2, "1 of 2 prefill ranks"),
        ([[FIRST]] * 3, 2, "3 of 2 prefill ranks"),
        ([[FIRST, SECOND], [FIRST]], 2, r"2 of 2 prefill ranks .* \[\(0, 3\), \(3, 5\)\]; run"),
        ([[FIRST], [(0, 2)]], 2, "2 of 2 prefill ranks"),
    ],
)
def test_disagreement_of_prefill_ranks_is_refused(by_sender, senders, said):
    """A rank that sends slices among others that send parts would have its bytes permuted."""
    with pytest.raises(LayoutError, match=said) as raised:
        agreed_units(by_sender, senders, pages=5)
    assert "SGLANG_PD_PACKED" in str(raised.value)


@pytest.mark.parametrize(
    "wrong",
    [
        [(0, 3), (2, 5)],
        [(0, 3), (0, 3)],
        [(0, 9), (4, 5)],
        [(0, 6)],
        [(-1, 3)],
        [(3, 1)],
        [(0, 4), (6, 5)],
        [(6, 6)],
        [(3, 5)],
        [(0, 2), (3, 5)],
    ],
    ids=str,
)
def test_units_that_overlap_have_gaps_or_leave_the_pages_are_refused(wrong):
    with pytest.raises(LayoutError, match="overlap, have gaps, or leave the 5 pages"):
        agreed_units([wrong] * 2, 2, pages=5)


@given(reported=units, count=st.integers(0, 9))
def test_no_page_is_in_two_agreed_units(reported, count):
    """Compared with pages one by one: none is interleaved twice, none is another request's."""
    try:
        agreed = agreed_units([reported], 1, count)
    except LayoutError:
        return
    assert agreed == sorted(reported)
    assert all(first <= end for first, end in agreed)
    named = [page for first, end in agreed for page in range(first, end)]
    assert named == list(range(len(named))) and len(named) <= count


@given(sizes=st.lists(st.integers(1, 4), min_size=1, max_size=5), more=st.integers(0, 3))
def test_chunks_of_a_request_are_always_agreed(sizes, more):
    ends = [sum(sizes[:n]) for n in range(len(sizes) + 1)]
    chunks = list(zip(ends[:-1], ends[1:]))
    assert agreed_units([chunks[::-1], set(chunks)], 2, ends[-1] + more) == chunks


@given(st.lists(st.tuples(*[st.integers(-(1 << 40), 1 << 40)] * 2), max_size=9))
def test_units_round_trip(sent):
    assert decode_units(encode_units(sent)) == sent
    assert decode_units(encode_units(iter(sent))) == sent


@pytest.mark.parametrize(
    "content",
    [None, 3, "junk", {"units": [[0, 3]]}, [3], [[0]], [[0, 3, 5]], [["0", 3]], [[0.5, 3]]],
)
def test_message_without_units_is_refused(content):
    with pytest.raises(LayoutError, match="chunks to interleave cannot be read"):
        decode_units(msgspec.msgpack.encode(content))


@given(cut=st.integers(1, 5))
def test_truncated_units_are_refused(cut):
    with pytest.raises(LayoutError, match="chunks to interleave cannot be read"):
        decode_units(encode_units([FIRST, SECOND])[:-cut])


@given(st.binary(max_size=40))
def test_any_bytes_are_units_or_refused(noise):
    try:
        found = decode_units(noise)
    except LayoutError:
        return
    assert all(isinstance(number, int) for unit in found for number in unit)
    assert {len(unit) for unit in found} <= {2}
