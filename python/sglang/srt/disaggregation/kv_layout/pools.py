"""Describe the engine's KV pools.

A pool is known by what it has, not by its class, so that this module needs no engine:

    full_kv_pool             a hybrid: KV is in that pool, for some of the layers
    swa_kv_pool              ... and sliding-window KV, sent as state, in this one
    mamba_pool               ... or recurrent state, one slot a request, in this one
    kv_lora_rank, kv_buffer  MLA in one buffer a layer
    kv_lora_rank             MLA on NPU: latent (k), RoPE part (v) and, with an indexer, index_k
    index_k_with_scale_buffer   the indexer's keys on an accelerator other than NPU, sent as state
    head_num                 MHA or GQA: k and v, split by KV heads
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional

from .describe import Buffer, Heads, LayoutError
from .heads import heads_of_rank

Components = list[tuple[str, list[int], Optional[int]]]  # name, layers, KV heads held by the rank


def memory_kind(pool: Any) -> str:
    """NIXL's segment kind for a pool: `DRAM` on the CPU, `VRAM` on any accelerator."""
    return "DRAM" if str(pool.device).split(":")[0] == "cpu" else "VRAM"


def describe_pools(
    target: Any,
    draft: Any,
    item_lens: Sequence[int],
    data_lens: Sequence[int],
    state: bool,
    tp: tuple[int, int],
    total_kv_heads: Optional[int],
    draft_kv_heads: Optional[int],
    computed: Optional[range] = None,
) -> tuple[Buffer, ...]:
    """One buffer for each entry of `item_lens`, target before draft.

    Args:
        target, draft: KV pools of the engine; `draft` may be None.
        item_lens: Bytes a page (or a state slot), parallel to the rank's pointers.
        data_lens: Bytes of each whole buffer.
        state: Describe what is sent as state instead of KV.
        tp: Attention TP rank and size.
        total_kv_heads, draft_kv_heads: Of the whole model, from its configuration; None if unknown.
        computed: Layers of the target that this rank's stage computes; None for all of the pool's.

    Raises:
        LayoutError: The pools have other buffers than `item_lens` says.
    """
    parts = [(False, *part) for part in _parts(target, state, tp, total_kv_heads, computed)]
    if draft is not None and (not state or keeps_own_state(target, draft)):
        parts += [(True, *part) for part in _parts(draft, state, tp, draft_kv_heads)]
    if len(parts) != len(item_lens):
        raise LayoutError(
            f"{type(target).__name__} with draft {type(draft).__name__} should register "
            f"{len(parts)} {'state' if state else 'KV'} buffers, the engine registers "
            f"{len(item_lens)}; this pool is not known to the patch set"
        )
    return tuple(
        Buffer(component, is_draft, layer, page_bytes, heads, data_bytes // (page_bytes or 1), idle)
        for (is_draft, component, layer, heads, idle), page_bytes, data_bytes in zip(
            parts, item_lens, data_lens
        )
    )


def _parts(
    pool: Any,
    state: bool,
    tp: tuple[int, int],
    total_heads: Optional[int],
    computed: Optional[range] = None,
) -> list[tuple[str, int, Optional[Heads], bool]]:
    """Component, layer, heads, and whether it is idle, of each buffer of a pool."""
    idle = _idle_layers(pool, computed)
    return [
        (component, layer, None if held is None else _heads(held, tp, total_heads), layer in idle)
        for component, layers, held in (_state(pool) if state else _kv(pool))
        for layer in layers
    ]


def _kv(pool: Any) -> Components:
    inner = getattr(pool, "full_kv_pool", pool)
    layers = _full_attention_layers(pool) or _stage(inner)
    if not hasattr(inner, "kv_lora_rank"):
        return [("k", layers, inner.head_num), ("v", layers, inner.head_num)]
    if hasattr(inner, "kv_buffer"):
        return [("kv", layers, None)]
    names = ["k", "v"] + (["index_k"] if inner.index_k_buffer is not None else [])
    return [(name, layers, None) for name in names]


def _state(pool: Any) -> Components:
    if hasattr(pool, "swa_kv_pool"):
        layers = [layer for layer, (_, is_swa) in pool.layers_mapping.items() if is_swa]
        held = pool.swa_kv_pool.head_num
        return [("swa_k", layers, held), ("swa_v", layers, held)]
    if hasattr(pool, "mamba_pool"):
        layers = list(range(pool.mamba_pool.num_mamba_layers))
        count = len(pool.mamba_pool.get_contiguous_buf_infos()[0]) // max(1, len(layers))
        return [(f"mamba_{i}", layers, None) for i in range(count)]
    if hasattr(pool, "index_k_with_scale_buffer"):
        return [("index_k", _stage(pool), None)]
    return []


def keeps_own_state(target: Any, draft: Any) -> bool:
    """The draft has state of the target's kind, in memory of its own: it is registered, too.

    A hybrid's recurrent state lies in one pool, which target and draft share.
    """
    if draft is None or getattr(draft, "mamba_pool", None) is getattr(target, "mamba_pool", draft):
        return False
    return [name for name, *_ in _state(target)] == [name for name, *_ in _state(draft)]


def _stage(pool: Any) -> list[int]:
    return list(range(pool.start_layer, pool.start_layer + pool.layer_num))


def _full_attention_layers(pool: Any) -> list[int]:
    """Global numbers of a hybrid's layers with full attention; empty for other pools."""
    if hasattr(pool, "full_attention_layer_id_mapping"):
        return list(pool.full_attention_layer_id_mapping)
    mapping = getattr(pool, "layers_mapping", {})
    return [layer for layer, (_, is_swa) in mapping.items() if not is_swa]


def _idle_layers(pool: Any, computed: Optional[range]) -> set[int]:
    """Layers that are another stage's: with sliding windows the engine adds the next one."""
    held = set(getattr(pool, "layers_mapping", ()))
    return set() if computed is None else held - set(computed)


def _heads(held: int, tp: tuple[int, int], total: Optional[int]) -> Heads:
    """The interval of heads a pool holds; without a fitting total, replicas are ruled out."""
    rank, size = tp
    if total is not None and (total % size == 0 or size % total == 0):
        heads = heads_of_rank(rank, size, total)
        if heads.count == held:
            return heads
    return heads_of_rank(rank, size, held * size)
