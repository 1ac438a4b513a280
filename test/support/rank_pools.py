"""A rank's KV pools, as the engine makes them, and their buffers one by one.

A hybrid's even layers have a sliding window (`swa`), recurrent state (`mamba`), or only a short
convolution's window (`conv`); its odd layers have full KV.
"""

from types import SimpleNamespace

import numpy as np
import torch
from engine_release import SINCE_0_5_18
from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateShape
from sglang.srt.hardware_backend.npu.memory_pool_npu import (
    NPUMHATokenToKVPool,
    NPUMLATokenToKVPool,
)
from sglang.srt.mem_cache.memory_pool import (
    HybridLinearKVPool,
    MambaPool,
    MHATokenToKVPool,
    MLATokenToKVPool,
)
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

if SINCE_0_5_18:
    from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool as SparseKVPool
else:
    from sglang.srt.mem_cache.memory_pool import NSATokenToKVPool as SparseKVPool

UNTOUCHED = -1
WINDOW_PAGES = 2
MAMBA_SLOTS = 8
CHANNELS, GROUPS = 32, 2
STATE_SIZE = {"mamba": 4, "conv": 0}


def pool_layers(c: SimpleNamespace) -> range:
    """Returns the stage's layers; with sliding windows, 0.5.9 adds the next stage's first one."""
    stop = c.start_layer + c.layers
    more = c.hybrid == "swa" and not SINCE_0_5_18
    return range(c.start_layer, min(stop + more, c.model_layers))


def make_pool(c: SimpleNamespace, layers: range, heads: int, window_heads: int):
    """Makes the pool for these layers; `c` is a rank's configuration.

    Args:
        heads: This rank's KV heads per full-attention layer.
        window_heads: This rank's KV heads per sliding-window layer.
    """
    common = {
        "size": c.pages * c.page_size,
        "page_size": c.page_size,
        "dtype": getattr(torch, c.dtype),
        "device": c.device,
    }
    if c.hybrid:
        pool = _hybrid_pool(c, layers, heads, window_heads, common)
    else:
        common |= {
            "layer_num": len(layers),
            "enable_memory_saver": False,
            "start_layer": layers.start,
            "end_layer": layers.stop - 1,
        }
        pool = (_npu_pool if c.backend == "ascend" else _plain_pool)(c, heads, common)
    for _, buffer in pool_buffers(pool):
        if buffer.dtype != torch.uint8:
            buffer.fill_(UNTOUCHED)
    return pool


def _plain_pool(c: SimpleNamespace, heads: int, common: dict):
    latent = {"kv_lora_rank": c.k_width, "qk_rope_head_dim": c.v_width}
    if c.index_keys:
        width = c.k_width + c.v_width
        return SparseKVPool(index_head_dim=128, kv_cache_dim=width, **latent, **common)
    if c.mla:
        return MLATokenToKVPool(**latent, **common)
    return MHATokenToKVPool(head_num=heads, head_dim=c.k_width, v_head_dim=c.v_width, **common)


def _npu_pool(c: SimpleNamespace, heads: int, common: dict):
    if not c.mla:
        return NPUMHATokenToKVPool(head_num=heads, head_dim=c.k_width, **common)
    return NPUMLATokenToKVPool(
        kv_lora_rank=c.k_width,
        qk_rope_head_dim=c.v_width,
        index_head_dim=3 if c.index_keys else None,
        **common,
    )


def _hybrid_pool(c: SimpleNamespace, layers: range, heads: int, window_heads: int, common: dict):
    special, full = ([layer for layer in layers if layer % 2 == odd] for odd in (0, 1))
    common |= {
        "head_num": heads,
        "head_dim": c.k_width,
        "full_attention_layer_ids": full,
    }
    if not SINCE_0_5_18:
        common["enable_kvcache_transpose"] = False
    if c.hybrid == "swa":
        common |= {"size_swa": common["size"], "swa_head_num": window_heads}
        return SWAKVPool(swa_attention_layer_ids=special, **common)
    shape = Mamba2StateShape.create(
        tp_world_size=c.tp_size,
        intermediate_size=CHANNELS,
        n_groups=GROUPS,
        num_heads=4,
        head_dim=8,
        state_size=STATE_SIZE[c.hybrid],
        conv_kernel=4,
    )
    params = Mamba2CacheParams(shape=shape, layers=special)
    slots = {"size": MAMBA_SLOTS, "spec_state_size": 0, "cache_params": params, "device": c.device}
    if SINCE_0_5_18:
        slots["mamba_layer_ids"] = special
        common["start_layer"] = layers.start
    return HybridLinearKVPool(mamba_pool=MambaPool(**slots), **common)


def pool_buffers(pool):
    """Yields ((component, layer), tensor) per buffer.

    Tensors are `[tokens, heads, width]`, or opaque `[pages, bytes]`. Names of components that are
    sent as state begin with `state`. Recurrent layers are numbered from 0, and their tensors are
    `[slots, rows, bytes]`.
    """
    if isinstance(pool, SWAKVPool):
        for inner, windowed in ((pool.full_kv_pool, False), (pool.swa_kv_pool, True)):
            layers = [n for n, (_, is_swa) in pool.layers_mapping.items() if is_swa == windowed]
            yield from _tokens(inner, layers, "state_" if windowed else "")
    elif isinstance(pool, HybridLinearKVPool):
        yield from _tokens(pool.full_kv_pool, list(pool.full_attention_layer_id_mapping))
        cache = pool.mamba_pool.mamba_cache
        for name, layers in (("state_conv", cache.conv[0]), ("state_temporal", cache.temporal)):
            for layer, slots in enumerate(layers if layers.numel() else ()):
                yield (name, layer), slots.flatten(2).view(torch.uint8)
    else:
        layers = range(pool.start_layer, pool.start_layer + pool.layer_num)
        yield from _tokens(pool, layers)
        for layer, pages in zip(layers, getattr(pool, "index_k_with_scale_buffer", ())):
            yield ("state", layer), pages


def state_rows(c: SimpleNamespace, component: str, count: int) -> np.ndarray:
    """Returns the model's row numbers of this rank's recurrent state: heads, or channels.

    Of each of the three convolutions x, B and C, a rank has one part.
    """
    if component == "state_temporal":
        return c.tp_rank * count + np.arange(count)
    widths = np.array([CHANNELS] + [GROUPS * STATE_SIZE[c.hybrid]] * 2)
    starts, held = np.cumsum(widths) - widths, widths // c.tp_size
    return np.concatenate(
        [start + c.tp_rank * own + np.arange(own) for start, own in zip(starts, held)]
    )


def _tokens(pool, layers, prefix: str = ""):
    """Yields a pool's KV buffers as `[tokens, heads, width]`, whatever the pool's own view is."""
    if isinstance(pool, NPUMLATokenToKVPool):
        parts = {"k": pool.k_buffer, "v": pool.v_buffer}
        if pool.index_k_buffer is not None:
            parts["index_k"] = pool.index_k_buffer
    elif isinstance(pool, MLATokenToKVPool):
        parts = {"kv": pool.kv_buffer}
    else:
        parts = {"k": pool.k_buffer, "v": pool.v_buffer}
    for name, buffers in parts.items():
        for layer, buffer in zip(layers, buffers):
            yield (prefix + name, layer), buffer.view(-1, *buffer.shape[-2:])
