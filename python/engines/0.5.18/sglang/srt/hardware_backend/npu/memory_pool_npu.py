"""NPU pools: host copies and token moves, where the engine's do not fit the buffers."""

from typing import TYPE_CHECKING, Any, List, Tuple

import torch
from sglang.srt.hardware_backend.npu.cpu_copy import as_tokens, whole_pages
from sglang.srt.hardware_backend.npu.pool_parts import (
    copy_mha,
    copy_mla,
    get_missing_kv_buffer,
    load_mha,
    load_mla,
    missing_kv_buffer,
    move_mha,
    move_tokens,
)

if TYPE_CHECKING:
    from sglang.srt.hardware_backend.npu.memory_pool_npu import get_bool_env_var


class NPUMHATokenToKVPool:
    RENAMED = (
        ("get_cpu_copy", "_engine_get_cpu_copy"),
        ("load_cpu_copy", "_engine_load_cpu_copy"),
    )
    _move_kv_cache_impl = move_mha

    def get_cpu_copy(self, *slots: Any, **options: Any) -> List[Any]:
        """Copies token slots to the host, see `pool_parts.copy_mha`."""
        return copy_mha(self, *slots, **options)

    def load_cpu_copy(self, *copied: Any, **options: Any) -> None:
        """Writes such a copy into token slots, see `pool_parts.load_mha`."""
        load_mha(self, *copied, **options)


class NPUMLATokenToKVPool:
    RENAMED = (
        ("get_cpu_copy", "_engine_get_cpu_copy"),
        ("load_cpu_copy", "_engine_load_cpu_copy"),
    )
    kv_buffer = missing_kv_buffer
    get_mla_kv_buffer = get_missing_kv_buffer

    def get_cpu_copy(self, *slots: Any, **options: Any) -> List[Any]:
        """Copies token slots to the host, see `pool_parts.copy_mla`."""
        return copy_mla(self, *slots, **options)

    def load_cpu_copy(self, *copied: Any, **options: Any) -> None:
        """Writes such a copy into token slots, see `pool_parts.load_mla`."""
        load_mla(self, *copied, **options)

    def move_kv_cache(self, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
        """Copies tokens and their index keys to other slots, as trees of drafted tokens require.

        Raises:
            NotImplementedError: Pages are tiled, so that a token's bytes are not contiguous.
        """
        if self._is_tiled():
            raise NotImplementedError(
                "--speculative-eagle-topk above 1 moves single tokens, which NPU MLA pools do not "
                "support with SGLANG_USE_FIA_NZ; use --speculative-eagle-topk 1, or unset it"
            )
        move_tokens(map(as_tokens, self._groups()), tgt_loc, src_loc)

    def _is_tiled(self) -> bool:
        """Returns whether pages hold latents and RoPE parts in tiles."""
        return get_bool_env_var("SGLANG_USE_FIA_NZ")

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
