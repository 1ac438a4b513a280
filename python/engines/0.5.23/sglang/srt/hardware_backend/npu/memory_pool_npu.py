"""NPU pools: host copies and token moves, where the engine's do not fit the buffers."""

from collections.abc import Iterator
from typing import Any, List, Tuple

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
            NotImplementedError: Pages are tiled, so that a token's bytes are not contiguous, or
                tokens are spread over ranks.
        """
        self._raise_if_native_kv_cache_disabled()
        if self._is_tiled() or self.dcp_size > 1:
            raise NotImplementedError(
                "--speculative-eagle-topk above 1 moves single tokens, which NPU MLA pools do not "
                f"support with SGLANG_USE_FIA_NZ (here {self.use_fia_nz}) or decode context "
                f"parallelism (here {self.dcp_size}); use --speculative-eagle-topk 1, or neither "
                "of the two"
            )
        layers = map(self._get_cpu_offload_layer_buffers, range(self.layer_num))
        move_tokens(layers, tgt_loc, src_loc)

    def _is_tiled(self) -> bool:
        """Returns whether pages hold latents and RoPE parts in tiles; packed records never are."""
        return self.use_fia_nz and not self.dsa_kv_cache_store_fp8

    def _parts(self, indices: torch.Tensor) -> Iterator[Tuple[List[torch.Tensor], Any, int]]:
        """Yields buffers, their rows, and rows at a time: whole pages, then index keys by token.

        With decode context parallelism a rank has one of `dcp_size` pages, but all index keys.
        """
        own = self._copy_indices_for_buffer(indices, self.is_draft_worker)
        pages_at_once = max(1, self.cpu_offloading_chunk_size // self.page_size)
        yield [self.k_buffer, self.v_buffer], whole_pages(own, self.page_size), pages_at_once
        if self.num_indexer_layers:
            yield [as_tokens(self.index_k_buffer)], indices, self.cpu_offloading_chunk_size
