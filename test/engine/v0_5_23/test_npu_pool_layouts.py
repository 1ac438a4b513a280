"""Compares buffer infos of NPU pools with index keys of some layers with their tensors' addresses.

The stock engine's infos are correct; the patch set's descriptions depend on them.
"""

import engine_calls
import pytest
import torch

pytestmark = pytest.mark.engine

RECORD = {
    "dtype": torch.float8_e4m3fn,
    "kv_lora_rank": 128,
    "index_head_dim": 128,
    "kv_cache_dim": 128 + 4 + 2 * engine_calls.ROPE,  # fp8, a scale of 4 bytes, bfloat16
}


@pytest.mark.parametrize("indexed", [[3, 4, 5], [4], []], ids=str)
@pytest.mark.parametrize("packed", [False, True])
def test_buffer_infos_with_index_keys_of_some_layers(indexed, packed):
    more = RECORD if packed else {}
    pool = engine_calls.mla_pool(True, 16, 3, layers=3, indexer_layer_ids=indexed, **more)
    rows = [pool.k_buffer] if packed else [pool.k_buffer, pool.v_buffer]
    said = engine_calls.reported_pages(pool.get_contiguous_buf_infos())
    keys = [pool.index_k_buffer]
    if pool.index_k_scale_buffer is not None:
        keys.append(pool.index_k_scale_buffer[..., None])
    expected = engine_calls.pages([layer for group in rows + keys for layer in group], 16)
    assert len(said) == 3 * len(rows) + len(indexed) * (1 + packed)
    assert said == expected
    assert engine_calls.reported_pages(pool.get_state_buf_infos()) == expected[3 * len(rows) :]
