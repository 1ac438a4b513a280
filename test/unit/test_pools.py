"""Describes pools by their attributes; the fakes have those of the engine's pools."""

from types import SimpleNamespace

import pytest
from kv_layout import (
    Heads,
    LayoutError,
    describe_pools,
    has_separate_state,
    memory_kind,
    total_heads,
)


def mha(layers=2, start=0, heads=2):
    return SimpleNamespace(head_num=heads, layer_num=layers, start_layer=start)


def mla(layers=2, start=0, **more):
    return SimpleNamespace(kv_lora_rank=8, layer_num=layers, start_layer=start, **more)


def npu_mla(layers=2, start=0, **more):
    return mla(layers, start, **{"index_k_buffer": [], **more})


def recurrent(layers, buffers):
    infos = ([1] * buffers,)
    return SimpleNamespace(num_mamba_layers=layers, get_contiguous_buf_infos=lambda: infos)


def windows(full, swa, kinds, start=0):
    """Returns a pool with sliding windows; `kinds` has F (full) or W (window) for each layer."""
    mapping = {start + n: (kinds[:n].count(kind), kind == "W") for n, kind in enumerate(kinds)}
    return SimpleNamespace(full_kv_pool=full, swa_kv_pool=swa, layers_mapping=mapping)


def hybrid(inner, *layers, **more):
    mapping = {layer: n for n, layer in enumerate(layers)}
    return SimpleNamespace(full_kv_pool=inner, full_attention_layer_id_mapping=mapping, **more)


def describe(target, draft=None, count=4, state=False, tp=(0, 1), total=2, draft_total=None):
    """Returns each buffer as `component:layer/heads`, a draft's with a `*`; and their heads."""
    lens = list(range(100, 100 + count))
    sizes = [3 * size for size in lens]
    buffers = describe_pools(target, draft, lens, sizes, state, tp, total, draft_total)
    assert [(buffer.page_bytes, buffer.pages) for buffer in buffers] == [(n, 3) for n in lens]
    names = [
        f"{b.component}:{b.layer}{f'/{b.heads.count}' if b.heads else ''}{'*' * b.draft}"
        for b in buffers
    ]
    return " ".join(names), [b.heads for b in buffers]


INDEXED_LAYERS = npu_mla(3, 4, indexer_layer_ids=(4, 6))
FP8 = npu_mla(2, 4, indexer_layer_ids=(5,), dsa_kv_cache_store_fp8=True, index_k_scale_buffer=[])
INDEXED_HYBRID = hybrid(npu_mla(3, indexer_layer_ids=(0, 2)), 3, 7, 11)
MLA_WINDOWS = windows(mla(1, kv_buffer=[]), mla(2, kv_buffer=[]), "FWW")
MHA_WINDOWS = windows(mha(2), mha(1), "FWF")
MAMBA_HYBRID = hybrid(mha(2), 3, 7, mamba_pool=recurrent(3, 6))
# A stage registers its own layers; an additional state of some layers comes last.
MAMBA_STAGE = SimpleNamespace(
    mamba_pool=SimpleNamespace(get_state_layer_ids=lambda: [4, 6, 4, 6, 6])
)
NSA = mla(2, 4, kv_buffer=[], index_k_with_scale_buffer=[])


@pytest.mark.parametrize(
    "pool, state, expected",
    [
        (mha(start=3), False, "k:3/2 k:4/2 v:3/2 v:4/2"),
        (mha(), True, ""),
        (mla(kv_buffer=[]), False, "kv:0 kv:1"),
        (npu_mla(1, 5, index_k_buffer=None), False, "k:5 v:5"),
        (npu_mla(1, 5), False, "k:5 v:5 index_k:5"),
        (INDEXED_LAYERS, False, "k:4 k:5 k:6 v:4 v:5 v:6 index_k:4 index_k:6"),
        (FP8, False, "k:4 k:5 index_k:5 index_k_scale:5"),  # scales, and no v
        # The inner pool numbers its layers from 0.
        (INDEXED_HYBRID, False, "k:3 k:7 k:11 v:3 v:7 v:11 index_k:3 index_k:11"),
        (NSA, True, "index_k:4 index_k:5"),
        (MLA_WINDOWS, False, "kv:0"),
        (MLA_WINDOWS, True, "swa_kv:1 swa_kv:2"),
        (MHA_WINDOWS, False, "k:0/2 k:2/2 v:0/2 v:2/2"),
        (MHA_WINDOWS, True, "swa_k:1/2 swa_v:1/2"),
        (MAMBA_HYBRID, False, "k:3/2 k:7/2 v:3/2 v:7/2"),
        (MAMBA_HYBRID, True, "mamba_0:0 mamba_0:1 mamba_0:2 mamba_1:0 mamba_1:1 mamba_1:2"),
        (MAMBA_STAGE, True, "mamba_0:4 mamba_0:6 mamba_1:4 mamba_1:6 mamba_2:6"),
    ],
)
def test_pool_is_described_as_its_buffers(pool, state, expected):
    assert describe(pool, count=len(expected.split()), state=state)[0] == expected


@pytest.mark.parametrize(
    "held, tp, total, heads",
    [
        (2, (1, 2), 4, Heads(2, 4, 4)),
        (1, (3, 4), 2, Heads(1, 2, 2)),  # replicated
        (4, (1, 2), 2, Heads(4, 8, 8)),  # the total contradicts the pool, which wins
    ],
)
def test_heads_of_pool(held, tp, total, heads):
    assert set(describe(mha(heads=held), tp=tp, total=total)[1]) == {heads}


def test_draft_buffers_follow_target():
    what, heads = describe(mha(1), mha(1, heads=1), tp=(1, 2), total=4, draft_total=1)
    assert what == "k:0/2 v:0/2 k:0/1* v:0/1*"
    assert heads == [Heads(2, 4, 4)] * 2 + [Heads(0, 1, 1)] * 2


@pytest.mark.parametrize(
    "unlike, reason",
    [
        ({"kv_cache_layout": "vectorized_5d"}, "pages have layout vectorized_5d"),
        ({"requires_physical_write_loc": True}, "layers share one buffer"),
        ({"layer_shard_enabled": True}, "layers are sharded across ranks"),
        ({"shard_spec": None}, "pages are sharded across ranks"),
        ({"translate_loc_to_hisparse_device": None}, "also in host memory"),
    ],
)
@pytest.mark.parametrize("where", ["target", "draft", "full_kv_pool", "swa_kv_pool"])
def test_unsupported_pool_variant_is_refused(unlike, reason, where):
    pools = {name: mha() for name in ("target", "draft", "full_kv_pool", "swa_kv_pool")}
    vars(pools[where]).update(unlike)
    target = pools["target"]
    if "_kv_" in where:
        target = windows(pools["full_kv_pool"], pools["swa_kv_pool"], "FW")
    state = where == "swa_kv_pool"
    with pytest.raises(LayoutError, match=f"{reason}; the patch set does not support this pool"):
        describe_pools(target, pools["draft"], [1] * 8, [1] * 8, state, (0, 1), 2, 2)


def test_pool_without_required_attribute_is_refused():
    with pytest.raises(LayoutError, match="no attribute 'head_num'; the patch set does not"):
        describe(SimpleNamespace(start_layer=0, layer_num=2))


def test_sliding_window_layers_have_own_head_count():
    """As in MiMo-V2: each of eight ranks has one head of either kind."""
    config = SimpleNamespace(
        get_total_num_kv_heads=lambda: 4, get_swa_num_kv_heads=lambda ranks: 8 // ranks
    )
    pool = windows(mha(1), mha(1, heads=1), "FW")
    assert total_heads(config, pool, False) == 4
    assert total_heads(config, mha(), True) == 4
    total = total_heads(config, pool, True)
    heads = describe(pool, count=2, state=True, tp=(5, 8), total=total)[1]
    assert set(heads) == {Heads(5, 6, 8)}


@pytest.mark.parametrize("draft", [False, True])
def test_layer_of_next_stage_is_marked_unused(draft):
    """The engine's pools of a stage include the next stage's first layer."""
    pool = windows(mha(2), mha(1), "FWF", start=3)
    pools = (mha(0), pool) if draft else (pool, None)
    buffers = describe_pools(*pools, [8] * 4, [8] * 4, False, (0, 1), 2, 2, range(3, 5))
    assert [b.layer for b in buffers] == [3, 5, 3, 5]
    assert [b.layer for b in buffers if b.unused] == ([] if draft else [5, 5])


def test_empty_state_buffer_has_no_pages():
    """A short convolution stores only its window (LFM2); linear attention has no window."""
    pool = SimpleNamespace(mamba_pool=recurrent(1, 2))
    buffers = describe_pools(pool, None, [8, 0], [24, 0], True, (0, 1), None, None)
    assert [(buffer.page_bytes, buffer.pages) for buffer in buffers] == [(8, 3), (0, 0)]


def test_unexpected_buffer_count_is_refused():
    with pytest.raises(LayoutError, match="should register 4 KV buffers, the engine registers 5"):
        describe_pools(mha(), None, [1] * 5, [1] * 5, False, (0, 1), 2, None)


@pytest.mark.parametrize(
    "device, kind", [("cpu", "DRAM"), ("cuda:1", "VRAM"), ("npu", "VRAM"), ("cpu:0", "DRAM")]
)
def test_memory_kind_of_device(device, kind):
    assert memory_kind(SimpleNamespace(device=device)) == kind


def test_draft_has_separate_state_unless_pool_is_shared():
    """A hybrid's target and draft share one pool of recurrent state, to be registered once."""
    shared = recurrent(2, 4)
    target, draft = (SimpleNamespace(mamba_pool=shared) for _ in range(2))
    assert not has_separate_state(target, draft)
    assert not has_separate_state(target, None)
    assert has_separate_state(target, SimpleNamespace(mamba_pool=recurrent(2, 4)))
    nsa, more = (
        SimpleNamespace(index_k_with_scale_buffer=[], start_layer=0, layer_num=1) for _ in range(2)
    )
    assert has_separate_state(nsa, more)
    assert not has_separate_state(nsa, SimpleNamespace(start_layer=0, layer_num=1))
