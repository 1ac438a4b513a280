"""Copying a request's KV to the host and back, against the obvious loop and one memcpy.

Run by `scripts/bench.sh cpu-copy`, with the patched engine's own NPU pools, on an NPU if there is
one. In 0.5.9 the patch set adds the pools' copy methods; later releases have their own. The loop is
the engine's way on CUDA: layer by layer, chunk by chunk.
"""

import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from sglang.srt.hardware_backend.npu.memory_pool_npu import (
    NPUMHATokenToKVPool,
    NPUMLATokenToKVPool,
)

from pd_harness.device import device
from pd_harness.parallel_context import single_rank_context

PAGE_SIZE = 128  # tokens
TOKENS = (1024, 16384)
REPEATS = 7


def pools() -> dict:
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
    return {
        "MLA, 61 layers": lambda: NPUMLATokenToKVPool(**mla, **common),
        "GQA, 64 layers": lambda: NPUMHATokenToKVPool(**gqa, **common),
    }


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


def milliseconds(sides: dict[str, Callable]) -> dict[str, float]:
    """Median milliseconds of each side, measured in turns after one call of each."""
    times = {name: [] for name in sides}
    for turn in range(REPEATS + 1):
        for name, side in sides.items():
            start = time.perf_counter()
            side()
            if turn:
                times[name].append((time.perf_counter() - start) * 1e3)
    return {name: statistics.median(of_side) for name, of_side in times.items()}


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
    ms = milliseconds(
        {
            "to host, pool": lambda: pool.get_cpu_copy(slots),
            "to host, loop": lambda: loop.get_cpu_copy(slots),
            "back, pool": lambda: pool.load_cpu_copy(ours, targets),
            "back, loop": lambda: loop.load_cpu_copy(loops, targets),
            "memcpy": lambda: same.copy_(flat),
        }
    )
    return {"pool": name, "tokens": tokens, "mb": flat.nbytes / 1e6, "ms": ms}


def table(rows: list[dict]) -> Table:
    shown = Table(title=f"One request's KV, scattered slots, medians of {REPEATS} on {device()}")
    shown.add_column("pool")
    for heading in ("tokens", "MB", "memcpy ms"):
        shown.add_column(heading, justify="right")
    for direction in ("to host", "back"):
        for heading in (f"{direction}: the pool's ms", "loop ms", "faster", "memcpys"):
            shown.add_column(heading, justify="right")
    for row in rows:
        ms = row["ms"]
        cells = []
        for direction in ("to host", "back"):
            pool, loop = ms[f"{direction}, pool"], ms[f"{direction}, loop"]
            ratios = (f"{loop / pool:.2f}", f"{pool / ms['memcpy']:.1f}")
            cells += [f"{pool:.1f}", f"{loop:.1f}", *ratios]
        size = (f"{row['tokens']:,}", f"{row['mb']:.0f}", f"{ms['memcpy']:.1f}")
        shown.add_row(row["pool"], *size, *cells)
    return shown


def main(
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the figures to FILE.")
    ] = None,
) -> None:
    """Time the copy of a request's KV to the host and back."""
    rows = []
    for name, make in pools().items():
        with single_rank_context():
            pool = make()
        rows += [measure(name, pool, tokens) for tokens in TOKENS]
        del pool
    Console(width=160).print(table(rows))
    if json_file:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    typer.run(main)
