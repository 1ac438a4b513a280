"""What `SGLANG_PD_VERIFY` costs: digests against memcpy, and the time to the first token.

Run by `scripts/bench.sh verify`. Digests are of the patched engine's own NPU pools, on an NPU if
there is one. For the time to the first token two patched pairs of servers run, of which one
verifies; one pair is stopped (SIGSTOP) while the other serves, as in `bench_serve.py`.
"""

import logging
import random
import statistics
from collections.abc import Callable
from functools import partial
from typing import Annotated

import bench_serve
import torch
import typer
from bench_common import DIGESTS, FIRST_TOKEN, JsonFile, finish, medians, show
from bench_cpu_copy import PAGE_SIZE, TOKENS, pools
from sglang.srt.disaggregation.kv_layout import RankLayout, describe_pools, sent_parts
from sglang.srt.disaggregation.pd.page_digests import PageViews

REPEATS = 5
LENGTHS = (1024, 8192)  # of prompts, in tokens
ROUNDS = 6
MODES = {"off": "0", "on": "1"}


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


def synchronized(act: Callable[[], object], device: torch.device) -> Callable[[], None]:
    """``act``, which then also waits until the device has finished."""

    def acted() -> None:
        act()
        if device.type != "cpu":
            torch.get_device_module(device).synchronize()

    return acted


def digest_row(name: str, memory: PageViews, parts: tuple, tokens: int) -> dict:
    """GB/s of digesting a request's pages, and of copying the same pages buffer by buffer."""
    device = memory.pages[0].device
    pages = random.Random(tokens).sample(range(len(memory.pages[0])), tokens // PAGE_SIZE)
    indices, size = torch.tensor(pages, device=device), memory.size(parts, pages)

    def copy() -> None:
        for buffer in memory.pages:
            buffer.index_select(0, indices)

    sides = {
        "digest": synchronized(lambda: memory.digests(parts, pages), device),
        "memcpy": synchronized(copy, device),
    }
    medians(sides, 1)  # warms up
    seconds = medians(sides, REPEATS)
    return {
        "pool": name,
        "tokens": tokens,
        "MiB": size / 2**20,
        **{f"{side} GB/s": size / of_side / 1e9 for side, of_side in seconds.items()},
        "digest ms": seconds["digest"] * 1e3,
    }


def pair(mode: str) -> bench_serve.ServerPair:
    """Servers for long prompts; with mode "on" they verify."""
    return bench_serve.long_pair(f"verify-{mode}", {"SGLANG_PD_VERIFY": MODES[mode]})


def serving_rows(rounds: int) -> list[dict]:
    """Medians of both modes for each length, measured in turns, with their ratio and noise."""
    first_tokens = partial(bench_serve.first_tokens, lengths=LENGTHS)
    blocks = bench_serve.run_blocks({mode: pair(mode) for mode in MODES}, rounds, first_tokens)
    rows = []
    for at, length in enumerate(LENGTHS):
        of = {mode: [figures[at] for figures in values] for mode, values in blocks.items()}
        row = {mode: statistics.median(values) for mode, values in of.items()}
        row |= {"ratio": row["on"] / row["off"], "noise": bench_serve.noise(of)}
        rows.append({"tokens": length, **row})
    return rows


def main(
    json_file: JsonFile = None,
    rounds: Annotated[int, typer.Option(min=2, help="Rounds, each of four blocks.")] = ROUNDS,
) -> None:
    """Measure digests, and the time to the first token."""
    logging.getLogger("httpx").setLevel(logging.WARNING)  # with the engine it logs every request
    digests = []
    for name, pool in pools():
        memory = page_memory(pool)
        digests += [digest_row(name, *memory, tokens) for tokens in TOKENS]
    show("Digests, compared with copying the same pages", DIGESTS, digests)
    serving = serving_rows(rounds)
    show("Milliseconds to the first token, without and with", FIRST_TOKEN, serving)
    finish({"digests": digests, "serving": serving}, json_file)


if __name__ == "__main__":
    typer.run(main)
