"""Attention over the engine's NPU pools, computed by the engine's own torch-native backend.

It needs the engine, so only a server with ``--attention-backend ascend`` imports it.
"""

import copy

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool


class TokenView:
    """An NPU pool with the buffers that the torch-native backend reads: [tokens, heads, width].

    NPU pools store pages, [pages, page size, heads, width], or with ``ASCEND_USE_FIA`` single
    tokens, [tokens, 1, heads, width].  MLA pools store the latent part where others store K, and
    the RoPE part where others store V; attention's K is both, and its V the latent part.
    """

    def __init__(self, pool):
        self.pool = pool
        self.is_mla = isinstance(pool, MLATokenToKVPool)

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        key = self.pool.get_key_buffer(layer_id).flatten(0, 1)
        if not self.is_mla:
            return key
        return torch.cat([key, self.pool.get_value_buffer(layer_id).flatten(0, 1)], dim=-1)

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        get = self.pool.get_key_buffer if self.is_mla else self.pool.get_value_buffer
        return get(layer_id).flatten(0, 1)

    def set_kv_buffer(self, layer, loc, key: torch.Tensor, value: torch.Tensor) -> None:
        if self.is_mla:
            key, value = key.split([self.pool.kv_lora_rank, self.pool.qk_rope_head_dim], dim=-1)
        self.pool.set_kv_buffer(layer, loc, key, value)


class AscendAttention(TorchNativeAttnBackend):
    """The engine's ``ascend`` backend; the engine passes MLA's RoPE parts to it separately."""

    def __init__(self, runner):
        super().__init__(runner)
        if hasattr(self, "token_to_kv_pool"):
            self.token_to_kv_pool = TokenView(self.token_to_kv_pool)

    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True, **rope):
        q, k = _joined(q, k, layer, **rope)
        return super().forward_extend(q, k, v, layer, _viewed(forward_batch), save_kv_cache)

    def forward_decode(self, q, k, v, layer, forward_batch, save_kv_cache=True, **rope):
        q, k = _joined(q, k, layer, **rope)
        return super().forward_decode(q, k, v, layer, _viewed(forward_batch), save_kv_cache)


def _joined(q, k, layer, q_rope=None, k_rope=None):
    """Queries and keys with their RoPE parts, [tokens, heads, width]."""
    if q_rope is None:
        return q, k
    heads = layer.tp_q_head_num
    q = torch.cat([q.view(len(q), heads, -1), q_rope.view(len(q), heads, -1)], dim=-1)
    return q, torch.cat([k, k_rope.view(len(k), 1, -1)], dim=-1)


def _viewed(forward_batch):
    """The batch with its pool as a `TokenView`; in 0.5.9 attention reads the batch's pool."""
    if not hasattr(forward_batch, "token_to_kv_pool"):
        return forward_batch
    batch = copy.copy(forward_batch)
    batch.token_to_kv_pool = TokenView(forward_batch.token_to_kv_pool)
    return batch
