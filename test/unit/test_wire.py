"""Layout frames: what is written can be read back, and foreign frames are ignored."""

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from kv_layout import (
    Buffer,
    Heads,
    LayoutError,
    RankLayout,
    decode_layout,
    encode_layout,
    has_layout_frame,
)

heads = st.builds(
    lambda *numbers: Heads(*sorted(numbers)),
    *[st.integers(0, 64)] * 3,
).filter(lambda heads: heads.count)
buffers = st.builds(
    Buffer,
    st.sampled_from(["k", "v", "index_k", "kv"]),
    st.booleans(),
    st.integers(0, 200),
    st.integers(1, 1 << 24),
    st.none() | heads,
    st.integers(0, 1 << 20),
    st.booleans(),
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
    aux=st.lists(st.integers(0, 1 << 15), max_size=10).map(tuple),
    aux_slots=st.integers(0, 4096),
    verifies=st.booleans(),
    whole_rows=st.booleans(),
)
# A frame of the previous version, whose buffers have five fields.
PREVIOUS_FRAME = (
    b"KVL1\x8a\xa7tp_rank\x01\xa7tp_size\x02\xa7pp_rank\x00\xa7pp_size\x01\xa9page_size\x10"
    b"\xa5dtype\xa8bfloat16\xa6memory\xa4VRAM\xactotal_layers=\xa2kv\x92"
    b"\x95\xa1k\xc2\x00\xcd\x10\x00\x93\x02\x04\x04\x95\xa2kv\xc3\x03\xcd\x01,\xc0"
    b"\xa5state\x91\x95\xa7index_k\xc2\x00\x08\xc0"
)
PREVIOUS_LAYOUT = RankLayout(
    tp_rank=1,
    tp_size=2,
    pp_rank=0,
    pp_size=1,
    page_size=16,
    dtype="bfloat16",
    memory="VRAM",
    total_layers=61,
    kv=(Buffer("k", False, 0, 4096, Heads(2, 4, 4)), Buffer("kv", True, 3, 300)),
    state=(Buffer("index_k", False, 0, 8),),
)
LAYOUT = RankLayout(0, 1, 0, 1, 16, "bfloat16", "VRAM", 61, (Buffer("k", False, 0, 4096),))


@given(layout=layouts)
def test_layout_round_trip(layout):
    assert decode_layout(encode_layout(layout)) == layout


@given(frame=st.binary(max_size=200).filter(lambda frame: not frame.startswith(b"KVL1")))
@example(frame=b"")
@example(frame=b"KVL")
@example(frame=b"KVL9\x80")
def test_frame_with_another_tag_is_not_a_layout(frame):
    """It comes from a stock peer, or from a fork that sends another frame in that place."""
    assert decode_layout(frame) is None


@given(noise=st.binary(max_size=200))
def test_garbled_layout_frame_raises(noise):
    with pytest.raises(LayoutError, match="layout frame"):
        decode_layout(b"KVL1" + noise)


@given(cut=st.integers(0, len(encode_layout(LAYOUT)) - 5))
def test_truncated_layout_frame_raises(cut):
    with pytest.raises(LayoutError, match="cannot be read"):
        decode_layout(encode_layout(LAYOUT)[: 4 + cut])


def test_oversized_frame_raises_if_it_is_a_layout():
    assert decode_layout(bytes(2 << 20)) is None
    with pytest.raises(LayoutError, match="at most"):
        decode_layout(b"KVL1" + bytes(2 << 20))


def test_unknown_layout_fields_are_ignored():
    later = msgspec.msgpack.decode(encode_layout(LAYOUT)[4:])
    later["compression"] = "none"
    later["kv"] = [[*buffer, "later"] for buffer in later["kv"]]
    assert decode_layout(b"KVL1" + msgspec.msgpack.encode(later)) == LAYOUT


def test_previous_layout_version_is_readable():
    """Its rank is sent slices."""
    assert decode_layout(PREVIOUS_FRAME) == PREVIOUS_LAYOUT
    assert not PREVIOUS_LAYOUT.whole_rows


class PreviousBuffer(msgspec.Struct, frozen=True, array_like=True):
    component: str
    draft: bool
    layer: int
    page_bytes: int
    heads: Heads | None = None


class PreviousRankLayout(msgspec.Struct, frozen=True, omit_defaults=True):
    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    page_size: int
    dtype: str
    memory: str
    total_layers: int
    kv: tuple[PreviousBuffer, ...]
    state: tuple[PreviousBuffer, ...] = ()


@given(layout=layouts)
def test_previous_version_reads_current_layout(layout):
    """The two classes above are its format: with them PREVIOUS_FRAME is rewritten unchanged."""
    read = msgspec.msgpack.Decoder(PreviousRankLayout).decode
    assert b"KVL1" + msgspec.msgpack.encode(read(PREVIOUS_FRAME[4:])) == PREVIOUS_FRAME
    theirs = read(encode_layout(layout)[4:])
    for field in PreviousRankLayout.__struct_fields__[:8]:
        assert getattr(theirs, field) == getattr(layout, field)
    for part in ("kv", "state"):
        for one, ours in zip(getattr(theirs, part), getattr(layout, part), strict=True):
            assert all(getattr(one, f) == getattr(ours, f) for f in one.__struct_fields__)


@pytest.mark.parametrize(
    "changed, said",
    [
        ({"tp_rank": 3, "tp_size": 2}, "TP 3/2"),
        ({"aux": (64, -1)}, "0 slots of "),
        ({"aux_slots": -1}, "-1 slots of "),
        ({"kv": (Buffer("k", False, 0, 0, Heads(0, 1, 1)),)}, r"Buffer\("),
        ({"kv": (Buffer("k", False, 0, -4096),)}, r"Buffer\("),
        ({"kv": (Buffer("k", False, 0, 4096, None, -1),)}, r"Buffer\("),
        ({"kv": (Buffer("k", False, 0, 4096, Heads(2, 2, 4)),)}, r"Buffer\("),
        ({"kv": (Buffer("k", False, 0, 4096, Heads(-1, 2, 4)),)}, r"Buffer\("),
        ({"kv": (Buffer("k", False, 0, 4096, Heads(0, 5, 4)),)}, r"Buffer\("),
    ],
    ids=str,
)
def test_impossible_layouts_are_refused(changed, said):
    with pytest.raises(LayoutError, match=f"invalid layout frame: {said}"):
        decode_layout(encode_layout(msgspec.structs.replace(LAYOUT, **changed)))


def test_large_model_layout_fits_in_8_kib():
    kv = tuple(Buffer(c, False, n, 1 << 20, Heads(0, 8, 64)) for c in "kv" for n in range(128))
    assert len(encode_layout(msgspec.structs.replace(LAYOUT, kv=kv))) < 8192


def test_layout_is_13th_frame_of_registration():
    registration = [b"None"] * 12
    assert not has_layout_frame(registration)
    assert has_layout_frame([*registration, encode_layout(LAYOUT), b"more"])
    assert not has_layout_frame([*registration, b"what a fork sends there"])
    assert not has_layout_frame([*registration, b"", encode_layout(LAYOUT)])
