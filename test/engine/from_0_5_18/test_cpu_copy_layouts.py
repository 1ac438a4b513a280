"""Host copies of later NPU pools: V of another width than K, and windows."""

import engine_calls
import pytest
import torch
from cpu_copy_checks import assert_moved, fill, round_trip, snapshot
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.hardware_backend.npu.memory_pool_npu import NPUMHATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

pytestmark = pytest.mark.engine

# 4 is half of K's: the engine's view of V fits, but its rows are not tokens.
V_WIDTHS = [3, 4, 16]


@pytest.mark.parametrize("fia", [False, True])
@pytest.mark.parametrize("width", V_WIDTHS)
@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_round_trip_with_other_v_width(fia, width, data):
    pool = engine_calls.mha_pool(fia, data.draw(st.sampled_from([1, 4])), 3, v_head_dim=width)
    pool.cpu_offloading_chunk_size = data.draw(st.integers(1, 5))
    slots = st.integers(0, pool.size + pool.page_size - 1)
    count = data.draw(st.integers(0, pool.size))
    lists = st.lists(slots, min_size=count, max_size=count, unique=True)
    more = {"mamba_indices": None, "req_pool_index": 3}
    round_trip(pool, data.draw(lists), data.draw(lists), **more)


@pytest.mark.parametrize("slots", [[4, 5, 6], [4], []], ids=str)
def test_copy_is_loaded_only_into_an_equal_number_of_slots(slots):
    pool = engine_calls.mha_pool(False, 4, v_head_dim=3)
    fill(pool)
    before = snapshot(pool)
    copied = pool.get_cpu_copy(torch.tensor([4, 5]))
    with pytest.raises(ValueError, match="can only be loaded into the same number of slots"):
        pool.load_cpu_copy(copied, torch.tensor(slots, dtype=torch.int64))
    assert_moved(pool, before, [], [])


@pytest.mark.parametrize("width", [3, engine_calls.WIDTH])
@pytest.mark.parametrize("kept", [5, 2])
def test_shrunk_window_is_loaded(width, kept):
    """The SWA pool truncates the copy of its window to the slots that the window has now."""
    heads = {"head_num": engine_calls.HEADS, "head_dim": engine_calls.WIDTH, "v_head_dim": width}
    layers = {"swa_attention_layer_ids": [1, 2], "full_attention_layer_ids": [0]}
    pool = SWAKVPool(
        **{"size": 32, "size_swa": 16, "page_size": 4, "dtype": torch.float32, "device": "cpu"},
        **heads,
        **layers,
        token_to_kv_pool_class=NPUMHATokenToKVPool,
    )
    window = pool.swa_kv_pool
    pool.full_kv_pool.cpu_offloading_chunk_size = window.cpu_offloading_chunk_size = 2
    for inner in (pool.full_kv_pool, window):
        fill(inner)
    whole, before = snapshot(pool.full_kv_pool), snapshot(window)
    source, target = list(range(4, 10)), list(range(20, 26))
    mapping = torch.zeros(64, dtype=torch.int64)
    mapping[source] = torch.tensor([0, 4, 5, 6, 7, 8])  # the first is out of the window
    mapping[target] = torch.tensor([0] * (6 - kept) + list(range(10, 10 + kept)))
    pool.register_mapping(mapping)
    pool.load_cpu_copy(pool.get_cpu_copy(torch.tensor(source)), torch.tensor(target))
    assert_moved(pool.full_kv_pool, whole, source, target)
    last = list(range(4, 9))[-kept:]
    assert_moved(window, before, last, list(range(10, 10 + kept)))
