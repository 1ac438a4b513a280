"""Digests: any difference is reported with its place; invalid frames are refused."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kv_layout import (
    Buffer,
    Digests,
    Heads,
    LayoutError,
    Part,
    RankLayout,
    RoomDigests,
    byte_ranges,
    decode_digests,
    describe_difference,
    differing_buffers,
    encode_digests,
    missing_parts,
    position_weights,
    sent_parts,
    summarize,
)

PARTS = (
    Part("k", False, 0, Heads(0, 2, 4)),
    Part("k", False, 1, Heads(0, 2, 4)),
    Part("v", False, 0, Heads(0, 2, 4)),
    Part("k", True, 0),
)


def table(pages: int, seed: int = 0):
    rng = np.random.default_rng(seed)
    return rng.integers(0, 1 << 64, (len(PARTS), pages), dtype=np.uint64, endpoint=False)


def compare_tables(before, after, tokens: int | None = 16) -> str | None:
    return describe_difference(summarize(PARTS, before), summarize(PARTS, after), tokens)


@given(
    pages=st.integers(1, 9),
    change=st.integers(1, (1 << 64) - 1),
    data=st.data(),
)
def test_changed_page_and_part_are_reported(pages, change, data):
    part = data.draw(st.integers(0, len(PARTS) - 1))
    page = data.draw(st.integers(0, pages - 1))
    before = table(pages)
    after = before.copy()
    after[part, page] ^= np.uint64(change)
    place = f"tokens {16 * page} to {16 * page + 15}"
    assert compare_tables(before, after) == (
        f"{PARTS[part].name} of 4 parts; first wrong page {page} of {pages} "
        f"({place} of those sent), 1 in all"
    )
    assert compare_tables(before, before) is None


def test_place_in_state_has_no_tokens():
    before = table(3)
    after = before.copy()
    after[0, 1] ^= np.uint64(1)
    assert compare_tables(before, after, None) == (
        f"{PARTS[0].name} of 4 parts; first wrong page 1 of 3, 1 in all"
    )


@pytest.mark.parametrize("axis", [0, 1])
def test_swapped_parts_or_pages_are_detected(axis):
    """All parts and pages have arrived, but two of them in the wrong order."""
    before = table(5)
    after = before.copy()
    if axis == 0:
        after[[0, 1]] = before[[1, 0]]
    else:
        after[:, [1, 3]] = before[:, [3, 1]]
    first = "k, layer 0, KV heads [0,2) of 4 and"
    assert compare_tables(before, after).startswith(first)
    assert f"first wrong page {axis} of 5" in compare_tables(before, after)


def test_difference_names_single_token_of_page():
    before = table(3)
    after = before.copy()
    after[3, 2] ^= np.uint64(1)
    assert compare_tables(before, after, 1) == (
        "draft k, layer 0 of 4 parts; first wrong page 2 of 3 (token 2 of those sent), 1 in all"
    )


def test_unequal_digest_page_counts_are_reported():
    assert compare_tables(table(3), table(4)) == "prefill has 3 pages of this request, decode 4"


def test_differing_buffers_have_the_same_names_in_each_request():
    before = summarize(PARTS, table(3))
    changed = table(3)
    changed[[0, 2], 1] ^= np.uint64(1)
    names = [PARTS[0].name, PARTS[2].name]
    assert differing_buffers(before, summarize(PARTS, changed)) == names
    assert differing_buffers(before, summarize(PARTS, table(4))) == ["the number of pages"]


def test_position_weights_are_odd_and_distinct():
    found = position_weights(1 << 16)
    assert (found % 2 == 1).all()
    assert len(set(found.tolist())) == len(found)
    assert len({part.weight for part in PARTS}) == len(PARTS)


def layout(*buffers: Buffer) -> RankLayout:
    return RankLayout(1, 2, 0, 1, 4, "bfloat16", "DRAM", 2, buffers)


def test_byte_range_of_one_head_in_buffer():
    held = layout(Buffer("k", False, 0, 4 * 2 * 10, Heads(2, 4, 4), 8))
    (found,) = byte_ranges([Part("k", False, 0, Heads(3, 4, 4))], held, held.kv)
    assert (found.buffer, found.rows, found.start, found.length) == (0, 4, 10, 10)


@pytest.mark.parametrize(
    "part, why",
    [
        (Part("k", False, 1, Heads(2, 4, 4)), "TP 1/2 PP 0/1 does not hold k, layer 1"),
        (Part("k", False, 0, Heads(0, 4, 4)), "holds KV heads [2,4) of 4, which do not include k,"),
        (Part("k", False, 0), "holds k, layer 0, KV heads [2,4) of 4; the other side holds k,"),
    ],
)
def test_parts_missing_on_rank_are_refused(part, why):
    held = layout(Buffer("k", False, 0, 80, Heads(2, 4, 4), 8))
    with pytest.raises(LayoutError) as raised:
        byte_ranges([part], held, held.kv)
    assert why in str(raised.value)


def test_unsent_parts_are_reported():
    buffers = (
        Buffer("k", False, 0, 80, Heads(0, 4, 4), 8),
        Buffer("kv", False, 1, 80),
        Buffer("k", True, 0, 80, Heads(0, 4, 4), 8),
        Buffer("k", False, 2, 80, Heads(0, 4, 4), 8, unused=True),
    )
    sent = [Part("k", False, 0, Heads(0, 2, 4)), Part("k", False, 0, Heads(3, 4, 4))]
    assert missing_parts(buffers, sent) == ["k, layer 0, KV heads [2]", "kv, layer 1"]
    rest = [Part("k", False, 0, Heads(2, 3, 4)), Part("kv", False, 1)]
    assert missing_parts(buffers, sent + rest) == []


@pytest.mark.parametrize("elides", ["decode", "both"])
def test_index_keys_elided_by_decode_are_not_missing(elides):
    """Index keys of a layer that has some are missing if they are not sent."""

    def keys(side: str) -> RankLayout:
        sizes = (40, 0) if elides in (side, "both") else (40, 40)
        state = [Buffer("index_k", False, n, size, None, 8) for n, size in enumerate(sizes)]
        return RankLayout(0, 1, 0, 1, 4, "bfloat16", "DRAM", 2, (), tuple(state))

    src, dst = keys("prefill"), keys("decode")
    parts = sent_parts(src, dst, src.state, dst.state)
    assert parts == (Part("index_k", False, 0),)
    assert missing_parts(dst.state, parts) == []
    assert missing_parts(dst.state, ()) == ["index_k, layer 0"]


def test_digests_round_trip():
    digests = RoomDigests("TP 0/1 PP 0/1", summarize(PARTS, table(3)))
    assert decode_digests(encode_digests(digests)) == digests


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xc1junk",
        encode_digests(RoomDigests("", Digests(PARTS, b"1234", b""))),
        encode_digests(RoomDigests("", Digests((), b"", b""), Digests(PARTS, b"", b""))),
        encode_digests(RoomDigests("", Digests((), b"", b"123"))),
    ],
)
def test_invalid_digest_frames_are_refused(frame):
    with pytest.raises(LayoutError, match="digests of"):
        decode_digests(frame)
