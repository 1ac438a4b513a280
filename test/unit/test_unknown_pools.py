"""An unknown pool is sent page by page to a pool of the same sizes, and to no other."""

import msgspec
import numpy as np
import pytest
from kv_layout import (
    LayoutError,
    Pointers,
    RankLayout,
    StockRegistration,
    decode_layout,
    describe_unknown,
    encode_layout,
    plan_for_peer,
)

ITEMS = (64, 64, 32)
PAGES = 10


def rank(items=ITEMS, tp=(0, 1), state=()) -> RankLayout:
    kv = describe_unknown(items, [size * PAGES for size in items])
    held = describe_unknown(state, [size * PAGES for size in state])
    return RankLayout(*tp, 0, 1, 16, "float16", "VRAM", 2, kv, held)


def pointers(start: int, layout: RankLayout) -> Pointers:
    kv = [start + (n << 20) for n in range(len(layout.kv))]
    return Pointers(kv, [start + (n << 20) + (1 << 30) for n in range(len(layout.state))])


def plan(src: RankLayout, dst):
    layout = dst if isinstance(dst, RankLayout) else src
    return plan_for_peer(src, pointers(1 << 32, src), dst, pointers(1 << 40, layout))


def test_whole_pages_go_to_buffer_of_same_index():
    own = rank(state=(8,))
    peer = decode_layout(encode_layout(own))
    made = plan(own, peer)
    copies = made.kv.copies(np.array([1, 5]), np.array([2, 3]))
    src, dst = copies.descriptors(0, 0)
    found = {
        (int(a) - (1 << 32), int(b) - (1 << 40), int(size))
        for (a, size, _), (b, _, _) in zip(src, dst)
    }
    expected = {
        ((i << 20) + ours * size, (i << 20) + theirs * size, size)
        for i, size in enumerate(ITEMS)
        for ours, theirs in ((1, 2), (5, 3))
    }
    assert found == expected
    assert len(made.state.copies(np.array([1]), np.array([2]))) == 1


def test_stock_peer_of_equal_sizes_is_planned():
    made = plan(rank(), StockRegistration(0, 1, 3, 0, 64))
    assert len(made.kv.copies(np.array([1]), np.array([2]))) == 3


@pytest.mark.parametrize(
    "peer, said",
    [
        (rank(tp=(0, 2)), r"TP size, KV and state buffers are \(1, 3, 0\) on prefill, \(2, 3, 0\)"),
        (rank(ITEMS[:2]), r"\(1, 3, 0\) on prefill, \(1, 2, 0\) on decode; use the same TP and PP"),
        (rank(state=(8,)), r"\(1, 3, 0\) on prefill, \(1, 3, 1\)"),
        (rank((64, 48, 32)), "opaque, layer 1, bytes per page: prefill has 64, decode has 48"),
        (StockRegistration(0, 2, 3, 0, 64), r"\(2, 3, 0\) on decode"),
        (StockRegistration(0, 1, 2, 0, 64), "decode registered 2 KV buffers where prefill"),
        (
            StockRegistration(0, 1, 3, 0, 48),
            "decode registered 48 bytes per page, prefill expects 64",
        ),
    ],
)
def test_unknown_pool_of_other_sizes_is_refused(peer, said):
    with pytest.raises(LayoutError, match=said):
        plan(rank(), peer)


def test_pool_known_on_one_side_only_is_refused():
    known = msgspec.structs.replace(
        rank(), kv=tuple(msgspec.structs.replace(one, component="kv") for one in rank().kv)
    )
    for src, dst in ((rank(), known), (known, rank())):
        with pytest.raises(LayoutError, match="which decode .* does not hold"):
            plan(src, dst)
