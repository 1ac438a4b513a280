"""Pairs the layers of two pointer lists, for any stages and drafts.

Pointers are the names of what they point to, in the engine's order: a pair is right if its two
names are equal.
"""

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from kv_layout import LayoutError, StockRegistration, layout_from_counts, pair_layers
from oracle import stages_of_sizes

COMPONENTS = {1: ("kv",), 2: ("k", "v"), 3: ("k", "v", "index_k")}


def names(groups, layers, drafts):
    """A rank's pointer list: component-major, the target before the draft."""
    return [(c, False, n) for c in COMPONENTS[groups] for n in layers] + [
        (c, True, n) for c in COMPONENTS[groups] for n in range(drafts)
    ]


def pair_names(groups, stage, total, drafts, decode):
    src = names(groups, stage, drafts)
    own = layout_from_counts(COMPONENTS[groups], stage[0], total, len(src))
    pairs = pair_layers(own, src, StockRegistration(0, 1, len(decode)), decode)
    assert all((b.component, b.draft, b.layer) == ours for b, ours, _ in pairs)
    return [(ours, theirs) for _, ours, theirs in pairs]


@settings(max_examples=200, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    groups=st.sampled_from([1, 2, 3]),
    prefill_drafts=st.integers(0, 3),
    decode_drafts=st.integers(0, 3),
)
@example([23, 23, 24, 24], 2, 0, 0)  # stock sends V 0 to K 92
@example([30, 31], 2, 0, 0)  # stock sends V 30 to V 0
@example([30, 31], 3, 0, 0)
@example([31, 30], 1, 0, 0)
@example([6, 1], 2, 1, 0)  # four pointers of the last stage, but not four groups
def test_stage_is_paired_with_decode_of_all_layers(sizes, groups, prefill_drafts, decode_drafts):
    stages = stages_of_sizes(sizes)
    decode = names(groups, range(sum(sizes)), decode_drafts)
    for stage in stages:
        drafts = prefill_drafts if stage is stages[-1] else 0
        both = [name for name in names(groups, stage, drafts) if name in decode]
        pairs = pair_names(groups, stage, sum(sizes), drafts, decode)
        assert pairs == [(name, name) for name in both]


@settings(max_examples=100, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 6), min_size=2, max_size=4),
    groups=st.sampled_from([1, 2, 3]),
    drafts=st.integers(0, 3),
)
def test_stage_is_paired_with_decode_of_same_stages(sizes, groups, drafts):
    stages = stages_of_sizes(sizes)
    # A stage may have as many layers, with the draft's, as the model: the count is ambiguous.
    assume(drafts < stages[-1][0])
    for stage in stages:
        held = drafts if stage is stages[-1] else 0
        own = names(groups, stage, held)
        assert pair_names(groups, stage, sum(sizes), held, own) == [(name, name) for name in own]


def test_missing_layer_raises():
    with pytest.raises(LayoutError, match="decode registered 4 KV buffers where prefill"):
        pair_names(2, [0, 1, 2], 3, 0, names(2, range(2), 0))


def test_pointer_count_of_partial_layers_raises():
    with pytest.raises(LayoutError, match=r"5 KV buffers cannot be 2 \(k, v\) per layer"):
        layout_from_counts(("k", "v"), 0, 3, 5)
