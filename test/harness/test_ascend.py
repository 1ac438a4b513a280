"""The CPU host's stand-ins for Ascend: operators, and attention over the real NPU pools."""

import importlib
import importlib.util
import os
import sys
from types import SimpleNamespace

import pytest

from pd_harness.cpu_host import SWITCH

if os.environ.get(SWITCH) != "1":
    pytest.skip("needs the engine on the CPU host: scripts/test.sh", allow_module_level=True)

import torch
from sglang.srt.hardware_backend.npu import memory_pool_npu
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.models.deepseek_common import attention_backend_handler

from pd_harness.cpu_host.npu_operators import _npu_reshape_and_cache, npu_scatter_nd_update_
from pd_harness.parallel_context import single_rank_context

PAGE = 16
START_LAYER, LAYERS, LAYER = 3, 2, 4  # a later pipeline stage; attention runs on its second layer
Q_HEADS, KV_HEADS, WIDTH = 4, 2, 8
LATENT, ROPE = 12, 4


def test_scatter_sets_rows_and_no_others():
    buffer = torch.rand(40, 1, 3)
    rows = torch.tensor([7, 0, 39])
    updates = torch.rand(3, 1, 3)
    expected = buffer.clone()
    for row, update in zip(rows.tolist(), updates, strict=True):
        expected[row] = update
    assert npu_scatter_nd_update_(buffer, rows.view(-1, 1), updates) is buffer
    assert torch.equal(buffer, expected)


@pytest.mark.parametrize("row", [-1, 40])
def test_scatter_outside_the_buffer_is_refused(row):
    buffer = torch.zeros(40, 1, 3)
    with pytest.raises(IndexError, match="40 rows"):
        npu_scatter_nd_update_(buffer, torch.tensor([[5], [row]]), torch.ones(2, 1, 3))
    assert not buffer.any()


@pytest.mark.parametrize(
    ("indices", "updates"),
    [
        (torch.zeros(2, dtype=torch.long), torch.zeros(2, 1, 3)),
        (torch.zeros(2, 1, dtype=torch.long), torch.zeros(2, 1, 4)),
        (torch.zeros(2, 1, dtype=torch.long), torch.zeros(3, 1, 3)),
        (torch.zeros(2, 1, dtype=torch.long), torch.zeros(2, 1, 3, dtype=torch.float16)),
    ],
)
def test_scatter_refuses_mismatched_shapes(indices, updates):
    with pytest.raises(ValueError, match="indices have|do not fit"):
        npu_scatter_nd_update_(torch.zeros(40, 1, 3), indices, updates)


def test_keys_and_values_are_written_into_their_slots():
    key, value = torch.rand(3, 2, 4), torch.rand(3, 2, 5)
    keys, values = torch.zeros(6, PAGE, 2, 4), torch.zeros(6, PAGE, 2, 5)
    slots = [0, 17, 95]
    _npu_reshape_and_cache(key, value, keys, values, torch.tensor(slots, dtype=torch.int32))
    for cache, new in ((keys, key), (values, value)):
        written = [cache[slot // PAGE, slot % PAGE] for slot in slots]
        assert torch.equal(torch.stack(written), new)
        assert cache.count_nonzero() == new.count_nonzero()
    with pytest.raises(IndexError, match="96 rows"):
        _npu_reshape_and_cache(key, value, keys, values, torch.tensor([1, 2, 96]).int())


def test_only_npu_pools_see_torch_npu():
    assert memory_pool_npu.torch_npu.npu_scatter_nd_update_ is npu_scatter_nd_update_
    assert "torch_npu" not in sys.modules
    assert importlib.util.find_spec("torch_npu") is None
    assert not hasattr(torch, "npu")


def test_mla_attention_is_absorbed():
    methods = attention_backend_handler.AttnForwardMethod
    for backend in ("ascend", "torch_native"):
        choose = attention_backend_handler.AttentionBackendRegistry.get_handler(backend)
        assert choose(object(), object()) is methods.MLA


def pools(kind: str, monkeypatch):
    """Returns an NPU pool, and a pool of the same sizes for the torch-native backend."""
    monkeypatch.setenv("ASCEND_USE_FIA", str(int(kind == "fia")))
    common = {
        "size": 8 * PAGE,
        "page_size": PAGE,
        "dtype": torch.float32,
        "layer_num": LAYERS,
        "device": "cpu",
        "enable_memory_saver": False,
        "start_layer": START_LAYER,
        "end_layer": START_LAYER + LAYERS - 1,
    }
    if kind == "mla":
        mla = {"kv_lora_rank": LATENT, "qk_rope_head_dim": ROPE}
        npu = memory_pool_npu.NPUMLATokenToKVPool(index_head_dim=None, **mla, **common)
        return npu, MLATokenToKVPool(**mla, **common)
    mha = {"head_num": KV_HEADS, "head_dim": WIDTH}
    return memory_pool_npu.NPUMHATokenToKVPool(**mha, **common), MHATokenToKVPool(**mha, **common)


def layer_of(kind: str) -> RadixAttention:
    key, value = (LATENT + ROPE, LATENT) if kind == "mla" else (WIDTH, WIDTH)
    heads = 1 if kind == "mla" else KV_HEADS
    return RadixAttention(Q_HEADS, key, key**-0.5, heads, LAYER, v_head_dim=value)


def arguments(kind: str, tokens: int) -> tuple[tuple, dict, tuple]:
    """Returns random (q, k, v) and keywords for ``ascend``, and (q, k, v) for other backends."""
    if kind != "mla":
        kv = torch.randn(2, tokens, KV_HEADS, WIDTH)
        plain = (torch.randn(tokens, Q_HEADS * WIDTH), kv[0], kv[1])
        return plain, {}, plain
    q, q_rope = torch.randn(tokens, Q_HEADS, LATENT), torch.randn(tokens, Q_HEADS, ROPE)
    k, k_rope = torch.randn(tokens, 1, LATENT), torch.randn(tokens, 1, ROPE)
    joined = (torch.cat([q, q_rope], -1), torch.cat([k, k_rope], -1), k)
    return (q, k, k), {"q_rope": q_rope, "k_rope": k_rope}, joined


def batches(table: SimpleNamespace):
    """Yields four batches of two requests: two prefill chunks, and two decode steps."""
    slots = PAGE + torch.randperm(8 * PAGE)[:80].view(2, 40)  # anywhere except in page 0
    rows = torch.tensor([1, 3])
    table.req_to_token[rows, :40] = slots.int()
    before = torch.tensor([0, 0])
    for new in torch.tensor([[20, 5], [9, 4], [1, 1], [1, 1]]):
        after = before + new
        places = [row[start:end] for row, start, end in zip(slots, before, after, strict=True)]
        yield {
            "out_cache_loc": torch.cat(places),
            "req_to_token_pool": table,
            "req_pool_indices": rows,
            "seq_lens": after,
            "extend_prefix_lens": before,
            "extend_seq_lens": new,
            "encoder_lens": None,
        }
        before = after


@pytest.mark.parametrize("kind", ["paged", "fia", "mla"])
def test_ascend_attention_equals_torch_native(kind, monkeypatch):
    torch.manual_seed(0)
    table = SimpleNamespace(req_to_token=torch.zeros(4, 64, dtype=torch.int32))
    with single_rank_context(dcp_enabled=False):
        npu_pool, plain_pool = pools(kind, monkeypatch)
        check_steps(kind, npu_pool, plain_pool, table)


def check_steps(kind: str, npu_pool, plain_pool, table) -> None:
    layer = layer_of(kind)
    ascend, native = (
        ATTENTION_BACKENDS[name](
            SimpleNamespace(device="cpu", token_to_kv_pool=pool, req_to_token_pool=table)
        )
        for name, pool in (("ascend", npu_pool), ("torch_native", plain_pool))
    )
    for number, batch in enumerate(batches(table)):
        given, rope, joined = arguments(kind, tokens=len(batch["out_cache_loc"]))
        step = "forward_extend" if number < 2 else "forward_decode"
        batch["forward_mode"] = ForwardMode.EXTEND if number < 2 else ForwardMode.DECODE
        npu_batch = SimpleNamespace(**batch, token_to_kv_pool=npu_pool)
        plain_batch = SimpleNamespace(**batch, token_to_kv_pool=plain_pool)
        got = getattr(ascend, step)(*given, layer, npu_batch, **rope)
        want = getattr(native, step)(*joined, layer, plain_batch)
        assert want.abs().min() > 0
        torch.testing.assert_close(got, want, rtol=0, atol=1e-6)
        assert npu_batch.token_to_kv_pool is npu_pool
