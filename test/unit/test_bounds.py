"""The memory of a peer, and copies that leave it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_layout import (
    Bounds,
    Buffer,
    RankLayout,
    Sizes,
    announced_memory,
    described_aux,
    described_memory,
    encode_layout,
    encode_sizes,
    find_layout_frame,
    find_sizes,
    is_extension_frame,
    max_slots,
    slot_error,
)

HIGH_ADDRESS = 1 << 63


def rank(**more) -> RankLayout:
    kv = (Buffer("k", False, 0, 64, None, 10), Buffer("v", False, 0, 32))
    return RankLayout(0, 1, 0, 1, 16, "bfloat16", "VRAM", 1, kv, **more)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(0, 12)), max_size=6),
    st.lists(st.tuples(st.integers(0, 70), st.integers(0, 14)), max_size=6),
    st.sampled_from([0, HIGH_ADDRESS]),
)
def test_copy_is_accepted_only_within_joined_buffers(held, copies, base):
    """Overlapping buffers count as one; a copy may not cross into an adjacent buffer."""
    joined: list[set[int]] = []
    for start, size in held:
        here = set(range(start, start + size))
        for other in [other for other in joined if other & here]:
            joined.remove(other)
            here |= other
        joined.append(here)
    bounds = Bounds("decode", [(base + start, size) for start, size in held])
    for start, size in copies:
        within = any(set(range(start, start + max(1, size))) <= one for one in joined)
        if size:
            assert (bounds.outside_error([base + start], [size]) == "") == within


def test_first_copy_outside_is_reported():
    bounds = Bounds("decode 7", [(0x100, 0x100), (0, 0)])
    said = "a copy of 17 bytes at 0x1f0, which does not lie within any buffer that "
    said += "decode 7 registered"
    assert bounds.outside_error([0x100, 0x1F0, 0x50], [0x100, 17, 1]) == said


@pytest.mark.parametrize("copy", [(-8, 8), (0x100, -1), (1 << 64, 8), ((1 << 64) - 4, 8)])
def test_invalid_addresses_are_outside(copy):
    said = Bounds("decode", [(0x100, None)]).outside_error(*([number] for number in copy))
    assert said.startswith("a copy "), said


def test_buffer_of_unknown_length_reaches_to_next():
    bounds = Bounds("decode", [(0x100, None), (0x200, None), (0x180, 0x10)])
    assert bounds.outside_error([0x100, 0x180, 0x200], [0x80, 0x10, 1 << 40]) == ""
    outside = [(0x100, 0x81), (0x190, 1), (0x80, 1)]
    assert all(bounds.outside_error([at], [size]) for at, size in outside)


def test_described_buffers_have_lengths():
    layout = rank(aux=(8, 0, 16), aux_slots=4)
    assert described_memory(layout, "kv", [1000, 2000]) == [(1000, 640), (2000, None)]
    assert described_memory(layout, "kv", [1000]) == [(1000, None)]
    assert described_memory(None, "kv", [1000]) == [(1000, None)]
    assert described_aux(layout, [1, 2, 3]) == [(1, 32), (2, None), (3, 64)]
    assert described_aux(rank(), [1]) == [(1, None)]


def test_sizes_of_other_buffer_count_are_ignored():
    assert announced_memory([1000, 2000], [64, 32]) == [(1000, 64), (2000, 32)]
    assert announced_memory([1000], [64, 32]) is announced_memory([1000], []) is None


def test_sizes_round_trip():
    sizes = Sizes((640,), ((64, 32), ()), (8,))
    frames = [b"64", encode_layout(rank()), encode_sizes(sizes)]
    assert find_sizes(frames) == sizes
    assert [is_extension_frame(frame) for frame in frames] == [False, True, True]
    assert find_layout_frame(frames) == frames[1]
    assert len(encode_sizes(Sizes((1 << 33,) * 122, (), (1 << 20,) * 10))) < 1500


@pytest.mark.parametrize(
    "frames",
    [[], [b"KVS1"], [b"KVS1junk"], [encode_sizes(Sizes((-1,), (), ()))], [encode_layout(rank())]],
    ids=str,
)
def test_unreadable_sizes_are_ignored(frames):
    assert find_sizes(frames) is None


@pytest.mark.parametrize(
    "memory, items, most",
    [
        ([(1, 64), (2, 32)], [8, 8], 8),
        ([(1, 64), (2, 0)], [8, 0], 8),
        ([(1, 64)], [100], 0),
        ([(1, 0)], [0], None),
        ([(1, 64), (2, None)], [8, 8], None),
        ([(1, 64)], [8, 8], None),
        ([], [], None),
    ],
)
def test_most_slots_are_those_of_largest_buffer(memory, items, most):
    assert max_slots(memory, items) == most


def test_slots_outside_decode_pool_are_reported():
    assert slot_error("state 0", [], 0) == slot_error("state 0", [0, 7], 8) == ""
    assert slot_error("state 0", [9999], None) == ""
    said = "decode has set aside state 0 slots 3 to 8 of 8"
    assert slot_error("state 0", [8, 3], 8) == said
    assert slot_error("state 0", [-1], None).endswith("slots -1 to -1 of an unknown number")
