"""What NPU pools of several releases have in common: host copies, and moves between slots."""

from typing import Any, Iterable, List, NoReturn, Tuple

import torch
from sglang.srt.hardware_backend.npu.cpu_copy import (
    copy_from_host,
    copy_layers_from_host,
    copy_layers_to_host,
    copy_to_host,
)

# MHA


def mha_layers(pool: Any) -> List[Tuple[torch.Tensor, torch.Tensor]]:
    """Returns K and V of each layer of an MHA pool as [tokens, heads, width]."""
    return [
        (k.view(-1, pool.head_num, pool.head_dim), v.view(-1, pool.head_num, pool.v_head_dim))
        for k, v in zip(pool.k_buffer, pool.v_buffer)
    ]


def copy_mha(pool: Any, indices: torch.Tensor, *more: Any, **options: Any) -> List[Any]:
    """Copies token slots, of shape [tokens], to the host, as [layer][chunk][k, v].

    Extends the engine's, which views V with the width of K, and takes what else it takes.
    """
    if pool.v_head_dim == pool.head_dim:
        return pool._engine_get_cpu_copy(indices, *more, **options)
    return copy_layers_to_host(mha_layers(pool), indices, pool.cpu_offloading_chunk_size)


def load_mha(
    pool: Any, kv_cache_cpu: List[Any], indices: torch.Tensor, *more: Any, **options: Any
) -> None:
    """Writes what `copy_mha` returned into these token slots.

    Raises:
        ValueError: K and V differ in width, and the copy does not fit the slots or this pool;
            nothing has been written.
    """
    if pool.v_head_dim == pool.head_dim:
        return pool._engine_load_cpu_copy(kv_cache_cpu, indices, *more, **options)
    copy_layers_from_host(kv_cache_cpu, mha_layers(pool), indices, pool.cpu_offloading_chunk_size)


def move_mha(pool: Any, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
    """Copies tokens of all layers to other slots, as trees of drafted tokens require.

    Replaces the engine's: its kernel needs tables that these pools lack, and its native move takes
    token numbers for page numbers.
    """
    move_tokens(mha_layers(pool), tgt_loc, src_loc)


def move_tokens(
    layers: Iterable[Iterable[torch.Tensor]], target: torch.Tensor, source: torch.Tensor
) -> None:
    """Copies tokens to other slots of each layer's parts, of shape [tokens, ...]."""
    target, source = target.view(-1).long(), source.view(-1).long()
    for layer in layers:
        for rows in layer:
            rows[target] = rows[source]


# MLA. A release's pool has `_is_tiled()`, whether pages hold latents and RoPE parts in tiles, and
# `_parts(indices)`, for each part: buffers, their rows, and how many rows to copy at a time.


def copy_mla(pool: Any, indices: torch.Tensor, *more: Any, **options: Any) -> List[Any]:
    """Copies token slots, of shape [tokens], to the host; only for `load_mla`.

    Extends the engine's, which copies single tokens, and takes what else it takes.

    Raises:
        ValueError: With `SGLANG_USE_FIA_NZ`, the slots do not fill page after page.
    """
    if not pool._is_tiled():
        return pool._engine_get_cpu_copy(indices, *more, **options)
    return [copy_to_host(*part) for part in pool._parts(indices)]


def load_mla(
    pool: Any, kv_cache_cpu: List[Any], indices: torch.Tensor, *more: Any, **options: Any
) -> None:
    """Writes what `copy_mla` returned into these token slots.

    Raises:
        ValueError: With `SGLANG_USE_FIA_NZ`, the slots do not fill page after page, or the copy
            does not fit them or this pool.
    """
    if not pool._is_tiled():
        return pool._engine_load_cpu_copy(kv_cache_cpu, indices, *more, **options)
    for copied, part in zip(kv_cache_cpu, list(pool._parts(indices)), strict=True):
        copy_from_host(copied, *part)


@property
def missing_kv_buffer(pool: Any) -> NoReturn:
    """Missing on NPUs: CUDA's MLA pools have this buffer, and code written for them reads it.

    Raises:
        AttributeError: Always, so that `hasattr` returns False as for the engine's pool.
    """
    raise AttributeError(
        "NPU MLA pools have no kv_buffer: latents are in k_buffer, RoPE parts in v_buffer, "
        "page by page. The code that reads it does not support NPUs; choose an attention "
        "backend or cache that does, such as --attention-backend ascend"
    )


def get_missing_kv_buffer(pool: Any, *asked: Any, **options: Any) -> NoReturn:
    """Raises AttributeError; CUDA's attention backends call this."""
    return pool.kv_buffer
