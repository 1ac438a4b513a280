"""Host copies of later pools: V of another width, index keys of some layers, DCP ranks."""

import engine_calls
import pytest
import torch
from cpu_copy_checks import as_tokens, assert_moved, fill, round_trip, snapshot
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.hardware_backend.npu.memory_pool_npu import NPUMHATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

pytestmark = pytest.mark.engine

# 4 is half of K's: the engine's view of V fits, but its rows are not tokens.
V_WIDTHS = [3, 4, 16]


def slots_of(pages: list[int], size: int = 16) -> list[int]:
    return [size * page + slot for page in pages for slot in range(size)]


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


def some_index_keys(page_size: int):
    return engine_calls.mla_pool(True, page_size, 3, layers=4, indexer_layer_ids=[3, 6])


@pytest.mark.parametrize("tiles", [False, True])
def test_round_trip_with_index_keys_of_some_layers(tiles, monkeypatch):
    monkeypatch.setenv("SGLANG_USE_FIA_NZ", str(int(tiles)))
    pool = some_index_keys(16)
    assert len(pool.index_k_buffer) == 2
    round_trip(pool, slots_of([3, 1]), slots_of([2, 4]))


def test_index_keys_are_copied_by_token(monkeypatch):
    """Latents of a partly filled page are copied whole; of index keys only the request's."""
    monkeypatch.setenv("SGLANG_USE_FIA_NZ", "1")
    pool = some_index_keys(16)
    fill(pool)
    before = snapshot(pool)
    pool.load_cpu_copy(pool.get_cpu_copy(torch.arange(16, 36)), torch.arange(32, 52))
    assert_moved(pool, before, slots_of([1, 2]), slots_of([2, 3]), but="index_k_buffer")
    for layer, buffer in enumerate(as_tokens(pool)["index_k_buffer"]):
        expected = before["index_k_buffer"][layer].clone()
        expected[32:52] = before["index_k_buffer"][layer][16:36]
        assert torch.equal(buffer, expected)


def test_packed_records_are_never_in_tiles(monkeypatch):
    """Packed records are copied token by token, even with SGLANG_USE_FIA_NZ."""
    monkeypatch.setenv("SGLANG_USE_FIA_NZ", "1")
    record = {"dtype": torch.float8_e4m3fn, "kv_lora_rank": 128, "index_head_dim": 128}
    pool = engine_calls.mla_pool(
        True, 16, 3, **record, kv_cache_dim=128 + 4 + 2 * engine_calls.ROPE
    )
    tokens = [layer.view(torch.uint8).view(-1, layer.shape[-1]) for layer in pool.k_buffer]
    for layer in tokens:
        layer.copy_(torch.arange(layer.numel()).view(layer.shape) % 251)
    before = [layer.clone() for layer in tokens]
    pool.load_cpu_copy(pool.get_cpu_copy(torch.tensor([17, 3, 40])), torch.tensor([1, 50, 22]))
    for layer, was in zip(tokens, before):
        was[[1, 50, 22]] = was[[17, 3, 40]]
        assert torch.equal(layer, was)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("tiles", [False, True])
def test_dcp_rank_copies_only_its_own_pages(tiles, rank, monkeypatch):
    """A rank holds every other page of latents, but all index keys."""
    monkeypatch.setenv("SGLANG_USE_FIA_NZ", str(int(tiles)))
    ranks = {"attn_dcp_size": 2, "attn_dcp_rank": rank}
    pool = engine_calls.mla_pool(True, 16, ranks=ranks, index_size=128)
    assert (pool.dcp_size, pool.dcp_rank) == (2, rank)
    held = {
        name: [layer.view(-1, layer.shape[-1]) for layer in getattr(pool, name)]
        for name in ("k_buffer", "v_buffer", "index_k_buffer")
    }
    for layers in held.values():
        for number, layer in enumerate(layers):
            layer.copy_(torch.arange(layer.numel()).view(layer.shape) + number * 100_000)
    before = {name: [layer.clone() for layer in layers] for name, layers in held.items()}
    pool.load_cpu_copy(
        pool.get_cpu_copy(torch.tensor(slots_of([2, 3, 4]))), torch.tensor(slots_of([6, 7, 8]))
    )
    # Pages 2 and 4 are the first rank's pages 1 and 2, page 3 is the second's page 1.
    pages = {0: ([1, 2], [3, 4]), 1: ([1], [3])}[rank]
    for name, layers in held.items():
        source, target = map(slots_of, ([2, 3, 4], [6, 7, 8]) if "index" in name else pages)
        for layer, was in zip(layers, before[name]):
            expected = was.clone()
            expected[target] = was[source]
            assert torch.equal(layer, expected), name
