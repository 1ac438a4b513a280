"""NPU pools: host copies and token moves, where the engine's do not fit the buffers."""

from typing import TYPE_CHECKING, Any, List, NoReturn, Tuple

import torch
from sglang.srt.hardware_backend.npu.cpu_copy import (
    as_tokens,
    copy_from_host,
    copy_layers_from_host,
    copy_layers_to_host,
    copy_to_host,
    whole_pages,
)
from sglang.srt.hardware_backend.npu.pool_parts import (
    mha_layers,
    move_tokens,
    raise_missing_kv_buffer,
)

if TYPE_CHECKING:
    from sglang.srt.hardware_backend.npu.memory_pool_npu import get_bool_env_var


class NPUMHATokenToKVPool:
    RENAMED = (
        ("get_cpu_copy", "_engine_get_cpu_copy"),
        ("load_cpu_copy", "_engine_load_cpu_copy"),
    )

    def get_cpu_copy(self, indices: torch.Tensor, mamba_indices: Any = None) -> List[Any]:
        """Copies these token slots, of shape [tokens], to the host, as [layer][chunk][k, v].

        Extends the engine's, which views V with the width of K.
        """
        if self.v_head_dim == self.head_dim:
            return self._engine_get_cpu_copy(indices, mamba_indices)
        return copy_layers_to_host(mha_layers(self), indices, self.cpu_offloading_chunk_size)

    def load_cpu_copy(
        self, kv_cache_cpu: List[Any], indices: torch.Tensor, mamba_indices: Any = None
    ) -> None:
        """Writes what `get_cpu_copy` returned into these token slots.

        Raises:
            ValueError: K and V differ in width, and the copy does not fit the slots or this pool;
                nothing has been written.
        """
        if self.v_head_dim == self.head_dim:
            return self._engine_load_cpu_copy(kv_cache_cpu, indices, mamba_indices)
        copy_layers_from_host(
            kv_cache_cpu, mha_layers(self), indices, self.cpu_offloading_chunk_size
        )

    def _move_kv_cache_impl(self, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
        """Copies tokens of all layers to other slots, as trees of drafted tokens require.

        Replaces the engine's: its kernel needs tables that these pools lack, and its native move
        takes token numbers for page numbers.
        """
        move_tokens(mha_layers(self), tgt_loc, src_loc)


class NPUMLATokenToKVPool:
    RENAMED = (
        ("get_cpu_copy", "_engine_get_cpu_copy"),
        ("load_cpu_copy", "_engine_load_cpu_copy"),
    )

    def get_cpu_copy(self, indices: torch.Tensor, mamba_indices: Any = None) -> List[Any]:
        """Copies these token slots, of shape [tokens], to the host; only for `load_cpu_copy`.

        Raises:
            ValueError: With `SGLANG_USE_FIA_NZ`, the slots do not fill page after page.
        """
        if not _has_tiles():
            return self._engine_get_cpu_copy(indices, mamba_indices)
        return [copy_to_host(*part) for part in self._parts(indices)]

    def load_cpu_copy(
        self, kv_cache_cpu: List[Any], indices: torch.Tensor, mamba_indices: Any = None
    ) -> None:
        """Writes what `get_cpu_copy` returned into these token slots.

        Raises:
            ValueError: With `SGLANG_USE_FIA_NZ`, the slots do not fill page after page, or the copy
                does not fit them or this pool.
        """
        if not _has_tiles():
            return self._engine_load_cpu_copy(kv_cache_cpu, indices, mamba_indices)
        for copied, part in zip(kv_cache_cpu, self._parts(indices), strict=True):
            copy_from_host(copied, *part)

    @property
    def kv_buffer(self) -> NoReturn:
        """Missing here: CUDA's pools have this buffer, and code written for them reads it.

        Raises:
            AttributeError: Always, so that `hasattr` returns False as for the engine's pool.
        """
        raise_missing_kv_buffer()

    def get_mla_kv_buffer(self, *asked: Any, **options: Any) -> NoReturn:
        """Raises AttributeError; CUDA's attention backends call this."""
        return self.kv_buffer

    def move_kv_cache(self, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
        """Copies tokens and their index keys to other slots, as trees of drafted tokens require.

        Raises:
            NotImplementedError: Pages are tiled, so that a token's bytes are not contiguous.
        """
        if _has_tiles():
            raise NotImplementedError(
                "--speculative-eagle-topk above 1 moves single tokens, which NPU MLA pools do not "
                "support with SGLANG_USE_FIA_NZ; use --speculative-eagle-topk 1, or unset it"
            )
        move_tokens(map(as_tokens, self._groups()), tgt_loc, src_loc)

    def _groups(self) -> List[torch.Tensor]:
        """Returns latents, RoPE parts and, with an indexer, its keys."""
        keys = [] if self.index_k_buffer is None else [self.index_k_buffer]
        return [self.k_buffer, self.v_buffer, *keys]

    def _parts(self, indices: torch.Tensor) -> List[Tuple[List[torch.Tensor], Any, int]]:
        """Returns buffers, their rows, and rows at a time: pages, then index keys by token."""
        pages_at_once = max(1, self.cpu_offloading_chunk_size // self.page_size)
        latents, rope, *keys = self._groups()
        parts = [([latents, rope], whole_pages(indices, self.page_size), pages_at_once)]
        if keys:
            parts.append(([*map(as_tokens, keys)], indices, self.cpu_offloading_chunk_size))
        return parts


def _has_tiles() -> bool:
    """Returns whether MLA pages hold latents and RoPE parts in tiles."""
    return get_bool_env_var("SGLANG_USE_FIA_NZ")
