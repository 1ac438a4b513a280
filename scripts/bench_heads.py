"""KV heads between TP sizes on real servers: packed and sliced, beside equal TP, on the CPU host.

Run by `scripts/bench.sh heads`. For each fleet three patched pairs of servers run, of which two are
stopped (SIGSTOP) while the third serves, as in `bench_serve.py`: with packed heads, with slices
(`SGLANG_PD_PACKED=0`), and with prefill's TP size on both sides. All get the same long prompts.
Decode's longest pause is that of its event loop, while one such request arrives. A server's memory
is what its processes share with no other (USS); with packing, prefill has a buffer for it.
"""

import random
import statistics
import sys
from pathlib import Path
from typing import Annotated

import bench_serve
import httpx
import psutil
import typer
from bench_common import SERVED_HEADS, JsonFile, console, finish, show

from pd_harness import cluster
from pd_harness.ports import free_ports

for folder in ("support", "serving"):
    sys.path.append(str(Path(__file__).resolve().parents[1] / "test" / folder))
from scheduler_dumps import dump_environment, dump_schedulers, longest_pause_ms  # noqa: E402

# TP sizes of prefill and decode. Over NIXL: Mooncake's TCP takes minutes for that many slices.
FLEETS = {"nixl TP 2 to 1": (2, 1), "nixl TP 1 to 2": (1, 2)}
MODES = ("packed", "sliced", "equal TP")
TIMES = ("first token, ms", "decode's longest pause, ms")
MEMORY = ("prefill's memory, MiB", "decode's memory, MiB")
FIGURES = (*TIMES, *MEMORY)
PROMPT = 8000  # tokens
CHUNK = 2048
PAGE_SIZE = 16
ROUNDS = 4


def pair(fleet: str, mode: str) -> bench_serve.ServerPair:
    """Patched servers for long prompts, of which decode reports its pauses."""
    prefill_tp, decode_tp = FLEETS[fleet]
    topology = cluster.Topology(
        "nixl",
        prefill_tp=prefill_tp,
        decode_tp=prefill_tp if mode == "equal TP" else decode_tp,
        page_size=PAGE_SIZE,
        decode_tokens=bench_serve.LONG_CONTEXT,
    )
    logs = bench_serve.LOGS / f"heads-{fleet}-{mode}".replace(" ", "_")
    variables = {"SGLANG_PD_PACKED": "0" if mode == "sliced" else "1"}
    where = ("patched", bench_serve.long_model(), logs, *free_ports(1))
    common = {"idle_sleep": False, "chunk": CHUNK}
    prefill = cluster.prefill_server(
        topology, *where, max_tokens=bench_serve.LONG_CONTEXT, environment=variables, **common
    )
    variables |= dump_environment(logs / "probe")
    return prefill, cluster.decode_server(topology, *where, environment=variables, **common)


async def measure_block(servers: bench_serve.ServerPair, seed: int) -> list[float]:
    """The figures of one long prompt, in the order of `FIGURES`."""
    rng = random.Random(seed)
    async with httpx.AsyncClient(timeout=bench_serve.SECONDS, trust_env=False) as client:
        # Wakes the servers, which were stopped; that pause is not counted.
        await bench_serve.time_request(client, servers, rng.choices(range(256), k=32))
        dump_schedulers(servers[1])
        prompt = rng.choices(range(256), k=PROMPT)
        times = await bench_serve.time_request(client, servers, prompt)
    pause = longest_pause_ms(dump_schedulers(servers[1]))
    return [1e3 * times.first, pause, *map(memory_mib, servers)]


def memory_mib(server: cluster.Server) -> float:
    """The memory of a server's processes that no other process shares."""
    processes = psutil.Process(server.process.pid).children(recursive=True)
    return sum(one.memory_full_info().uss for one in processes) / 2**20


def measure(fleet: str, rounds: int) -> list[dict]:
    """A fleet's rows: for each figure the medians of all modes."""
    pairs = {mode: pair(fleet, mode) for mode in MODES}
    blocks = bench_serve.run_blocks(pairs, rounds, measure_block)
    return [
        row(fleet, figure, {mode: [one[at] for one in blocks[mode]] for mode in MODES})
        for at, figure in enumerate(FIGURES)
    ]


def row(fleet: str, figure: str, blocks: dict[str, list[float]]) -> dict:
    """One row; `gain` is above 1 if packed is better than sliced, `noise` is that of `blocks`."""
    medians = {mode: statistics.median(values) for mode, values in blocks.items()}
    return {
        "fleet": fleet,
        "figure": figure,
        **medians,
        "gain": medians["sliced"] / medians["packed"],
        "noise": bench_serve.noise(blocks),
    }


def misses(rows: list[dict]) -> list[str]:
    """A sentence for each time that is longer than with slices by more than the noise."""
    return [
        f"{row['fleet']}: {row['figure']}: packed {row['packed']:.0f}, sliced {row['sliced']:.0f}, "
        f"noise {row['noise']:.2f}"
        for row in rows
        if row["figure"] in TIMES and row["gain"] < 1 / (1 + row["noise"])
    ]


def main(
    json_file: JsonFile = None,
    only: Annotated[
        str, typer.Option("--only", metavar="WORD", help="Only fleets with WORD in their name.")
    ] = "",
    rounds: Annotated[int, typer.Option(min=2, help="Rounds, each of six blocks.")] = ROUNDS,
) -> None:
    """Time long prompts; status 1 if packed heads are slower than slices beyond the noise."""
    rows = []
    for fleet in FLEETS:
        if only in fleet:
            rows += measure(fleet, rounds)
            console().print(f"{fleet}: measured", highlight=False)
    show(f"Prompts of {PROMPT} tokens; medians, in turns", SERVED_HEADS, rows)
    finish({"rows": rows, "missed": misses(rows)}, json_file)


if __name__ == "__main__":
    typer.run(main)
