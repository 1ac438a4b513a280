"""Compares the description of each buffer of real pools with what the engine reads there.

The oracle reads the pools as attention does: by a layer's number in the model.
"""

from types import SimpleNamespace

import pytest
import torch
from engine_calls import kv_buffer_infos
from engine_release import IS_0_5_18, SINCE_0_5_23, not_0_5_18
from sglang.srt.hardware_backend.npu.memory_pool_npu import (
    NPUMHATokenToKOnlyPool,
    NPUMHATokenToKVPool,
    NPUMiniMaxSparseKVPool,
    NPUMLATokenToKVPool,
)
from sglang.srt.mem_cache.dsa_cache_layer_split import LayerSplitDSATokenToKVPool
from sglang.srt.mem_cache.memory_pool import (
    DSATokenToKVPool,
    HybridLinearKVPool,
    MHATokenToKVPool,
    MLATokenToKVPool,
)
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

from pd_harness.parallel_context import single_rank_context

kv_layout = pytest.importorskip(
    "sglang.srt.disaggregation.kv_layout", reason="stock describes no pools"
)
pytestmark = pytest.mark.engine

PAGE, PAGES = 64, 5  # one of them takes the writes of padded tokens
TOKENS = {"page_size": PAGE, "dtype": torch.bfloat16, "device": "cpu", "enable_memory_saver": False}
HEADS = {"head_num": 2, "head_dim": 8}
LATENTS = {"kv_lora_rank": 128, "qk_rope_head_dim": 16}
RECORD = {"dtype": torch.float8_e4m3fn, "index_head_dim": 128, "kv_cache_dim": 128 + 4 + 32}


def stage(start: int, layers: int) -> dict:
    return {"start_layer": start, "end_layer": start + layers - 1, "layer_num": layers}


def make(kind: type, **sizes):
    with single_rank_context():
        return kind(**{"size": (PAGES - 1) * PAGE, **TOKENS, **sizes})


def mha(start=0, layers=2, kind=MHATokenToKVPool, **more):
    return make(kind, **HEADS, **stage(start, layers), **more)


def mla(start=0, layers=2, kind=MLATokenToKVPool, **more):
    return make(kind, **LATENTS, **stage(start, layers), **more)


def dsa(start=0, layers=2, kind=DSATokenToKVPool, **more):
    return mla(start, layers, kind, index_head_dim=128, kv_cache_dim=144, **more)


def window(kind=MHATokenToKVPool, **more):
    more = {"head_num": 2, "head_dim": 8, "size_swa": 2 * PAGE, **more}
    layers = {"full_attention_layer_ids": [5, 8], "swa_attention_layer_ids": [6, 7, 9]}
    return make(SWAKVPool, token_to_kv_pool_class=kind, **layers, **more)


def hybrid(**more):
    states = SimpleNamespace(
        get_contiguous_buf_infos=lambda: ([1, 2, 3], [8] * 3, [4] * 3),
        get_state_layer_ids=lambda: [4, 6, 4],
    )
    return make(
        HybridLinearKVPool,
        **HEADS,
        mamba_pool=states,
        full_attention_layer_ids=[3, 7],
        start_layer=3,
        **more,
    )


NPU_MLA, KEYS = {"kind": NPUMLATokenToKVPool}, {"index_head_dim": 128}
MLA_HYBRID = {"use_mla": True, **LATENTS}
KV, HYBRID_KV = {"k": [4, 5], "v": [4, 5]}, {"k": [3, 7], "v": [3, 7]}
# Pools of a stage, and the layers of each of their components, by their number in the model.
POOLS = {
    "mha": (lambda: mha(4), KV),
    "mha, narrow v": (lambda: mha(4, v_head_dim=4), KV),
    "mha on npu": (lambda: mha(4, kind=NPUMHATokenToKVPool), KV),
    "mla": (lambda: mla(4), {"kv": [4, 5]}),
    "dsa": (lambda: dsa(4), {"kv": [4, 5]}),
    "dsa, keys of some layers": (lambda: dsa(4, skip_topk_layers=[False, True]), {"kv": [4, 5]}),
    "mla on npu": (lambda: mla(4, **NPU_MLA), KV),
    "index keys": (lambda: mla(4, **NPU_MLA, **KEYS), {**KV, "index_k": [4, 5]}),
    "fp8": (lambda: mla(4, **NPU_MLA, dtype=torch.float8_e4m3fn), KV),
    "window": (window, {"k": [5, 8], "v": [5, 8]}),
    "window on npu": (lambda: window(NPUMHATokenToKVPool), {"k": [5, 8], "v": [5, 8]}),
    "hybrid": (hybrid, HYBRID_KV),
    "hybrid of mla": (lambda: hybrid(**MLA_HYBRID), {"kv": [3, 7]}),
}
if SINCE_0_5_23:
    POOLS |= {
        "index keys of some layers": (
            lambda: mla(4, 4, **NPU_MLA, **KEYS, indexer_layer_ids=[4, 6]),
            {"k": [4, 5, 6, 7], "v": [4, 5, 6, 7], "index_k": [4, 6]},
        ),
        "index keys of no layer": (lambda: mla(4, **NPU_MLA, **KEYS, indexer_layer_ids=[]), KV),
        "packed fp8": (
            lambda: mla(4, 3, **NPU_MLA, **RECORD, indexer_layer_ids=[5]),
            {"k": [4, 5, 6], "index_k": [5], "index_k_scale": [5]},
        ),
        "hybrid of mla on npu": (
            lambda: hybrid(**MLA_HYBRID, full_kv_pool_class=NPUMLATokenToKVPool),
            HYBRID_KV,
        ),
    }
if IS_0_5_18:  # which does not yet send layers without V apart
    every = [0, 1, 2, 3]
    POOLS["minimax"] = (lambda: minimax([0, 1], [2, 3]), {"k": every, "v": every})


def reader(pool, component: str):
    """The pool's method that returns a layer's buffer of a component."""
    names = {"k": "key", "kv": "key", "v": "value"}
    return getattr(pool, f"get_{names.get(component, component)}_buffer")


def described(target, draft=None, is_state: bool = False) -> list[tuple]:
    """The description and the address of each registered buffer of KV, or of state."""
    pools = [pool for pool in (target, draft) if pool is not None]
    infos = [pool.get_state_buf_infos() if is_state else kv_buffer_infos(pool) for pool in pools]
    pointers, lengths, items = (sum(parts, []) for parts in zip(*infos))
    buffers = kv_layout.describe_pools(target, draft, items, lengths, is_state, (0, 1), 2, 2)
    assert len(buffers) == len(pointers)
    return list(zip(buffers, pointers))


def names(found: list[tuple]) -> list[tuple[str, int]]:
    return [(buffer.component, buffer.layer) for buffer, _ in found]


def assert_attention_reads(buffer, pointer: int, pool) -> None:
    read = reader(pool, buffer.component)(buffer.layer)
    assert read.data_ptr() == pointer, buffer
    assert buffer.pages * buffer.page_bytes == read.nbytes, buffer
    assert buffer.pages == PAGES, buffer


@pytest.mark.parametrize("name", POOLS)
def test_every_buffer_is_what_attention_reads(name):
    pool, holds = POOLS[name][0](), POOLS[name][1]
    found = described(pool)
    assert names(found) == [(name, layer) for name, layers in holds.items() for layer in layers]
    for buffer, pointer in found:
        assert_attention_reads(buffer, pointer, pool)


DRAFTS = {
    "mha": lambda: mha(0, 1),
    "mla on npu": lambda: mla(0, 1, **NPU_MLA),
    "index keys": lambda: mla(0, 1, **NPU_MLA, **KEYS),
}
if SINCE_0_5_23:
    DRAFTS["index keys of some layers"] = DRAFTS["index keys"]


@pytest.mark.parametrize("name", DRAFTS)
def test_draft_buffers_follow_the_target(name):
    target, draft = POOLS[name][0](), DRAFTS[name]()
    found = described(target, draft)
    assert [buffer.draft for buffer, _ in found] == sorted(buffer.draft for buffer, _ in found)
    for buffer, pointer in found:
        assert_attention_reads(buffer, pointer, draft if buffer.draft else target)


def test_windows_are_described_as_state():
    pool = window()
    found = described(pool, is_state=True)
    assert names(found) == [(name, layer) for name in ("swa_k", "swa_v") for layer in (6, 7, 9)]
    for buffer, pointer in found:
        read = reader(pool, buffer.component.removeprefix("swa_"))(buffer.layer)
        assert read.data_ptr() == pointer


@not_0_5_18("has no windows of latents")
def test_windows_of_mla_latents_are_described_as_state():
    sizes = {**TOKENS, **LATENTS}
    sizes.pop("dtype")
    pool = window(MLATokenToKVPool, full_kv_pool_kwargs=sizes, swa_kv_pool_kwargs=sizes)
    assert names(described(pool, is_state=True)) == [("swa_kv", n) for n in (6, 7, 9)]
    assert names(described(pool)) == [("kv", 5), ("kv", 8)]


def test_recurrent_state_has_model_layer_numbers():
    found = described(hybrid(), is_state=True)
    assert names(found) == [("mamba_0", 4), ("mamba_0", 6), ("mamba_1", 4)]


def test_index_keys_of_target_and_draft_are_state():
    """A layer that reuses its neighbour's top-k has an empty entry."""
    found = described(dsa(4, skip_topk_layers=[False, True]), dsa(0, 1), is_state=True)
    assert [(buffer.draft, buffer.layer, bool(buffer.pages)) for buffer, _ in found] == [
        (False, 4, True),
        (False, 5, False),
        (True, 0, True),
    ]


class UnknownMHAPool(MHATokenToKVPool):
    """Has the parts of a known pool, but is another class."""


def with_attribute(name: str, value) -> UnknownMHAPool:
    pool = mha(kind=UnknownMHAPool)
    setattr(pool, name, value)
    return pool


def layer_split_pool():
    pool = dsa(4)
    pool.__class__ = LayerSplitDSATokenToKVPool
    pool.layer_shard_enabled = True
    pool._is_layer_owned = lambda layer: True
    return pool


def minimax(dense: list[int], sparse: list[int]):
    return make(
        NPUMiniMaxSparseKVPool,
        **HEADS,
        idx_head_dim=4,
        dense_layer_ids=dense,
        sparse_layer_ids=sparse,
        disable_value_sparse_layer_ids=sparse,
        start_layer=0,
        end_layer=len(dense) + len(sparse),
    )


UNKNOWN = {
    "k-only pool": lambda: mha(kind=NPUMHATokenToKOnlyPool),
    "heads first": lambda: with_attribute("kv_cache_layout", "hnd"),
    "single physical buffer": lambda: with_attribute("requires_physical_write_loc", True),
    "sharded pages": lambda: with_attribute("shard_spec", object()),
    "on the host as well": lambda: with_attribute("translate_loc_to_hisparse_device", None),
    "layer split": layer_split_pool,
    "not a pool": lambda: SimpleNamespace(start_layer=0, layer_num=1),
}
if SINCE_0_5_23:
    UNKNOWN["minimax"] = lambda: minimax([0, 1], [2, 3])
    UNKNOWN["minimax, all sparse"] = lambda: minimax([], [0, 1])


def count_registered_buffers(pool) -> int:
    """The number of registered buffers; without any, that of MHA with two layers."""
    return len(kv_buffer_infos(pool)[0]) if hasattr(pool, "page_size") else 4


@pytest.mark.parametrize("name", UNKNOWN)
def test_unsupported_pool_is_refused(name):
    pool = UNKNOWN[name]()
    for target, draft in ((pool, None), (mha(), pool)):
        pools = [one for one in (target, draft) if one is not None]
        lengths = [8] * sum(map(count_registered_buffers, pools))
        with pytest.raises(kv_layout.LayoutError, match="the patch set does not support this pool"):
            kv_layout.describe_pools(target, draft, lengths, lengths, False, (0, 1), 2, 2)
