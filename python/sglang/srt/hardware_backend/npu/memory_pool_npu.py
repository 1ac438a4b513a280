"""The NPU pools say how their KV is cut into pages, whatever view of it the attention wants."""

from typing import List, Tuple

from sglang.srt.utils import is_npu

if is_npu():
    import torch_npu  # noqa: F401 - the engine's own methods call it


class NPUMHATokenToKVPool:
    def get_contiguous_buf_infos(self) -> Tuple[List[int], List[int], List[int]]:
        """Address, bytes and bytes a page of K of each layer, then of V of each (PR #15852).

        `ASCEND_USE_FIA` views a layer as tokens, so its first element is a token and not a page.
        """
        buffers = [*self.k_buffer, *self.v_buffer]
        pages = self.size // self.page_size + 1  # page 0 takes what padded tokens write
        return (
            [buffer.data_ptr() for buffer in buffers],
            [buffer.nbytes for buffer in buffers],
            [buffer.nbytes // pages for buffer in buffers],
        )


class NPUMLATokenToKVPool:
    def get_state_buf_infos(self) -> Tuple[List[int], List[int], List[int]]:
        """Address, bytes and bytes a page of each layer's index keys; empty without an indexer.

        The same buffers are the third group of `get_contiguous_buf_infos` (PR #23893), as which
        they are sent.
        """
        buffers = [] if self.index_k_buffer is None else list(self.index_k_buffer)
        return (
            [buffer.data_ptr() for buffer in buffers],
            [buffer.nbytes for buffer in buffers],
            [buffer[0].nbytes for buffer in buffers],
        )
