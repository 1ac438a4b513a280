"""What the NPU pools say of their buffers, against the addresses of the tensors themselves."""

import itertools

import probes
import pytest

pytestmark = pytest.mark.engine

CASES = list(itertools.product([False, True], [1, 16, 128], [0, 3]))


@pytest.mark.parametrize("fia, page_size, start_layer", CASES)
def test_pages_of_mha(fia, page_size, start_layer):
    assert probes.fia_pages(fia, page_size, start_layer)


@pytest.mark.parametrize("index_keys", [False, True])
@pytest.mark.parametrize("start_layer", [0, 3])
def test_pages_of_mla_and_its_index_keys(index_keys, start_layer):
    pool = probes.mla_pool(index_keys, 16, start_layer)
    keys = list(pool.index_k_buffer) if index_keys else []
    buffers = [*pool.k_buffer, *pool.v_buffer, *keys]
    assert probes.said_pages(pool.get_contiguous_buf_infos()) == probes.pages(buffers, 16)
    assert probes.said_pages(pool.get_state_buf_infos()) == probes.pages(keys, 16)
