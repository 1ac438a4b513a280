"""`get_mha_kv_ptrs_with_pp` and `get_mla_kv_ptrs_with_pp` pair both sides' pointers by layer."""

import itertools
from types import SimpleNamespace

import engine_calls
import pytest
from sglang.srt.disaggregation.ascend.conn import AscendKVManager
from sglang.srt.disaggregation.kv_layout import Buffer, RankLayout, describe_unknown
from sglang.srt.disaggregation.mooncake.conn import MooncakeKVManager

pytestmark = pytest.mark.engine

SPLITS = [[23, 23, 24, 24], [30, 31], [2, 2, 3], [3, 4], [2, 2], [7]]


def assert_layers_match(pairs, count):
    assert len(pairs) == count
    assert all(theirs == ours + 1000 for ours, theirs in pairs), pairs


@pytest.mark.parametrize("sizes", SPLITS, ids=str)
def test_mha_pointers_pair_by_layer(sizes):
    for decode_drafts in (0, 1, 2):
        for stage, layers in enumerate(sizes):
            assert_layers_match(engine_calls.mha_pairs(sizes, stage, decode_drafts), 2 * layers)


def test_stock_mispairs_mha_pointers(stock):
    """94 layers over PP 4: stage 0 sends V 0 to K 92; 61 over PP 2: stage 1 sends V 30 to V 0."""
    first, second, even = stock(
        ["mha_pairs", [23, 23, 24, 24], 0, 0],
        ["mha_pairs", [30, 31], 1, 0],
        ["mha_pairs", [2, 2], 1, 0],
    )
    assert [100, 1092] in first
    assert [130, 1100] in second
    assert_layers_match(even, 4)


def test_mori_pointers_with_a_draft_on_decode_only(stock):
    pairs = engine_calls.mori_pairs(3, 1)
    assert len(pairs) == 6 and all(ours == theirs for ours, theirs in pairs)
    (wrong,) = stock(["mori_pairs", 3, 1])
    assert ["v 0", "v 1"] in wrong


def test_unknown_pool_is_treated_as_mha():
    """Stock assumes of every pool that K comes first; otherwise no buffer would be sent."""
    kv = describe_unknown([8] * 4, [64] * 4)
    own = RankLayout(0, 1, 0, 1, 1, "int64", "DRAM", 2, kv)
    manager = engine_calls._manager(MooncakeKVManager, 0, layout=own)
    pairs = manager.get_mha_kv_ptrs_with_pp([1, 2, 3, 4], [11, 12, 13, 14])
    assert pairs == ([1, 2], [3, 4], [11, 12], [13, 14], 2)


@pytest.mark.parametrize("groups", [1, 2, 3])
@pytest.mark.parametrize("sizes", [[30, 31], [2, 2, 3], [7]], ids=str)
def test_mla_pointers_pair_by_layer(sizes, groups):
    for drafts in itertools.product([0, 1, 2], repeat=2):
        for stage, layers in enumerate(sizes):
            common = min(drafts) if stage == len(sizes) - 1 else 0
            pairs = engine_calls.mla_pairs(sizes, stage, groups, list(drafts))
            assert_layers_match(pairs, groups * (layers + common))


def test_stock_mispairs_mla_pointers(stock):
    """k of a stage goes to the right k; v and index keys go to the k of other layers."""
    right, wrong = stock(["mla_pairs", [2, 2], 1, 1, [0, 0]], ["mla_pairs", [2, 2], 0, 2, [0, 0]])
    assert_layers_match(right, 2)
    assert [100, 1002] in wrong


def test_pointers_follow_the_layouts_of_both_ranks():
    """As on a running rank, which knows its own layout, with state, and that of a planned peer."""
    kv = [Buffer("kv", False, n, 8) for n in (2, 3)]
    own = RankLayout(
        0, 1, 1, 2, 1, "int64", "DRAM", 4, tuple(kv), (Buffer("index_k", False, 2, 8),)
    )
    manager = engine_calls._manager(AscendKVManager, 2, layout=own)
    assert manager.get_mla_kv_ptrs_with_pp([12, 13], [0, 1, 2, 3]) == ([12, 13], [2, 3], 2)
    turned = tuple(Buffer("kv", False, n, 8) for n in (3, 2, 1, 0))
    plan = SimpleNamespace(layout=RankLayout(0, 1, 0, 1, 1, "int64", "DRAM", 4, turned))
    peer = SimpleNamespace(plan=plan, dst_kv_ptrs=[0, 1, 2, 3])
    manager.decode_kv_args_table = {"peer": peer}
    assert manager.get_mla_kv_ptrs_with_pp([12, 13], [0, 1, 2, 3]) == ([12, 13], [1, 0], 2)
