"""Describes the engine's KV pools.

Recognizes a pool by its attributes, not by its class, so that this module needs no engine:

    full_kv_pool             hybrid: this pool holds the KV of some of the layers
    swa_kv_pool              ... and this one sliding-window KV, sent as state
    mamba_pool               ... or this one recurrent state, one slot per request
    kv_lora_rank, kv_buffer  MLA in one buffer per layer
    kv_lora_rank             MLA on NPU: latent (k), RoPE part (v) and, with an indexer, index_k
    index_k_with_scale_buffer   the indexer's keys on accelerators other than NPU, sent as state
    head_num                 MHA or GQA: k and v, split by KV heads

Later releases keep index keys of some layers only (indexer_layer_ids), and on NPU store both parts
of a latent as one fp8 record (dsa_kv_cache_store_fp8) beside the scales of the index keys
(index_k_scale_buffer). A pool that `_reject_unsupported_variants` rejects is not one of these.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Optional

from .heads import heads_of_rank
from .layout import OPAQUE, Buffer, Heads, LayoutError

Components = list[tuple[str, list[int], Optional[int]]]  # name, layers, KV heads held by the rank


def memory_kind(pool: Any) -> str:
    """Returns NIXL's segment kind for a pool: `DRAM` on the CPU, `VRAM` on any accelerator."""
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
    """Returns one buffer for each entry of `item_lens`, target before draft.

    Args:
        target, draft: The engine's KV pools; `draft` may be None.
        item_lens: Bytes per page (or state slot), parallel to the rank's pointers.
        data_lens: Bytes of each whole buffer.
        state: Whether to describe what is sent as state instead of KV.
        tp: Attention TP rank and size.
        total_kv_heads, draft_kv_heads: Of the whole model, see `total_heads`; None if unknown.
        computed: Layers of the target that this rank's stage computes; None for all of the pool's.

    Raises:
        LayoutError: The pools' buffers do not match `item_lens`, or their kind is unknown.
    """
    try:
        parts = [(False, *part) for part in _parts(target, state, tp, total_kv_heads, computed)]
        if draft is not None and (not state or has_separate_state(target, draft)):
            parts += [(True, *part) for part in _parts(draft, state, tp, draft_kv_heads)]
    except AttributeError as error:
        raise LayoutError(f"{error}; the patch set does not support this pool") from error
    if len(parts) != len(item_lens):
        and_draft = "" if draft is None else f" with draft {type(draft).__name__}"
        raise LayoutError(
            f"{type(target).__name__}{and_draft} should register "
            f"{len(parts)} {'state' if state else 'KV'} buffers, the engine registers "
            f"{len(item_lens)}; the patch set does not support this pool"
        )
    return tuple(
        Buffer(
            component, is_draft, layer, page_bytes, heads, data_bytes // (page_bytes or 1), unused
        )
        for (is_draft, component, layer, heads, unused), page_bytes, data_bytes in zip(
            parts, item_lens, data_lens
        )
    )


def total_heads(config: Any, pool: Any, state: bool) -> Optional[int]:
    """Returns the KV heads of a whole model; with `state`, of its sliding-window layers, if any.

    Their number may differ from that of layers with full attention.

    Args:
        config: The engine's `ModelConfig`.
        pool: The model's KV pool.
        state: Whether the heads are for what is sent as state.
    """
    if state and hasattr(pool, "swa_kv_pool"):
        return config.get_swa_num_kv_heads(1)
    return config.get_total_num_kv_heads()


def describe_unknown(item_lens: Sequence[int], data_lens: Sequence[int]) -> tuple[Buffer, ...]:
    """Returns opaque buffers for unknown pools; they fit another rank's of the same sizes."""
    return tuple(
        Buffer(OPAQUE, False, number, page_bytes, None, data_bytes // (page_bytes or 1))
        for number, (page_bytes, data_bytes) in enumerate(zip(item_lens, data_lens))
    )


def _parts(
    pool: Any,
    state: bool,
    tp: tuple[int, int],
    total_heads: Optional[int],
    computed: Optional[range] = None,
) -> list[tuple[str, int, Optional[Heads], bool]]:
    """Returns component, layer, heads and whether it is unused, for each buffer of a pool."""
    unused = _unused_layers(pool, computed)
    return [
        (component, layer, None if held is None else _heads(held, tp, total_heads), layer in unused)
        for component, layers, held in (_state(pool) if state else _kv(pool))
        for layer in layers
    ]


def _kv(pool: Any) -> Components:
    inner = getattr(pool, "full_kv_pool", pool)
    return _components(inner, _full_attention_layers(pool) or _stage(inner))


def _components(pool: Any, layers: list[int]) -> Components:
    """Returns what a pool with one kind of attention holds of these layers of the model."""
    _reject_unsupported_variants(pool)
    if not hasattr(pool, "kv_lora_rank"):
        return [("k", layers, pool.head_num), ("v", layers, pool.head_num)]
    if hasattr(pool, "kv_buffer"):
        return [("kv", layers, None)]
    names = ["k"] if getattr(pool, "dsa_kv_cache_store_fp8", False) else ["k", "v"]
    parts: Components = [(name, layers, None) for name in names]
    if pool.index_k_buffer is not None:
        local = getattr(pool, "indexer_layer_ids", _stage(pool))
        indexed = [layers[number - pool.start_layer] for number in local]
        scaled = getattr(pool, "index_k_scale_buffer", None) is not None
        parts += [(name, indexed, None) for name in ["index_k", "index_k_scale"][: 1 + scaled]]
    return parts


def _reject_unsupported_variants(pool: Any) -> None:
    """Raises LayoutError if a pool has the attributes of a known one, but other buffers."""
    layout = getattr(pool, "kv_cache_layout", "nhd")
    unlike = {
        f"pages have layout {layout}": layout != "nhd",
        "layers share one buffer": getattr(pool, "requires_physical_write_loc", False),
        "layers are sharded across ranks": getattr(pool, "layer_shard_enabled", False),
        "pages are sharded across ranks": hasattr(pool, "shard_spec"),
        "pages are also in host memory": hasattr(pool, "translate_loc_to_hisparse_device"),
    }
    if reasons := [reason for reason, is_so in unlike.items() if is_so]:
        raise LayoutError(
            f"{type(pool).__name__}: {', '.join(reasons)}; the patch set does not support this pool"
        )


def _state(pool: Any) -> Components:
    if hasattr(pool, "swa_kv_pool"):
        layers = [layer for layer, (_, is_swa) in pool.layers_mapping.items() if is_swa]
        inner = _components(pool.swa_kv_pool, layers)
        return [(f"swa_{component}", *held) for component, *held in inner]
    if hasattr(pool, "mamba_pool"):
        return _recurrent(pool.mamba_pool)
    if hasattr(pool, "index_k_with_scale_buffer"):
        return [("index_k", _stage(pool), None)]
    return []


def _recurrent(pool: Any) -> Components:
    """Returns tensor after tensor; layers have their number in the model if the pool knows it."""
    if not hasattr(pool, "get_state_layer_ids"):
        layers = list(range(pool.num_mamba_layers))
        count = len(pool.get_contiguous_buf_infos()[0]) // max(1, len(layers))
        return [(f"mamba_{i}", layers, None) for i in range(count)]
    parts: Components = []
    seen: Counter[int] = Counter()
    for layer in pool.get_state_layer_ids():
        parts.append((f"mamba_{seen[layer]}", [layer], None))
        seen[layer] += 1
    return parts


def has_separate_state(target: Any, draft: Any) -> bool:
    """Whether the draft has its own memory for state of the target's kind, to be registered, too.

    A hybrid's recurrent state lies in one pool, which target and draft share.
    """
    if draft is None or getattr(draft, "mamba_pool", None) is getattr(target, "mamba_pool", draft):
        return False
    return {name for name, *_ in _state(target)} == {name for name, *_ in _state(draft)}


def _stage(pool: Any) -> list[int]:
    return list(range(pool.start_layer, pool.start_layer + pool.layer_num))


def _full_attention_layers(pool: Any) -> list[int]:
    """Returns the global numbers of a hybrid's full-attention layers; empty for other pools."""
    if hasattr(pool, "full_attention_layer_id_mapping"):
        return list(pool.full_attention_layer_id_mapping)
    mapping = getattr(pool, "layers_mapping", {})
    return [layer for layer, (_, is_swa) in mapping.items() if not is_swa]


def _unused_layers(pool: Any, computed: Optional[range]) -> set[int]:
    """Returns layers that another stage computes.

    With sliding windows the engine gives a stage's pool the next stage's first layer, too.
    """
    held = set(getattr(pool, "layers_mapping", ()))
    return set() if computed is None else held - set(computed)


def _heads(held: int, tp: tuple[int, int], total: Optional[int]) -> Heads:
    """Returns the heads that a pool holds; assumes no replicas if `total` does not fit."""
    rank, size = tp
    if total is not None and (total % size == 0 or size % total == 0):
        heads = heads_of_rank(rank, size, total)
        if heads.count == held:
            return heads
    return heads_of_rank(rank, size, held * size)
