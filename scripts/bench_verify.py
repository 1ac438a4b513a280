"""What `SGLANG_PD_VERIFY` costs: digests against memcpy, and the time to the first token.

Run by `scripts/bench.sh verify`. Digests are of the patched engine's own NPU pools, on an NPU if
there is one. For the time to the first token two patched pairs of servers run, of which one
verifies; one pair is stopped (SIGSTOP) while the other serves, as in `bench_serve.py`.
"""

import asyncio
import json
import logging
import os
import random
import shutil
import signal
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import bench_serve
import httpx
import torch
import typer
from bench_cpu_copy import PAGE_SIZE, TOKENS, pools
from rich.console import Console
from rich.table import Table
from sglang.srt.disaggregation.kv_layout import RankLayout, describe_pools, sent_parts
from sglang.srt.disaggregation.pd.page_digests import PageViews

from pd_harness import cluster
from pd_harness.cpu_host.models import TinyGQA
from pd_harness.ports import free_ports

REPEATS = 5
LENGTHS = (1024, 8192)  # of prompts, in tokens
ROUNDS = 6
MODES = {"off": "0", "on": "1"}
CONTEXT = 16_384  # tokens; also each pool's size
TOPOLOGY = cluster.Topology("nixl", page_size=16, decode_tokens=CONTEXT)


def page_memory(pool) -> tuple[PageViews, tuple]:
    """A pool's buffers, and the parts of them that a rank with the same layout would be sent."""
    ptrs, lens, item_lens = pool.get_contiguous_buf_infos()
    heads = getattr(pool, "head_num", None)
    buffers = describe_pools(pool, None, item_lens, lens, False, (0, 1), heads, None, None)
    layout = RankLayout(
        0, 1, 0, 1, PAGE_SIZE, "bfloat16", "DRAM", pool.layer_num, kv=tuple(buffers)
    )
    memory = PageViews(layout, layout.kv, [pool], ptrs, lens)
    return memory, sent_parts(layout, layout, layout.kv, layout.kv)


def median_seconds(act: Callable[[], object], device: str) -> float:
    seconds = []
    for _ in range(REPEATS + 1):
        start = time.perf_counter()
        act()
        if device != "cpu":
            torch.get_device_module(device).synchronize()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


def digest_rows() -> list[dict]:
    """GB/s of digesting a request's pages, and of copying the same pages buffer by buffer."""
    rows = []
    for name, make in pools().items():
        pool = make()
        memory, parts = page_memory(pool)
        device = memory.pages[0].device.type
        for tokens in TOKENS:
            count = tokens // PAGE_SIZE
            pages = random.Random(tokens).sample(range(len(memory.pages[0])), count)
            indices = torch.tensor(pages, device=device)
            size = memory.size(parts, pages)

            def copied(indices=indices, memory=memory) -> None:
                for buffer in memory.pages:
                    buffer.index_select(0, indices)

            digested = median_seconds(lambda p=pages, m=memory, s=parts: m.digests(s, p), device)
            copying = median_seconds(copied, device)
            rows.append(
                {
                    "pool": name,
                    "tokens": tokens,
                    "MiB": size / 2**20,
                    "digest GB/s": size / digested / 1e9,
                    "memcpy GB/s": size / copying / 1e9,
                    "digest ms": digested * 1e3,
                }
            )
    return rows


def long_model() -> Path:
    """The tests' model with a longer context in its config."""
    short = TinyGQA().make(cluster.RELEASE_ENV / "models")
    folder = short.with_name(f"{short.name}-long")
    if not folder.exists():
        draft = short.with_name(f"{folder.name}.{os.getpid()}")
        shutil.copytree(short, draft)
        config = json.loads((draft / "config.json").read_text())
        config["max_position_embeddings"] = CONTEXT
        (draft / "config.json").write_text(json.dumps(config))
        draft.rename(folder)
    return folder


def pair(mode: str) -> bench_serve.ServerPair:
    """Patched servers over NIXL for long prompts; with mode "on" they verify."""
    logs, (store_port,) = bench_serve.LOGS / f"verify-{mode}", free_ports(1)
    common = {
        "environment": {"SGLANG_PD_VERIFY": MODES[mode]},
        "idle_sleep": False,
        "chunk": 2048,
    }
    where = ("patched", long_model(), logs, store_port)
    prefill = cluster.prefill_server(TOPOLOGY, *where, max_tokens=CONTEXT, **common)
    return prefill, cluster.decode_server(TOPOLOGY, *where, **common)


async def first_tokens(servers: bench_serve.ServerPair, seed: int) -> list[float]:
    """Milliseconds to the first token of one prompt of each length."""
    rng = random.Random(seed)
    async with httpx.AsyncClient(timeout=bench_serve.SECONDS, trust_env=False) as client:
        # Wakes the servers, which were stopped.
        await bench_serve.time_request(client, servers, rng.choices(range(256), k=32))
        timed = [
            await bench_serve.time_request(client, servers, rng.choices(range(256), k=length))
            for length in LENGTHS
        ]
    return [1e3 * one.first for one in timed]


def serving_rows(rounds: int) -> list[dict]:
    """Medians of both modes for each length, measured in turns, with their ratio and noise."""
    pairs = {mode: pair(mode) for mode in MODES}
    blocks: dict[str, list[list[float]]] = {mode: [] for mode in MODES}
    with bench_serve.all_running(pairs):
        for number in range(-1, rounds):  # the first warms up
            for half, order in enumerate((list(MODES), list(reversed(MODES)))):
                seed = 100 + 2 * number + half  # new prompts, as prefixes are cached
                for mode in order:
                    bench_serve.send_signal(pairs[mode], signal.SIGCONT)
                    figures = asyncio.run(first_tokens(pairs[mode], seed))
                    bench_serve.send_signal(pairs[mode], signal.SIGSTOP)
                    if number >= 0:
                        blocks[mode].append(figures)
    rows = []
    for at, length in enumerate(LENGTHS):
        of = {mode: [one[at] for one in values] for mode, values in blocks.items()}
        medians = {mode: statistics.median(values) for mode, values in of.items()}
        rows.append(
            {
                "tokens": length,
                **medians,
                "ratio": medians["on"] / medians["off"],
                "noise": bench_serve.noise(of),
            }
        )
    return rows


def table(title: str, rows: list[dict]) -> Table:
    shown = Table(title=title)
    for heading in rows[0]:
        shown.add_column(heading, justify="right")
    for row in rows:
        cells = (f"{one:.2f}" if isinstance(one, float) else str(one) for one in row.values())
        shown.add_row(*cells)
    return shown


def main(
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the figures to FILE.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=2, help="Rounds, each of four blocks.")] = ROUNDS,
) -> None:
    """Measure digests, and the time to the first token."""
    console = Console(width=120)
    logging.getLogger("httpx").setLevel(logging.WARNING)  # with the engine it logs every request
    digests = digest_rows()
    console.print(table("Digests, compared with copying the same pages", digests))
    serving = serving_rows(rounds)
    console.print(table("Milliseconds to the first token, without and with", serving))
    if json_file:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps({"digests": digests, "serving": serving}, indent=1))


if __name__ == "__main__":
    typer.run(main)
