"""Compares the buffer infos of the NPU pools with the addresses of their tensors."""

import itertools

import engine_calls
import pytest

pytestmark = pytest.mark.engine

CASES = list(itertools.product([False, True], [1, 16, 128], [0, 3]))


@pytest.mark.parametrize("fia, page_size, start_layer", CASES)
def test_mha_buffer_infos_match_the_tensors(fia, page_size, start_layer):
    assert engine_calls.fia_pages(fia, page_size, start_layer)


@pytest.mark.parametrize("index_keys", [False, True])
@pytest.mark.parametrize("start_layer", [0, 3])
def test_mla_and_index_key_buffer_infos_match_the_tensors(index_keys, start_layer):
    pool = engine_calls.mla_pool(index_keys, 16, start_layer)
    keys = list(pool.index_k_buffer) if index_keys else []
    buffers = [*pool.k_buffer, *pool.v_buffer, *keys]
    assert engine_calls.reported_pages(pool.get_contiguous_buf_infos()) == engine_calls.pages(
        buffers, 16
    )
    assert engine_calls.reported_pages(pool.get_state_buf_infos()) == engine_calls.pages(keys, 16)
