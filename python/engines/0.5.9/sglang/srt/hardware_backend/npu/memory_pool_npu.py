"""NPU pools: the size of their KV pages, and the copy of their KV to the host and back."""

import torch
from sglang.srt.hardware_backend.npu.cpu_copy import (
    HostCopy,
    as_tokens,
    copy_from_host,
    copy_to_host,
    whole_pages,
)
from sglang.srt.utils import get_bool_env_var, is_npu

REMOVED = ("torch_npu",)

if is_npu():
    import torch_npu  # noqa: F401 - the engine's own methods call it


class NPUMHATokenToKVPool:
    def get_contiguous_buf_infos(self) -> tuple[list[int], list[int], list[int]]:
        """Returns addresses, bytes and bytes per page: K of all layers, then V (PR #15852).

        `ASCEND_USE_FIA` views a layer as tokens, so its first element is a token and not a page.
        """
        buffers = [*self.k_buffer, *self.v_buffer]
        pages = self.size // self.page_size + 1  # page 0 receives what padded tokens write
        return (
            [buffer.data_ptr() for buffer in buffers],
            [buffer.nbytes for buffer in buffers],
            [buffer.nbytes // pages for buffer in buffers],
        )

    def get_cpu_copy(self, indices: torch.Tensor) -> HostCopy:
        """Copies the KV of these token slots, of shape [tokens], to the host (PR #25249)."""
        return copy_to_host(*self._rows(indices))

    def load_cpu_copy(self, kv_cache_cpu: HostCopy, indices: torch.Tensor) -> None:
        """Writes what `get_cpu_copy` returned into these token slots, of shape [tokens].

        Raises:
            ValueError: The copy does not fit the slots or this pool; nothing has been written.
        """
        copy_from_host(kv_cache_cpu, *self._rows(indices))

    def _rows(self, indices: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor, int]:
        """Returns buffers as [layers, tokens, ...], rows to copy, and how many at a time."""
        whole = self.kv_buffer  # K and V of all layers
        layers = as_tokens(whole.view(-1, *whole.shape[2:]))
        return [layers], indices, self.cpu_offloading_chunk_size


class NPUMLATokenToKVPool:
    # These copy what `_rows` returns: with an indexer, its keys, too.
    get_cpu_copy = NPUMHATokenToKVPool.get_cpu_copy
    load_cpu_copy = NPUMHATokenToKVPool.load_cpu_copy

    def get_state_buf_infos(self) -> tuple[list[int], list[int], list[int]]:
        """Returns address, bytes and bytes per page of each layer's index keys, if there are any.

        The same buffers are the third group of `get_contiguous_buf_infos` (PR #23893), which is how
        the transfer backend sends them.
        """
        buffers = [] if self.index_k_buffer is None else list(self.index_k_buffer)
        return (
            [buffer.data_ptr() for buffer in buffers],
            [buffer.nbytes for buffer in buffers],
            [buffer[0].nbytes for buffer in buffers],
        )

    def _rows(self, indices: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor, int]:
        """Returns buffers as [layers, rows, ...], rows to copy, and how many at a time.

        A row is a token, or with `SGLANG_USE_FIA_NZ` a page.
        """
        buffers = [self.k_buffer, self.v_buffer]
        if self.index_k_buffer is not None:
            buffers.append(self.index_k_buffer)
        if get_bool_env_var("SGLANG_USE_FIA_NZ"):
            pages = whole_pages(indices, self.page_size)
            return buffers, pages, max(1, self.cpu_offloading_chunk_size // self.page_size)
        return [as_tokens(buffer) for buffer in buffers], indices, self.cpu_offloading_chunk_size
