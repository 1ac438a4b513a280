"""NPU pools: moves that stock fails at, or ranks cannot do; who reads a buffer that they lack."""

import inspect

import engine_calls
import pytest
import torch
from cpu_copy_checks import assert_moved, fill, snapshot
from sglang.srt.hardware_backend.npu.memory_pool_npu import NPUMLATokenToKVPool

pytestmark = pytest.mark.engine


def test_stock_fails_to_move_tokens(stock):
    """The second case has copied page 3 when it fails; in the third there is no page 17."""
    asked = [("mha", False, 1, 3), ("mha", True, 1, 3), ("mha", True, 1, 17), ("mla", False, 1, 3)]
    said = [answer["raised"] for answer in stock(*(["npu_move", *one] for one in asked))]
    assert said[0].startswith("AssertionError: KV copy not initialized")
    assert "no attribute 'native_k_scale_buffer'" in said[1]
    assert said[2].startswith("IndexError")
    assert "no attribute 'kv_buffer'" in said[3]
    assert [engine_calls.npu_move(*one) for one in asked] == [[1]] * 4


def test_tokens_that_are_spread_over_ranks_are_not_moved():
    pool = engine_calls.mla_pool(False, 16, ranks={"attn_dcp_size": 2})
    fill(pool)
    before = snapshot(pool)
    with pytest.raises(NotImplementedError, match="here 2"):
        pool.move_kv_cache(torch.tensor([16, 17]), torch.tensor([17, 18]))
    assert_moved(pool, before, [], [])


def test_no_inherited_method_takes_other_memory_for_kv_buffer():
    own = vars(NPUMLATokenToKVPool)
    users = {
        name
        for kind in NPUMLATokenToKVPool.__mro__[1:]
        for name, member in vars(kind).items()
        if inspect.isfunction(member) and name not in own
        if "kv_buffer" in member.__code__.co_names
    }
    assert users == {"_create_buffers", "_clear_buffers", "set_mla_kv_buffer"}
