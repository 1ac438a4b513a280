"""NPU pools: moving tokens to other slots, and reading a buffer that only CUDA's pools have."""

from functools import partial

import engine_calls
import pytest
import torch
from cpu_copy_checks import assert_moved, fill, snapshot
from engine_release import SINCE_0_5_23

from pd_harness.parallel_context import single_rank_context

pytestmark = pytest.mark.engine

POOLS = {
    **engine_calls.POOLS,
    "mha_narrow_v": partial(engine_calls.mha_pool, False, v_head_dim=5),
}
if SINCE_0_5_23:
    POOLS["mla_some_index_keys"] = partial(
        engine_calls.mla_pool, True, layers=3, indexer_layer_ids=[4]
    )
# With a slot that is both read and written (17), and a page's last slot (31).
SOURCE, TARGET = [17, 18, 31, 40], [16, 17, 50, 33]


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("kind", POOLS)
@pytest.mark.parametrize("page_size", [1, 16])
def test_tokens_are_moved_between_slots(kind, page_size, native):
    pool = POOLS[kind](page_size, 3, size=64)
    pool.use_native_move_kv_cache = native
    fill(pool)
    before = snapshot(pool)
    pool.move_kv_cache(torch.tensor(TARGET), torch.tensor(SOURCE))
    assert_moved(pool, before, SOURCE, TARGET)
    pool.move_kv_cache(torch.tensor([], dtype=torch.int64), torch.tensor([], dtype=torch.int64))


def test_tokens_of_tiled_pages_are_not_moved(monkeypatch):
    monkeypatch.setenv("SGLANG_USE_FIA_NZ", "1")
    pool = engine_calls.mla_pool(False, 16)
    fill(pool)
    before = snapshot(pool)
    with pytest.raises(NotImplementedError, match="moves single tokens"):
        pool.move_kv_cache(torch.tensor(TARGET), torch.tensor(SOURCE))
    assert_moved(pool, before, [], [])


def test_missing_kv_buffer_error_names_the_actual_buffers():
    pool = engine_calls.mla_pool(True, 16)
    assert not hasattr(pool, "kv_buffer")
    layer, slots, latents = type("Layer", (), {"layer_id": 0}), torch.tensor([3]), torch.zeros(1)
    for ask in (
        lambda: pool.set_mla_kv_buffer(layer, slots, latents, latents),
        lambda: pool.get_mla_kv_buffer(layer, slots, torch.float32),
    ):
        with (
            single_rank_context(),
            pytest.raises(AttributeError, match="latents are in k_buffer, RoPE parts in v_buffer"),
        ):
            ask()
