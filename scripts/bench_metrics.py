"""What metrics and request lines cost: the time to the first token without and with them.

Run by `scripts/bench.sh metrics`. Three patched pairs of servers run, of which one serves while the
others are stopped (SIGSTOP), as in `bench_serve.py`. With `--enable-metrics` the engine keeps its
own metrics, too; request lines need only what the patch set notes.
"""

import random
import statistics
from typing import Annotated

import bench_serve
import httpx
import typer
from bench_common import FIRST_TOKEN_BY_MODE, JsonFile, finish, show

from pd_harness import cluster
from pd_harness.ports import free_ports

LENGTHS = (200, 1024, 8192)  # of prompts, in tokens
ROUNDS = 8
CONTEXT = bench_serve.LONG_CONTEXT  # also each pool's size
TOPOLOGY = cluster.Topology("nixl", page_size=16, decode_tokens=CONTEXT)
OFF, LINES, METRICS = "off", "lines", "metrics"
LIMIT = 0.01  # of the time to the first token


def pair(mode: str) -> bench_serve.ServerPair:
    """Patched servers over NIXL for long prompts, which note nothing, or what `mode` says."""
    logs, (store_port,) = bench_serve.LOGS / f"metrics-{mode}", free_ports(1)
    lines = logs / "lines"
    lines.mkdir(parents=True, exist_ok=True)
    common = {
        "environment": {"SGLANG_PD_REQUEST_LOG": str(lines)} if mode == LINES else {},
        "metrics": mode == METRICS,
        "idle_sleep": False,
        "chunk": 2048,
    }
    where = ("patched", bench_serve.long_model(), logs, store_port)
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


def rows(rounds: int) -> list[dict]:
    """Medians of each mode for each length, measured in turns, with their ratios and the noise."""
    pairs = {mode: pair(mode) for mode in (OFF, LINES, METRICS)}
    blocks = bench_serve.run_blocks(pairs, rounds, first_tokens)
    found = []
    for at, length in enumerate(LENGTHS):
        of = {mode: [figures[at] for figures in values] for mode, values in blocks.items()}
        row = {mode: statistics.median(values) for mode, values in of.items()}
        ratios = {f"{mode} ratio": row[mode] / row[OFF] for mode in (LINES, METRICS)}
        found.append({"tokens": length, **row, **ratios, "noise": bench_serve.noise(of)})
    return found


def too_slow(measured: list[dict]) -> list[str]:
    """Returns a sentence for each mode that costs more than the limit and the noise."""
    return [
        f"{row['tokens']} tokens: with {mode} {row[f'{mode} ratio']:.3f} of the time without, "
        f"noise {row['noise']:.3f}"
        for row in measured
        for mode in (LINES, METRICS)
        if row[f"{mode} ratio"] > 1 + max(LIMIT, row["noise"])
    ]


def main(
    json_file: JsonFile = None,
    rounds: Annotated[int, typer.Option(min=2, help="Rounds, each of six blocks.")] = ROUNDS,
) -> None:
    """Time requests without and with metrics; status 1 if they cost over 1 %, or the noise."""
    measured = rows(rounds)
    show("Milliseconds to the first token", FIRST_TOKEN_BY_MODE, measured)
    finish({"rows": measured, "missed": too_slow(measured)}, json_file)


if __name__ == "__main__":
    typer.run(main)
