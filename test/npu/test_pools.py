"""The NPU pools on an NPU: what they say of their pages, and the operators that write them."""

import ctypes
import importlib
import sys
from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.npu

PAGE = 16
POOLS = {
    "paged": lambda probes: probes.mha_pool(False, PAGE, start_layer=3),
    "fia": lambda probes: probes.mha_pool(True, PAGE, start_layer=3),
    "mla": lambda probes: probes.mla_pool(False, PAGE, start_layer=3),
    "mla_index_keys": lambda probes: probes.mla_pool(True, PAGE, start_layer=3),
}
DEVICE_TO_HOST = 2  # ACL's number for that direction of a copy


def device_memory(address: int, size: int) -> bytes:
    """What the NPU holds at one of its addresses, by its runtime and without torch."""
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
def test_pages_are_found_by_their_device_addresses(probes, kind):
    import torch

    pool = POOLS[kind](probes)
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


@pytest.mark.parametrize("kind", POOLS)
def test_the_copy_on_the_host_is_pinned(probes, kind):
    """Else the device copies through a buffer of the driver, and the caller waits for it."""
    import torch

    copied = POOLS[kind](probes).get_cpu_copy(torch.arange(PAGE, 3 * PAGE, device="npu"))
    assert copied and all(part.is_pinned() for chunk in copied for part in chunk)


def test_the_next_copy_takes_the_same_memory(probes):
    import torch

    pool = POOLS["paged"](probes)

    def addresses() -> set[int]:
        copied = pool.get_cpu_copy(torch.arange(PAGE, 3 * PAGE, device="npu"))
        return {part.data_ptr() for chunk in copied for part in chunk}

    assert addresses() == addresses()


LARGE_PAGE = 128  # tokens
# 4 layers, in tensors of more elements than 32 bits count, and of more than 4 GiB.
LARGE = {
    "mha": {"head_num": 8, "head_dim": 128, "size": 300_032},
    "mla": {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_head_dim": None, "size": 1_100_032},
}


def large_pool(probes, kind: str):
    import torch

    from pd_harness.device import device

    classes = {"mha": probes.NPUMHATokenToKVPool, "mla": probes.NPUMLATokenToKVPool}
    return classes[kind](
        page_size=LARGE_PAGE,
        dtype=torch.float16,
        layer_num=4,
        device=device(),
        enable_memory_saver=False,
        start_layer=0,
        end_layer=3,
        **LARGE[kind],
    )


@pytest.mark.parametrize("kind", LARGE)
def test_copy_of_a_pool_that_32_bits_do_not_count(probes, kind):
    """First and last page of every layer, to pages in between and at both ends, and back.

    Pages are written and read whole, without the index operators that are looked at.
    """
    import torch

    pool = large_pool(probes, kind)
    buffers = [*pool.k_buffer, *pool.v_buffer]  # [pages, tokens of a page, ...] of each layer
    assert getattr(pool, "kv_buffer", pool.k_buffer).numel() > 2**31  # what is indexed
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


def test_torch_npu_is_bound(probes):
    module = importlib.import_module("sglang.srt.hardware_backend.npu.memory_pool_npu")
    assert module.torch_npu is sys.modules["torch_npu"]


@pytest.mark.parametrize("fia", ["0", "1"])
def test_tokens_are_written_where_their_pages_are(probes, monkeypatch, fia):
    """`set_kv_buffer` calls torch_npu; the bytes that it writes are those that are sent."""
    import torch

    monkeypatch.setenv("ASCEND_USE_FIA", fia)
    page, heads, width = 128, 2, 128
    pool = probes.NPUMHATokenToKVPool(
        size=4 * page,
        page_size=page,
        dtype=torch.float16,
        head_num=heads,
        head_dim=width,
        layer_num=1,
        device="npu",
        enable_memory_saver=False,
        start_layer=0,
        end_layer=0,
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
