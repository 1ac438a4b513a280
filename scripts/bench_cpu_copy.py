"""Copying a request's KV to the host and back, against the obvious loop and one memcpy.

Run by `scripts/bench.sh cpu-copy`, with the patched engine's own NPU pools, on an NPU if there is
one. In 0.5.9 the patch set adds the pools' copy methods; later releases have their own. The loop is
the engine's way on CUDA: layer by layer, chunk by chunk.
"""

from collections.abc import Iterator

import torch
import typer
from bench_common import CPU_COPY, JsonFile, finish, medians, show
from sglang.srt.hardware_backend.npu.memory_pool_npu import (
    NPUMHATokenToKVPool,
    NPUMLATokenToKVPool,
)

from pd_harness.device import device
from pd_harness.parallel_context import single_rank_context

PAGE_SIZE = 128  # tokens
TOKENS = (1024, 16384)
REPEATS = 7


def pools() -> Iterator[tuple[str, object]]:
    """DeepSeek V3's 61 layers of MLA; 64 layers of GQA, 2 of 8 heads of 128 elements (TP 4)."""
    common = {
        "size": 20_480,
        "page_size": PAGE_SIZE,
        "dtype": torch.bfloat16,
        "device": device(),
        "enable_memory_saver": False,
    }
    mla = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_head_dim": None, "layer_num": 61}
    gqa = {"head_num": 2, "head_dim": 128, "layer_num": 64}
    with single_rank_context():
        yield "MLA, 61 layers", NPUMLATokenToKVPool(**mla, **common)
        yield "GQA, 64 layers", NPUMHATokenToKVPool(**gqa, **common)


class LayerLoop:
    """The same copies as a pool's, one layer and chunk after the other."""

    def __init__(self, pool):
        self.chunk = pool.cpu_offloading_chunk_size
        layers = [*pool.k_buffer, *pool.v_buffer]
        self.layers = [layer.view(-1, *layer.shape[-2:]) for layer in layers]

    def get_cpu_copy(self, slots: torch.Tensor) -> list:
        parts = slots.split(self.chunk)
        return [[layer[part].to("cpu") for part in parts] for layer in self.layers]

    def load_cpu_copy(self, copied: list, slots: torch.Tensor) -> None:
        for layer, parts in zip(self.layers, copied):
            for part, values in zip(slots.split(self.chunk), parts):
                layer[part] = values.to(layer.device)


def tensors(copied: list | torch.Tensor) -> Iterator[torch.Tensor]:
    """All tensors of a pool's copy, whatever the depth of its lists."""
    if isinstance(copied, torch.Tensor):
        yield copied
    else:
        for part in copied:
            yield from tensors(part)


def measure(name: str, pool, tokens: int) -> dict:
    """One row: milliseconds of the pool and the loop in both directions, and of the memcpy."""
    loop = LayerLoop(pool)
    slots = torch.randperm(pool.size)[:tokens].to(pool.device)
    targets = torch.randperm(pool.size)[:tokens].to(pool.device)
    ours, loops = pool.get_cpu_copy(slots), loop.get_cpu_copy(slots)
    flat = torch.cat([part.reshape(-1) for part in tensors(ours)])
    same = torch.empty_like(flat)
    sides = {
        "to host, pool": lambda: pool.get_cpu_copy(slots),
        "to host, loop": lambda: loop.get_cpu_copy(slots),
        "back, pool": lambda: pool.load_cpu_copy(ours, targets),
        "back, loop": lambda: loop.load_cpu_copy(loops, targets),
        "memcpy": lambda: same.copy_(flat),
    }
    medians(sides, 1)  # warms up
    ms = {name: 1e3 * seconds for name, seconds in medians(sides, REPEATS).items()}
    return {"pool": name, "tokens": tokens, "mb": flat.nbytes / 1e6, "ms": ms}


def main(json_file: JsonFile = None) -> None:
    """Time the copy of a request's KV to the host and back."""
    rows = []
    for name, pool in pools():
        rows += [measure(name, pool, tokens) for tokens in TOKENS]
        del pool
    title = f"One request's KV, scattered slots, medians of {REPEATS} on {device()}"
    show(title, CPU_COPY, rows)
    finish({"rows": rows}, json_file)


if __name__ == "__main__":
    typer.run(main)
