"""NPU pools: host copies and token moves, where the engine's do not fit the buffers."""

from collections.abc import Iterator
from typing import Any, List, NoReturn, Tuple

import torch
from sglang.srt.hardware_backend.npu.cpu_copy import (
    HostCopy,
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


class NPUMHATokenToKVPool:
    RENAMED = (
        ("get_cpu_copy", "_engine_get_cpu_copy"),
        ("load_cpu_copy", "_engine_load_cpu_copy"),
    )

    def get_cpu_copy(
        self, indices: torch.Tensor, mamba_indices: Any = None, req_pool_index: Any = None
    ) -> List[List[List[torch.Tensor]]]:
        """Copies these token slots, of shape [tokens], to the host, as [layer][chunk][k, v].

        Extends the engine's, which views V with the width of K.
        """
        if self.v_head_dim == self.head_dim:
            return self._engine_get_cpu_copy(indices, mamba_indices, req_pool_index)
        return copy_layers_to_host(mha_layers(self), indices, self.cpu_offloading_chunk_size)

    def load_cpu_copy(
        self,
        kv_cache_cpu: List[List[List[torch.Tensor]]],
        indices: torch.Tensor,
        mamba_indices: Any = None,
        req_pool_index: Any = None,
    ) -> None:
        """Writes what `get_cpu_copy` returned into these token slots.

        Raises:
            ValueError: K and V differ in width, and the copy does not fit the slots or this pool;
                nothing has been written.
        """
        if self.v_head_dim == self.head_dim:
            return self._engine_load_cpu_copy(kv_cache_cpu, indices, mamba_indices, req_pool_index)
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

    def get_cpu_copy(
        self, indices: torch.Tensor, mamba_indices: Any = None, req_pool_index: Any = None
    ) -> List[Any]:
        """Copies these token slots, of shape [tokens], to the host; only for `load_cpu_copy`.

        Raises:
            ValueError: With `SGLANG_USE_FIA_NZ`, the slots do not fill page after page.
        """
        if not self._is_tiled():
            return self._engine_get_cpu_copy(indices, mamba_indices, req_pool_index)
        return [copy_to_host(*part) for part in self._parts(indices)]

    def load_cpu_copy(
        self,
        kv_cache_cpu: List[HostCopy],
        indices: torch.Tensor,
        mamba_indices: Any = None,
        req_pool_index: Any = None,
    ) -> None:
        """Writes what `get_cpu_copy` returned into these token slots.

        Raises:
            ValueError: With `SGLANG_USE_FIA_NZ`, the slots do not fill page after page, or the copy
                does not fit them or this pool.
        """
        if not self._is_tiled():
            return self._engine_load_cpu_copy(kv_cache_cpu, indices, mamba_indices, req_pool_index)
        for copied, part in zip(kv_cache_cpu, list(self._parts(indices)), strict=True):
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
