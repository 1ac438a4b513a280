"""Stock and patched pairs of prefill and decode servers compared, on the CPU host.

Run by `scripts/bench.sh serve`. For each fleet both pairs run, and one is stopped (SIGSTOP) while
the other serves: stock, patched, patched, stock in each round. Both get the same prompts, and their
tokens must agree. Clients post to both servers of a pair, without a router.
"""

import asyncio
import contextlib
import dataclasses
import json
import random
import shutil
import signal
import statistics
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated

import httpx
import psutil
import typer
from bench_common import SERVE, JsonFile, console, finish, show

from pd_harness import cluster
from pd_harness.cpu_host.models import TinyGQA, TinyMLA, TinyModel, write_atomically
from pd_harness.ports import free_ports

LOGS = cluster.PD_ENV / "logs" / "bench"
ENGINES = ("stock", "patched")
ROUNDS = 6
PROMPT = 200  # tokens, sent in one piece
NEW_TOKENS = 16
SEQUENTIAL_REQUESTS = 6  # in a block, one after the other
BURST_REQUESTS = 16  # then, in the same block, all at once
SECONDS = 120  # for an answer
LONG_CONTEXT = 16_384  # tokens
# The figures, and whether higher is better.
FIGURES = {
    "first token, alone, ms": False,
    "answer, alone, ms": False,
    f"first token, {BURST_REQUESTS} at once, ms": False,
    f"requests a second, {BURST_REQUESTS} at once": True,
}


# Fleets whose tokens stock gets right.
FLEETS: dict[str, tuple[cluster.Topology, TinyModel]] = {
    "nixl TP 1 to 1": (cluster.Topology("nixl", page_size=16), TinyGQA()),
    "nixl TP 1 to 2": (cluster.Topology("nixl", page_size=16, decode_tp=2), TinyGQA()),
    "mooncake TP 1 to 1": (cluster.Topology("mooncake", page_size=16), TinyGQA()),
    "mooncake TP 2 to 1": (cluster.Topology("mooncake", page_size=16, prefill_tp=2), TinyGQA()),
    "ascend MLA TP 1 to 1": (cluster.Topology("ascend", page_size=16), TinyMLA()),
    "ascend GQA TP 2 to 1": (cluster.Topology("ascend", page_size=16, prefill_tp=2), TinyGQA()),
}

ServerPair = tuple[cluster.Server, cluster.Server]  # prefill and decode


@dataclasses.dataclass(frozen=True)
class RequestTimes:
    """One request: seconds to its first token and to its last, and its tokens."""

    first: float
    last: float
    ids: tuple[int, ...]


def pair(name: str, engine: str) -> ServerPair:
    folder = LOGS / f"{name.replace(' ', '_')}-{engine}"
    topology, kind = FLEETS[name]
    model = kind.make(cluster.RELEASE_ENV / "models")
    return cluster.pd_servers(topology, model, folder, engine, engine, idle_sleep=False)[:2]


def long_model() -> Path:
    """The tests' model with a longer context in its config, for other benchmarks."""
    short = TinyGQA().make(cluster.RELEASE_ENV / "models")

    def write(folder: Path) -> None:
        shutil.copytree(short, folder, dirs_exist_ok=True)
        config = json.loads((folder / "config.json").read_text())
        config["max_position_embeddings"] = LONG_CONTEXT
        (folder / "config.json").write_text(json.dumps(config))

    return write_atomically(short.with_name(f"{short.name}-long"), write)


def long_pair(label: str, environment: dict[str, str], **both) -> ServerPair:
    """Patched servers over NIXL, TP 1 to 1, for prompts of up to LONG_CONTEXT tokens."""
    topology = cluster.Topology("nixl", page_size=16, decode_tokens=LONG_CONTEXT)
    both |= {"environment": environment, "idle_sleep": False, "chunk": 2048}
    where = ("patched", long_model(), LOGS / label, *free_ports(1))
    prefill = cluster.prefill_server(topology, *where, max_tokens=LONG_CONTEXT, **both)
    return prefill, cluster.decode_server(topology, *where, **both)


async def first_tokens(servers: ServerPair, seed: int, lengths: Iterable[int]) -> list[float]:
    """Milliseconds to the first token of one prompt of each length, in tokens."""
    rng = random.Random(seed)
    async with httpx.AsyncClient(timeout=SECONDS, trust_env=False) as client:
        # Wakes the servers, which were stopped.
        await time_request(client, servers, rng.choices(range(256), k=32))
        timed = [
            await time_request(client, servers, rng.choices(range(256), k=length))
            for length in lengths
        ]
    return [1e3 * one.first for one in timed]


def run_blocks(
    pairs: dict[str, ServerPair],
    rounds: int,
    run_block: Callable[[ServerPair, int], Awaitable[list[float]]],
) -> dict[str, list[list[float]]]:
    """The figures of all blocks of each pair, `run_block(pair, seed)`, without a first round.

    Only the pair of the block runs. In a round each pair runs twice, in opposite orders, and all
    pairs get the same two seeds; each block needs new prompts, since servers cache prefixes.
    """
    blocks = {name: [] for name in pairs}
    with all_running(pairs):
        # Round -1 warms up and is not recorded.
        for number in range(-1, rounds):
            for half, order in enumerate((list(pairs), list(pairs)[::-1])):
                for name in order:
                    send_signal(pairs[name], signal.SIGCONT)
                    seed = 10_000 + 4 * number + 2 * half
                    figures = asyncio.run(run_block(pairs[name], seed))
                    send_signal(pairs[name], signal.SIGSTOP)
                    if number >= 0:
                        blocks[name].append(figures)
    return blocks


@contextlib.contextmanager
def all_running(pairs: dict[str, ServerPair]) -> Iterator[None]:
    """Start all pairs, and stop each (SIGSTOP) when it is ready."""
    with contextlib.ExitStack() as stack:
        for servers in pairs.values():
            stack.enter_context(cluster.running(servers))
            send_signal(servers, signal.SIGSTOP)
        yield


def send_signal(servers: ServerPair, number: signal.Signals) -> None:
    """Send a signal to all processes of a pair."""
    for server in servers:
        # Only the supervisor's children: it must stay able to kill them.
        for process in psutil.Process(server.process.pid).children(recursive=True):
            process.send_signal(number)


def prompts(seed: int, count: int) -> list[list[int]]:
    source = random.Random(seed)
    return [[source.randrange(256) for _ in range(PROMPT)] for _ in range(count)]


async def time_request(
    client: httpx.AsyncClient, servers: ServerPair, prompt: list[int]
) -> RequestTimes:
    """Post to both servers, and time decode's tokens as they arrive.

    Raises:
        RuntimeError: The answer does not have `NEW_TOKENS` tokens.
    """
    prefill, decode = servers
    body = {
        **cluster.greedy_body(prompt, NEW_TOKENS),
        "bootstrap_host": cluster.HOST,
        "bootstrap_port": prefill.bootstrap_port,
        "bootstrap_room": random.randrange(2**63),
    }
    start = time.perf_counter()
    prefilling = asyncio.create_task(client.post(f"{prefill.url}/generate", json=body))
    times, last = [], "{}"
    async with client.stream(
        "POST", f"{decode.url}/generate", json={**body, "stream": True}
    ) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                times.append(time.perf_counter() - start)
                last = line.removeprefix("data: ")
    await prefilling
    ids = json.loads(last).get("output_ids", ())
    if len(ids) != NEW_TOKENS:
        raise RuntimeError(f"expected {NEW_TOKENS} tokens, got: {last[:500]}")
    return RequestTimes(times[0], times[-1], tuple(ids))


async def measure_block(
    servers: ServerPair, seed: int
) -> tuple[list[float], list[tuple[int, ...]]]:
    """The figures of one block, in the order of `FIGURES`, and the tokens of its answers."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=SECONDS, trust_env=False, limits=limits) as client:
        await time_request(client, servers, prompts(-seed - 1, 1)[0])  # wakes the stopped pair
        alone = [
            await time_request(client, servers, prompt)
            for prompt in prompts(seed, SEQUENTIAL_REQUESTS)
        ]
        start = time.perf_counter()
        together = await asyncio.gather(
            *(time_request(client, servers, prompt) for prompt in prompts(seed + 1, BURST_REQUESTS))
        )
        seconds = time.perf_counter() - start
    figures = [
        1e3 * statistics.median(one.first for one in alone),
        1e3 * statistics.median(one.last for one in alone),
        1e3 * statistics.median(one.first for one in together),
        BURST_REQUESTS / seconds,
    ]
    return figures, [one.ids for one in [*alone, *together]]


def measure(name: str, rounds: int) -> list[dict]:
    """A fleet's rows: for each figure both engines' medians, their ratio, and the noise.

    Raises:
        RuntimeError: An answer is missing, or the engines' tokens differ.
    """
    tokens: dict[int, list[tuple[int, ...]]] = {}  # by seed, of the engine that had it first

    async def run_block(servers: ServerPair, seed: int) -> list[float]:
        figures, ids = await measure_block(servers, seed)
        if tokens.setdefault(seed, ids) != ids:
            raise RuntimeError(f"{name}: stock and patched give different tokens")
        return figures

    blocks = run_blocks({engine: pair(name, engine) for engine in ENGINES}, rounds, run_block)
    return [
        row(name, figure, {engine: [one[at] for one in blocks[engine]] for engine in ENGINES})
        for at, figure in enumerate(FIGURES)
    ]


def row(name: str, figure: str, blocks: dict[str, list[float]]) -> dict:
    """One row; `ratio` is above 1 if patched is better, `noise` is that of `blocks`."""
    medians = {engine: statistics.median(values) for engine, values in blocks.items()}
    ratio = medians["patched"] / medians["stock"]
    return {
        "fleet": name,
        "figure": figure,
        **medians,
        "ratio": ratio if FIGURES[figure] else 1 / ratio,
        "noise": noise(blocks),
    }


def noise(blocks: dict[str, list[float]]) -> float:
    """Relative difference between the medians of two halves of one engine's blocks.

    The largest of both engines and three ways to halve: first and second in a round, every other
    round, and early and late.
    """
    apart = []
    for values in blocks.values():
        count = len(values)
        ways = ([0, 1] * count, [0, 0, 1, 1] * count, [0] * (count // 2) + [1] * count)
        for way in ways:
            halves = ([v for v, half in zip(values, way) if half == which] for which in (0, 1))
            one, other = map(statistics.median, halves)
            apart.append(max(one, other) / min(one, other) - 1)
    return max(apart)


def regressions(rows: list[dict]) -> list[str]:
    """A sentence for each figure that is worse than stock's by more than the noise."""
    return [
        f"{row['fleet']}: {row['figure']}: {row['ratio']:.2f} of stock, noise {row['noise']:.2f}"
        for row in rows
        if row["ratio"] < 1 - row["noise"]
    ]


def main(
    json_file: JsonFile = None,
    only: Annotated[
        str, typer.Option("--only", metavar="WORD", help="Only fleets with WORD in their name.")
    ] = "",
    rounds: Annotated[int, typer.Option(min=2, help="Rounds, each of four blocks.")] = ROUNDS,
) -> None:
    """Time requests to both pairs; status 1 if patched is slower by more than the noise."""
    rows = []
    for name in FLEETS:
        if only in name:
            rows += measure(name, rounds)
            console().print(f"{name}: measured", highlight=False)
    title = f"Prompts of {PROMPT} tokens, answers of {NEW_TOKENS}; medians, in turns"
    show(title, SERVE, rows)
    finish({"rows": rows, "missed": regressions(rows)}, json_file)


if __name__ == "__main__":
    typer.run(main)
