"""Infers the layout of a stock peer, for models whose components have different layers."""

import pytest
from kv_layout import Buffer, Heads, LayoutError, RankLayout, StockRegistration, infer_layout
from kv_layout.match import incompatibilities

INDEXED = {"k": [0, 1, 2, 3], "v": [0, 1, 2, 3], "index_k": [0, 2]}


def layout(holds: dict[str, list[int]], draft: dict[str, list[int]], pp=(0, 1)) -> RankLayout:
    kv = [
        Buffer(name, is_draft, layer, 64, None, 9)
        for is_draft, parts in ((False, holds), (True, draft))
        for name, layers in parts.items()
        for layer in layers
    ]
    return RankLayout(0, 1, *pp, 16, "bfloat16", "VRAM", 4, tuple(kv))


def keys(buffers) -> list[tuple]:
    return [buffer.key for buffer in buffers]


@pytest.mark.parametrize("drafts", [{}, {"k": [0], "v": [0], "index_k": [0]}, {"k": [0], "v": []}])
def test_stock_decode_without_pp_is_inferred_equal(drafts):
    own = layout(INDEXED, drafts)
    peer = infer_layout(own, StockRegistration(0, 1, len(own.kv), page_bytes=64))
    assert keys(peer.kv) == keys(own.kv)


def test_draft_that_prefill_lacks_is_not_described():
    own = layout(INDEXED, {})
    peer = infer_layout(own, StockRegistration(0, 1, len(own.kv) + 3))
    assert keys(peer.kv[:10]) == keys(own.kv)
    assert [buffer.component for buffer in peer.kv[10:]] == ["undescribed"] * 3


@pytest.mark.parametrize("drafts, pointers", [({"k": [0], "v": [0]}, 13), ({}, 9)])
def test_uneven_pointer_count_is_refused(drafts, pointers):
    with pytest.raises(LayoutError, match=f"decode registered {pointers} KV buffers where"):
        infer_layout(layout(INDEXED, drafts), StockRegistration(0, 1, pointers))


@pytest.mark.parametrize("pointers", [5, 10, 12])
def test_index_layers_of_other_stages_are_unknown(pointers):
    own = layout({"k": [2, 3], "v": [2, 3], "index_k": [2]}, {}, pp=(1, 2))
    with pytest.raises(LayoutError, match="KV buffers without layer numbers"):
        infer_layout(own, StockRegistration(0, 1, pointers))


# Index keys of a prefill stage and of a decode server without stages


def indexed(layers, drafts=0, elided=(), pp=(1, 2), total=8) -> RankLayout:
    """A rank with latents and index keys; `elided` layers have no index keys of their own."""
    numbers = [*((False, n) for n in layers), *((True, n) for n in range(drafts))]
    kv = [Buffer("kv", draft, n, 64, None, 9) for draft, n in numbers]
    state = [
        Buffer("index_k", draft, n, 0 if not draft and n in elided else 8, None, 9)
        for draft, n in numbers
    ]
    return RankLayout(0, 1, *pp, 16, "bfloat16", "VRAM", total, tuple(kv), tuple(state))


def test_elided_index_keys_of_other_stages_are_unknown():
    """The stage's first layer has none; if all of decode's seemed alike, none would be sent."""
    own = indexed(range(4, 8), elided=(4, 6))
    with pytest.raises(LayoutError, match="does not report which of its layers have index keys"):
        infer_layout(own, StockRegistration(0, 1, 8, 8, 64))


def test_elided_index_keys_are_inferred_without_pp():
    own = indexed(range(8), elided=(4, 6), pp=(0, 1))
    peer = infer_layout(own, StockRegistration(0, 1, 8, 8, 64))
    assert [buffer.page_bytes for buffer in peer.state] == [8, 8, 8, 8, 0, 8, 0, 8]


@pytest.mark.parametrize("drafts, pointers", [(1, 9), (2, 10), (0, 9), (0, 8)])
def test_draft_index_keys_follow_those_of_all_layers(drafts, pointers):
    own = indexed(range(4, 8), drafts)
    peer = infer_layout(own, StockRegistration(0, 1, pointers, pointers, 64))
    expected = [("index_k", False, n) for n in range(8)]
    name = "index_k" if drafts else "undescribed"
    expected += [(name, True, n) for n in range(pointers - 8)]
    assert keys(peer.state) == expected


# Hybrids


def hybrid(layers, state=(), pp=(1, 2)) -> RankLayout:
    kv = tuple(Buffer(c, False, n, 64, Heads(0, 1, 1), 9) for c in ("k", "v") for n in layers)
    return RankLayout(0, 1, *pp, 16, "bfloat16", "VRAM", 20, kv, tuple(state))


def test_same_stage_of_recurrent_hybrid_is_inferred():
    """If decode were taken for a server without stages, its state would be refused."""
    state = [Buffer(f"mamba_{i}", False, n, 32, None, 9) for i in range(2) for n in range(3)]
    own = hybrid([15], state)
    for counted in (6, None):
        peer = infer_layout(own, StockRegistration(0, 1, 2, counted, 64))
        assert (peer.pp_rank, peer.pp_size) == (1, 2)
        assert keys(peer.kv) == keys(own.kv)
        assert not incompatibilities(own, peer)


def test_layer_gaps_imply_hybrid_without_state():
    """As with windows in MXFP8, which the engine itself sends; stock sends K 15 to V 5."""
    own = hybrid([10, 15])
    with pytest.raises(LayoutError, match="KV buffers without layer numbers"):
        infer_layout(own, StockRegistration(0, 1, 8, None, 64))
    assert keys(infer_layout(own, StockRegistration(0, 1, 4, None, 64)).kv) == keys(own.kv)
