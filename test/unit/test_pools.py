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


def describe(target, draft=None, count=4, state=False, tp=(0, 1), total=2, draft_total=None):
    lens = list(range(100, 100 + count))
    sizes = [3 * size for size in lens]
    buffers = describe_pools(target, draft, lens, sizes, state, tp, total, draft_total)
    assert [(buffer.page_bytes, buffer.pages) for buffer in buffers] == [(n, 3) for n in lens]
    return [(b.component, b.draft, b.layer) for b in buffers], [b.heads for b in buffers]


def test_mha_stage_has_k_and_v_with_heads():
    what, heads = describe(mha(start=3), tp=(1, 2), total=4)
    assert what == [("k", False, 3), ("k", False, 4), ("v", False, 3), ("v", False, 4)]
    assert set(heads) == {Heads(2, 4, 4)}


def test_replicated_heads_use_total_of_the_model():
    assert set(describe(mha(heads=1), tp=(3, 4), total=2)[1]) == {Heads(1, 2, 2)}


def test_inconsistent_head_total_is_ignored():
    assert set(describe(mha(heads=4), tp=(1, 2), total=2)[1]) == {Heads(4, 8, 8)}


def test_draft_buffers_follow_target():
    what, heads = describe(mha(1), mha(1, heads=1), tp=(1, 2), total=4, draft_total=1)
    assert what == [("k", False, 0), ("v", False, 0), ("k", True, 0), ("v", True, 0)]
    assert heads == [Heads(2, 4, 4)] * 2 + [Heads(0, 1, 1)] * 2


def test_mla_pool_has_one_kv_buffer_per_layer():
    assert describe(mla(kv_buffer=[]), count=2)[0] == [("kv", False, 0), ("kv", False, 1)]


@pytest.mark.parametrize("index, names", [(None, "kv"), ([], ["k", "v", "index_k"])])
def test_npu_mla_pool_has_separate_k_and_v(index, names):
    what, heads = describe(mla(1, 5, index_k_buffer=index), count=len(names))
    assert what == [(name, False, 5) for name in names]
    assert set(heads) == {None}


def npu(layers=2, start=0, **more):
    return mla(layers, start, **{"index_k_buffer": [], **more})


def test_index_keys_only_of_indexer_layers():
    what, _ = describe(npu(3, 4, indexer_layer_ids=(4, 6)), count=8)
    assert what[:6] == [(name, False, layer) for name in "kv" for layer in (4, 5, 6)]
    assert what[6:] == [("index_k", False, 4), ("index_k", False, 6)]


def test_npu_fp8_pool_has_no_v_but_index_key_scales():
    pool = npu(2, 4, indexer_layer_ids=(5,), dsa_kv_cache_store_fp8=True, index_k_scale_buffer=[])
    what, _ = describe(pool, count=4)
    names = [("k", 4), ("k", 5), ("index_k", 5), ("index_k_scale", 5)]
    assert what == [(name, False, layer) for name, layer in names]


def test_index_keys_of_hybrid_use_model_layer_ids():
    """The inner pool numbers its layers from 0."""
    inner = npu(3, indexer_layer_ids=(0, 2))
    pool = SimpleNamespace(full_kv_pool=inner, full_attention_layer_id_mapping={3: 0, 7: 1, 11: 2})
    what, _ = describe(pool, count=8)
    assert what[6:] == [("index_k", False, 3), ("index_k", False, 11)]


def test_sliding_window_pool_of_mla_is_described():
    pool = SimpleNamespace(
        full_kv_pool=mla(1, kv_buffer=[]),
        swa_kv_pool=mla(2, kv_buffer=[]),
        layers_mapping={0: (0, False), 1: (0, True), 2: (1, True)},
    )
    assert describe(pool, count=1)[0] == [("kv", False, 0)]
    assert describe(pool, count=2, state=True)[0] == [("swa_kv", False, 1), ("swa_kv", False, 2)]


def test_recurrent_state_uses_layer_ids_of_pool():
    """A stage registers its own layers; an additional state of some layers comes last."""
    mamba = SimpleNamespace(get_state_layer_ids=lambda: [4, 6, 4, 6, 6])
    what, _ = describe(SimpleNamespace(mamba_pool=mamba), count=5, state=True)
    parts = [("mamba_0", 4), ("mamba_0", 6), ("mamba_1", 4), ("mamba_1", 6), ("mamba_2", 6)]
    assert what == [(name, False, layer) for name, layer in parts]


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
        inner = {name: pools[name] for name in ("full_kv_pool", "swa_kv_pool")}
        target = SimpleNamespace(layers_mapping={0: (0, False), 1: (0, True)}, **inner)
    state = where == "swa_kv_pool"
    with pytest.raises(LayoutError, match=f"{reason}; the patch set does not support this pool"):
        describe_pools(target, pools["draft"], [1] * 8, [1] * 8, state, (0, 1), 2, 2)


def test_pool_without_required_attribute_is_refused():
    with pytest.raises(LayoutError, match="no attribute 'head_num'; the patch set does not"):
        describe(SimpleNamespace(start_layer=0, layer_num=2))


def test_sliding_window_hybrid_splits_layers():
    pool = SimpleNamespace(
        full_kv_pool=mha(2),
        swa_kv_pool=mha(1),
        layers_mapping={0: (0, False), 1: (0, True), 2: (1, False)},
    )
    assert [layer for _, _, layer in describe(pool)[0]] == [0, 2, 0, 2]
    assert describe(pool, count=2, state=True)[0] == [("swa_k", False, 1), ("swa_v", False, 1)]


def test_sliding_window_layers_have_own_head_count():
    """As in MiMo-V2: each of eight ranks has one head of either kind."""
    config = SimpleNamespace(
        get_total_num_kv_heads=lambda: 4, get_swa_num_kv_heads=lambda ranks: 8 // ranks
    )
    pool = SimpleNamespace(full_kv_pool=mha(1), swa_kv_pool=mha(1, heads=1))
    pool.layers_mapping = {0: (0, False), 1: (0, True)}
    assert total_heads(config, pool, False) == 4
    assert total_heads(config, mha(), True) == 4
    total = total_heads(config, pool, True)
    heads = describe(pool, count=2, state=True, tp=(5, 8), total=total)[1]
    assert set(heads) == {Heads(5, 6, 8)}


@pytest.mark.parametrize("draft", [False, True])
def test_layer_of_next_stage_is_marked_unused(draft):
    """The engine's pools of a stage include the next stage's first layer."""
    pool = SimpleNamespace(
        full_kv_pool=mha(2),
        swa_kv_pool=mha(1),
        layers_mapping={3: (0, False), 4: (0, True), 5: (1, False)},
    )
    pools = (mha(0), pool) if draft else (pool, None)
    buffers = describe_pools(*pools, [8] * 4, [8] * 4, False, (0, 1), 2, 2, range(3, 5))
    assert [b.layer for b in buffers] == [3, 5, 3, 5]
    assert [b.layer for b in buffers if b.unused] == ([] if draft else [5, 5])


def test_recurrent_hybrid_has_attention_and_state():
    mamba = SimpleNamespace(
        num_mamba_layers=3, get_contiguous_buf_infos=lambda: (range(6), range(6), range(6))
    )
    pool = SimpleNamespace(
        full_kv_pool=mha(2), full_attention_layer_id_mapping={3: 0, 7: 1}, mamba_pool=mamba
    )
    assert [layer for _, _, layer in describe(pool)[0]] == [3, 7, 3, 7]
    what, heads = describe(pool, count=6, state=True)
    assert what == [(f"mamba_{i}", False, n) for i in (0, 1) for n in range(3)]
    assert set(heads) == {None}


def test_empty_state_buffer_has_no_pages():
    """A short convolution stores only its window (LFM2); linear attention has no window."""
    mamba = SimpleNamespace(
        num_mamba_layers=1, get_contiguous_buf_infos=lambda: (range(2), range(2), range(2))
    )
    pool = SimpleNamespace(mamba_pool=mamba)
    buffers = describe_pools(pool, None, [8, 0], [24, 0], True, (0, 1), None, None)
    assert [(buffer.page_bytes, buffer.pages) for buffer in buffers] == [(8, 3), (0, 0)]


def test_index_keys_are_state_buffers():
    pool = mla(2, 4, kv_buffer=[], index_k_with_scale_buffer=[])
    assert describe(pool, count=2, state=True)[0] == [("index_k", False, 4), ("index_k", False, 5)]


def test_mha_pool_has_no_state_buffers():
    assert describe(mha(), count=0, state=True)[0] == []


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
    shared = SimpleNamespace(num_mamba_layers=2, get_contiguous_buf_infos=lambda: ([1] * 4,))
    target, draft = (SimpleNamespace(mamba_pool=shared) for _ in range(2))
    assert not has_separate_state(target, draft)
    assert not has_separate_state(target, None)
    apart = SimpleNamespace(num_mamba_layers=2, get_contiguous_buf_infos=lambda: ([1] * 4,))
    assert has_separate_state(target, SimpleNamespace(mamba_pool=apart))
    nsa, more = (
        SimpleNamespace(index_k_with_scale_buffer=[], start_layer=0, layer_num=1) for _ in range(2)
    )
    assert has_separate_state(nsa, more)
    assert not has_separate_state(nsa, SimpleNamespace(start_layer=0, layer_num=1))
