"""Compares buffer infos that only later NPU pools have with the addresses of their tensors.

The stock engine's infos are correct; the patch set's descriptions depend on them.
"""

import engine_calls
import pytest
import torch

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("fia", [False, True])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
def test_buffer_infos_with_other_v_width(fia, page_size, dtype):
    pool = engine_calls.mha_pool(fia, page_size, 3, v_head_dim=5, dtype=dtype)
    buffers = [*pool.k_buffer, *pool.v_buffer]
    assert [buffer.shape[-1] for buffer in buffers] == [engine_calls.WIDTH] * 2 + [5] * 2
    assert engine_calls.reported_pages(pool.get_contiguous_buf_infos()) == engine_calls.pages(
        buffers, page_size
    )
