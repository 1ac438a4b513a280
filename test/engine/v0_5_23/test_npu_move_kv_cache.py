"""NPU pools: moving tokens to other slots, and reading a buffer that only CUDA's pools have."""

import inspect
from functools import partial

import engine_calls
import pytest
import torch
from cpu_copy_checks import assert_moved, fill, snapshot
from sglang.srt.hardware_backend.npu.memory_pool_npu import NPUMLATokenToKVPool

from pd_harness.parallel_context import single_rank_context

pytestmark = pytest.mark.engine

POOLS = {
    **engine_calls.POOLS,
    "mha_narrow_v": partial(engine_calls.mha_pool, False, v_head_dim=5),
    "mla_some_index_keys": partial(engine_calls.mla_pool, True, layers=3, indexer_layer_ids=[4]),
}
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


def test_stock_fails_to_move_tokens(stock):
    """The second case has copied page 3 when it fails; in the third there is no page 17."""
    asked = [("mha", False, 1, 3), ("mha", True, 1, 3), ("mha", True, 1, 17), ("mla", False, 1, 3)]
    said = [answer["raised"] for answer in stock(*(["npu_move", *one] for one in asked))]
    assert said[0].startswith("AssertionError: KV copy not initialized")
    assert "no attribute 'native_k_scale_buffer'" in said[1]
    assert said[2].startswith("IndexError")
    assert "no attribute 'kv_buffer'" in said[3]
    assert [engine_calls.npu_move(*one) for one in asked] == [[1]] * 4


@pytest.mark.parametrize(
    "environment, more, said",
    [("1", {}, "here True"), ("", {"ranks": {"attn_dcp_size": 2}}, "here 2")],
)
def test_unsupported_layout_refuses_to_move_tokens(environment, more, said, monkeypatch):
    monkeypatch.setenv("SGLANG_USE_FIA_NZ", environment)
    pool = engine_calls.mla_pool(False, 16, **more)
    fill(pool)
    before = snapshot(pool)
    with pytest.raises(NotImplementedError, match=said):
        pool.move_kv_cache(torch.tensor(TARGET), torch.tensor(SOURCE))
    assert_moved(pool, before, [], [])


def test_missing_kv_buffer_error_names_the_actual_buffers():
    """No inherited method that reads `kv_buffer` takes other memory for it."""
    pool = engine_calls.mla_pool(True, 16)
    assert not hasattr(pool, "kv_buffer")
    own = vars(NPUMLATokenToKVPool)
    users = {
        name
        for kind in NPUMLATokenToKVPool.__mro__[1:]
        for name, member in vars(kind).items()
        if inspect.isfunction(member) and name not in own
        if "kv_buffer" in member.__code__.co_names
    }
    assert users == {"_create_buffers", "_clear_buffers", "set_mla_kv_buffer"}
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
