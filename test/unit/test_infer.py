"""A peer that describes nothing, of a model whose components have different layers."""

import pytest
from kv_layout import Buffer, LayoutError, PeerFacts, RankLayout, infer_layout

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
def test_without_stages_it_holds_the_same(drafts):
    own = layout(INDEXED, drafts)
    peer = infer_layout(own, PeerFacts(0, 1, len(own.kv), page_bytes=64))
    assert keys(peer.kv) == keys(own.kv)


def test_a_draft_of_its_own_is_left_alone():
    own = layout(INDEXED, {})
    peer = infer_layout(own, PeerFacts(0, 1, len(own.kv) + 3))
    assert keys(peer.kv[:10]) == keys(own.kv)
    assert [buffer.component for buffer in peer.kv[10:]] == ["undescribed"] * 3


@pytest.mark.parametrize("drafts, pointers", [({"k": [0], "v": [0]}, 13), ({}, 9)])
def test_what_cannot_be_dealt_out_is_refused(drafts, pointers):
    with pytest.raises(LayoutError, match=f"decode registered {pointers} KV buffers where"):
        infer_layout(layout(INDEXED, drafts), PeerFacts(0, 1, pointers))


@pytest.mark.parametrize("pointers", [5, 10, 12])
def test_a_stage_does_not_tell_which_layers_of_others_have_index_keys(pointers):
    own = layout({"k": [2, 3], "v": [2, 3], "index_k": [2]}, {}, pp=(1, 2))
    with pytest.raises(LayoutError, match="does not say for which layers"):
        infer_layout(own, PeerFacts(0, 1, pointers))
