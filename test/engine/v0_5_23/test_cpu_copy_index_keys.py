"""Host copies of NPU pools with index keys of some layers, packed records, or DCP ranks."""

import engine_calls
import pytest
import torch
from cpu_copy_checks import as_tokens, assert_moved, fill, round_trip, snapshot

pytestmark = pytest.mark.engine


def slots_of(pages: list[int], size: int = 16) -> list[int]:
    return [size * page + slot for page in pages for slot in range(size)]


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
