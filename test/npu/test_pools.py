"""The NPU pools on an NPU: the addresses of their pages, and the operators that write them."""

import ctypes
import importlib
import sys
from types import SimpleNamespace

import pytest
from engine_release import SINCE_0_5_18

pytestmark = pytest.mark.npu

PAGE = 16
POOLS = {
    "paged": lambda engine_calls: engine_calls.mha_pool(False, PAGE, start_layer=3),
    "fia": lambda engine_calls: engine_calls.mha_pool(True, PAGE, start_layer=3),
    "mla": lambda engine_calls: engine_calls.mla_pool(False, PAGE, start_layer=3),
    "mla_index_keys": lambda engine_calls: engine_calls.mla_pool(True, PAGE, start_layer=3),
}
# Pools whose host copies use the patch set's memory. In later releases these are only pools whose
# pages are tiles; the others use the engine's host copy, which is not pinned.
OWN_MEMORY = [(kind, "1") for kind in ("mla", "mla_index_keys")]
OWN_MEMORY += [] if SINCE_0_5_18 else [(kind, "0") for kind in POOLS]
DEVICE_TO_HOST = 2  # ACL's number for that direction of a copy


def tensors(copied) -> list:
    """Returns the tensors of a host copy, however the release nests them."""
    import cpu_copy_checks

    return cpu_copy_checks.tensors(copied)


def device_memory(address: int, size: int) -> bytes:
    """Reads `size` bytes at an NPU address with the NPU's runtime, without torch."""
    host = ctypes.create_string_buffer(size)
    status = ctypes.CDLL("libascendcl.so").aclrtMemcpy(
        host,
        ctypes.c_size_t(size),
        ctypes.c_void_p(address),
        ctypes.c_size_t(size),
        ctypes.c_int(DEVICE_TO_HOST),
    )
    assert status == 0, f"aclrtMemcpy of {size} bytes at {address:#x}: {status}"
    return host.raw


@pytest.mark.parametrize("kind", POOLS)
def test_reported_addresses_hold_the_pages(engine_calls, kind):
    import torch

    pool = POOLS[kind](engine_calls)
    keys = getattr(pool, "index_k_buffer", None)
    buffers = [*pool.k_buffer, *pool.v_buffer, *([] if keys is None else keys)]
    for buffer in buffers:
        assert buffer.device.type == "npu"
        buffer.copy_(torch.randn(buffer.shape))
    torch.npu.synchronize()
    infos = list(zip(*pool.get_contiguous_buf_infos(), strict=True))
    assert len(infos) == len(buffers)
    for (address, length, item), buffer in zip(infos, buffers, strict=True):
        tokens = buffer.cpu().reshape(-1, *buffer.shape[-2:])
        pages = [page.numpy().tobytes() for page in tokens.split(PAGE)]
        assert (len(pages), length) == (length // item, item * len(pages))
        for number, page in enumerate(pages):
            assert device_memory(address + number * item, item) == page


@pytest.mark.parametrize("kind, in_tiles", OWN_MEMORY)
def test_host_copy_is_pinned(engine_calls, monkeypatch, kind, in_tiles):
    """Otherwise the device would copy through a driver buffer, and the caller would wait."""
    import torch

    monkeypatch.setenv("SGLANG_USE_FIA_NZ", in_tiles)
    copied = POOLS[kind](engine_calls).get_cpu_copy(torch.arange(PAGE, 3 * PAGE, device="npu"))
    assert copied and all(part.is_pinned() for part in tensors(copied))


@pytest.mark.parametrize("kind, in_tiles", OWN_MEMORY)
def test_host_copy_memory_is_reused(engine_calls, monkeypatch, kind, in_tiles):
    import torch

    monkeypatch.setenv("SGLANG_USE_FIA_NZ", in_tiles)
    pool = POOLS[kind](engine_calls)

    def addresses() -> set[int]:
        copied = pool.get_cpu_copy(torch.arange(PAGE, 3 * PAGE, device="npu"))
        return {part.data_ptr() for part in tensors(copied)}

    assert addresses() == addresses()


LARGE_PAGE, LARGE_LAYERS = 128, 4
INT32_ELEMENTS = 2**31  # one more than an int32 counts; 4 GiB of float16
HEADS, WIDTH, LATENT, ROPE = 8, 128, 512, 64


def large_pool(engine_calls, kind: str):
    """Returns a pool whose layers together have more than `INT32_ELEMENTS` elements of K."""
    import torch

    def size(elements: int) -> int:
        pages = INT32_ELEMENTS // (LARGE_LAYERS * LARGE_PAGE * elements) + 1
        return pages * LARGE_PAGE

    common = {"layers": LARGE_LAYERS, "dtype": torch.float16}
    if kind == "mha":
        common |= {"size": size(HEADS * WIDTH), "head_num": HEADS, "head_dim": WIDTH}
        return engine_calls.mha_pool(False, LARGE_PAGE, **common)
    common |= {"size": size(LATENT), "kv_lora_rank": LATENT, "qk_rope_head_dim": ROPE}
    return engine_calls.mla_pool(False, LARGE_PAGE, **common)


@pytest.mark.parametrize("kind, in_tiles", [("mha", "0"), ("mla", "0"), ("mla", "1")])
def test_copy_of_a_pool_larger_than_int32(engine_calls, monkeypatch, kind, in_tiles):
    """Copies pages at both ends and in the middle of every layer to the host and to other pages.

    The test reads and writes whole pages, without the index operators under test.
    """
    import torch

    monkeypatch.setenv("SGLANG_USE_FIA_NZ", in_tiles)
    pool = large_pool(engine_calls, kind)
    buffers = [*pool.k_buffer, *pool.v_buffer]  # [pages, tokens of a page, ...] of each layer
    assert sum(layer.numel() for layer in pool.k_buffer) > INT32_ELEMENTS
    last = buffers[0].shape[0] - 1
    source, target = [0, 1, last // 2, last], [last, last // 2 + 1, 2, 1]
    held = {}
    for number, buffer in enumerate(buffers):
        for page in source:
            held[number, page] = torch.randn(buffer.shape[1:]).half()
            buffer[page].copy_(held[number, page])

    def slots(pages: list[int]) -> torch.Tensor:
        tokens = [page * LARGE_PAGE + slot for page in pages for slot in range(LARGE_PAGE)]
        return torch.tensor(tokens, device=pool.device)

    copied = pool.get_cpu_copy(slots(source))
    for buffer in buffers:
        buffer.zero_()
    pool.load_cpu_copy(copied, slots(target))
    for number, buffer in enumerate(buffers):
        for page, came_from in zip(target, source, strict=True):
            assert torch.equal(buffer[page].cpu(), held[number, came_from]), (number, page)
        for page in {*source, last - 1} - {*target}:
            assert not buffer[page].cpu().any(), (number, page)


def test_torch_npu_is_bound(engine_calls):
    module = importlib.import_module("sglang.srt.hardware_backend.npu.memory_pool_npu")
    assert module.torch_npu is sys.modules["torch_npu"]


@pytest.mark.parametrize("fia", ["0", "1"])
def test_set_kv_buffer_writes_to_reported_pages(engine_calls, monkeypatch, fia):
    """`set_kv_buffer` uses torch_npu to write the bytes at the addresses that are sent."""
    import torch

    monkeypatch.setenv("ASCEND_USE_FIA", fia)
    page, heads, width = 128, 2, 128
    pool = engine_calls.mha_pool(
        bool(int(fia)), page, layers=1, dtype=torch.float16, head_num=heads, head_dim=width
    )
    places = [page, page + 1, 3 * page + 5]
    k, v = torch.randn(2, len(places), heads, width, dtype=torch.float16)
    pool.set_kv_buffer(
        SimpleNamespace(layer_id=0),
        torch.tensor(places, dtype=torch.int32, device="npu"),
        k.npu(),
        v.npu(),
    )
    torch.npu.synchronize()
    addresses, _, items = pool.get_contiguous_buf_infos()
    for tokens, address, item in zip((k, v), addresses, items, strict=True):
        for token, place in zip(tokens, places, strict=True):
            at = address + place // page * item + place % page * (item // page)
            assert device_memory(at, item // page) == token.numpy().tobytes()
