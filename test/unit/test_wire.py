"""The trailing frames: what is written is read, and what is not ours is left alone."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kv_layout import (
    Buffer,
    Heads,
    LayoutError,
    RankLayout,
    bears_layout,
    decode_layout,
    encode_layout,
)

heads = st.builds(Heads, *[st.integers(0, 64)] * 3)
buffers = st.builds(
    Buffer,
    st.sampled_from(["k", "v", "index_k", "kv"]),
    st.booleans(),
    st.integers(0, 200),
    st.integers(1, 1 << 24),
    st.none() | heads,
)
layouts = st.builds(
    RankLayout,
    tp_rank=st.just(1),
    tp_size=st.integers(2, 64),
    pp_rank=st.integers(0, 3),
    pp_size=st.integers(1, 4),
    page_size=st.integers(1, 128),
    dtype=st.sampled_from(["bfloat16", "float8_e4m3fn"]),
    memory=st.sampled_from(["DRAM", "VRAM"]),
    total_layers=st.integers(1, 200),
    kv=st.lists(buffers, max_size=5).map(tuple),
    state=st.lists(buffers, max_size=3).map(tuple),
)
LAYOUT = RankLayout(0, 1, 0, 1, 16, "bfloat16", "VRAM", 61, (Buffer("k", False, 0, 4096),))


@given(layout=layouts)
def test_round_trip(layout):
    assert decode_layout(encode_layout(layout)) == layout


@pytest.mark.parametrize("frame", [b"", b"KVL9\x80", b"junk"])
def test_a_peer_that_sends_no_description(frame):
    assert decode_layout(frame) is None


@given(noise=st.binary(max_size=200))
def test_a_garbled_description_is_a_layout_error(noise):
    with pytest.raises(LayoutError, match="layout frame"):
        decode_layout(b"KVL1" + noise)


@given(cut=st.integers(0, len(encode_layout(LAYOUT)) - 5))
def test_a_truncated_description_is_a_layout_error(cut):
    with pytest.raises(LayoutError, match="cannot be read"):
        decode_layout(encode_layout(LAYOUT)[: 4 + cut])


def test_an_oversized_frame_is_not_read():
    with pytest.raises(LayoutError, match="at most"):
        decode_layout(b"KVL1" + bytes(2 << 20))


def test_impossible_ranks_are_refused():
    with pytest.raises(LayoutError, match="TP 3/2"):
        decode_layout(encode_layout(msgspec.structs.replace(LAYOUT, tp_rank=3, tp_size=2)))


def test_fields_of_later_releases_are_skipped():
    later = msgspec.msgpack.decode(encode_layout(LAYOUT)[4:])
    later["compression"] = "none"
    later["kv"] = [[*buffer, "later"] for buffer in later["kv"]]
    assert decode_layout(b"KVL1" + msgspec.msgpack.encode(later)) == LAYOUT


def test_a_large_model_fits_one_small_frame():
    kv = tuple(Buffer(c, False, n, 1 << 20, Heads(0, 8, 64)) for c in "kv" for n in range(128))
    assert len(encode_layout(msgspec.structs.replace(LAYOUT, kv=kv))) < 8192


def test_a_description_is_a_registrations_13th_frame():
    registration = [b"None"] * 12
    assert not bears_layout(registration)
    assert bears_layout([*registration, encode_layout(LAYOUT), b"more"])
    assert not bears_layout([*registration, b"what a fork sends there"])
    assert not bears_layout([*registration, b"", encode_layout(LAYOUT)])
