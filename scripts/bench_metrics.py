"""What metrics and request lines cost: the time to the first token without and with them.

Run by `scripts/bench.sh metrics`. Five patched pairs of servers run, of which one serves while the
others are stopped (SIGSTOP), as in `bench_serve.py`. Two of them note nothing, because equal
servers differ, too. All start several times: a server keeps its speed as long as it runs.

Equal servers may differ by more than what is to be shown. So the log's own work for a request is
timed, too, as if nothing of it went on beside the request.
"""

import os
import random
import statistics
import time
from functools import partial
from typing import Annotated

import bench_serve
import typer
from bench_common import FIRST_TOKEN_BY_MODE, NOTES, JsonFile, finish, show

from sglang_pd.engine_free import load

LENGTHS = (200, 1024, 8192)  # of prompts, in tokens
STARTS, ROUNDS = 4, 2
OFF, AGAIN, LINES, ENGINE, METRICS = "off", "off again", "lines", "engine metrics", "metrics"
# A mode, and the one without what is to be measured: the engine's own metrics cost something, too.
COMPARED = {AGAIN: OFF, LINES: OFF, METRICS: ENGINE}
LIMIT = 0.01  # of the time to the first token
PEERS, FEW_PEERS = (1, 8, 64), 8  # decode servers of a prefill server; the limit holds for few
SECONDS, REQUESTS = 5, 50  # for which a log is timed, and requests in each second


def pair(mode: str) -> bench_serve.ServerPair:
    """Servers for long prompts, which note nothing, or what `mode` says."""
    label = f"metrics-{mode.replace(' ', '-')}"
    lines = bench_serve.LOGS / label / "lines"
    environment = {LINES: {"SGLANG_PD_REQUEST_LOG": str(lines)}, ENGINE: {"SGLANG_PD_METRICS": "0"}}
    metrics = mode in (ENGINE, METRICS)
    return bench_serve.long_pair(label, environment.get(mode, {}), metrics=metrics)


def served_rows(starts: int, rounds: int) -> list[dict]:
    """Medians of each mode for each length, measured in turns.

    `ratio` has the median over the starts of each mode to the one without; `spread` how far apart
    the ratios of equal servers were, over the starts.
    """
    medians, first_tokens = [], partial(bench_serve.first_tokens, lengths=LENGTHS)
    for _ in range(starts):
        pairs = {mode: pair(mode) for mode in (OFF, AGAIN, LINES, ENGINE, METRICS)}
        blocks = bench_serve.run_blocks(pairs, rounds, first_tokens)
        medians.append(
            {
                mode: [statistics.median(of) for of in zip(*values)]
                for mode, values in blocks.items()
            }
        )
    found = []
    for at, length in enumerate(LENGTHS):
        ms = {mode: statistics.median(one[mode][at] for one in medians) for mode in medians[0]}
        ratios = {
            mode: [one[mode][at] / one[without][at] for one in medians]
            for mode, without in COMPARED.items()
        }
        ratio = {mode: statistics.median(of_mode) for mode, of_mode in ratios.items()}
        spread = max(ratios[AGAIN]) / min(ratios[AGAIN]) - 1
        found.append({"tokens": length, "ms": ms, "ratio": ratio, "spread": spread})
    return found


def own_work(first_token_ms: float) -> list[dict]:
    """The processor time of a prefill rank's log, with metrics and request lines, by its peers.

    Args:
        first_token_ms: Time to the first token. `share` is the part of it that noting the request
            takes, and the log's thread for all of REQUESTS in the same time.
    """
    found = []
    for peers in PEERS:
        folder = bench_serve.LOGS / "metrics-own-work" / f"{time.time_ns()}"
        folder.mkdir(parents=True)
        os.environ.update(PROMETHEUS_MULTIPROC_DIR=str(folder), SGLANG_PD_REQUEST_LOG=str(folder))
        log = load("transfer_log").TransferLog()
        log.start("prefill", "TP 0/1 PP 0/1", "nixl", True, dict)
        note_requests(log, peers)  # makes the series
        time.sleep(2)
        noted, before = 0.0, time.process_time()
        for _ in range(SECONDS):
            start = time.thread_time()
            note_requests(log, peers)
            noted += time.thread_time() - start
            time.sleep(1)
        thread = time.process_time() - before - noted
        note_us, thread_ms = 1e6 * noted / (SECONDS * REQUESTS), 1e3 * thread / SECONDS
        share = note_us / 1e3 / first_token_ms + thread_ms / 1e3
        found.append({"peers": peers, "note_us": note_us, "thread_ms": thread_ms, "share": share})
    return found


def note_requests(log, peers: int) -> None:
    """Notes REQUESTS of four chunks each; one in ten is aborted."""
    for number in range(REQUESTS):
        room, peer = random.getrandbits(63), f"10.0.0.{random.randrange(peers)}:30000"
        log.opened(room, "rid", "", 8192)
        log.requested(room, peer)
        for _ in range(4):
            log.entered(room, "sending")
            log.sent(room, peer, "kv", ("whole", "packed")[number % 2], 1 << 24, 64, 0.01)
        log.sent(room, peer, "aux", "whole", 1024, 8, 0.001)
        for _ in range(20):
            log.polled("inflight", time.monotonic())
        if number % 10 == 0:
            log.failed(room, "Aborted by AbortReq.")
        log.ended(room)


def too_slow(served: list[dict], own: list[dict]) -> list[str]:
    """Returns a sentence for each mode that costs more than the limit, and than equal servers."""
    by_time = (
        f"{row['tokens']} tokens: {mode}: {row['ratio'][mode]:.3f} of {COMPARED[mode]}, "
        f"equal servers differ by {row['spread']:.3f}"
        for row in served
        for mode in (LINES, METRICS)
        if row["ratio"][mode] > 1 + max(LIMIT, row["spread"])
    )
    by_work = (
        f"{row['peers']} peers: {row['share']:.3f} of the time to the first token"
        for row in own
        if row["share"] > LIMIT and row["peers"] <= FEW_PEERS
    )
    return [*by_time, *by_work]


def main(
    json_file: JsonFile = None,
    starts: Annotated[int, typer.Option(min=2, help="How often all servers start.")] = STARTS,
    rounds: Annotated[
        int, typer.Option(min=1, help="Rounds a start, each of ten blocks.")
    ] = ROUNDS,
) -> None:
    """Time requests without and with metrics; status 1 if they cost over 1 %, or the noise."""
    served = served_rows(starts, rounds)
    own = own_work(min(row["ms"][OFF] for row in served))
    show("Milliseconds to the first token", FIRST_TOKEN_BY_MODE, served)
    show("Processor time of a rank's log", NOTES, own)
    finish({"serving": served, "log": own, "missed": too_slow(served, own)}, json_file)


if __name__ == "__main__":
    typer.run(main)
