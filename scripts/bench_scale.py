"""What many ranks cost each other, in stock and patched: `scripts/bench.sh scale`.

Prefill has PP 4 and TP `ranks / 4`; decode has `ranks` servers of one rank, so that each rank
works with all ranks of the other side. Ranks are processes with the engine's managers, without a
model, and with a transfer library that writes nothing (`null_transfer`).
"""

import contextlib
import functools
import itertools
import math
import os
import signal
import statistics
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated

import typer
from bench_common import SCALE, JsonFile, console, finish, show

sys.path.append(str(Path(__file__).resolve().parents[1] / "test" / "support"))
import fleet as fleets  # noqa: E402
from engine_release import SINCE_0_5_23  # noqa: E402

ENGINES = ("stock", "patched")
# Earlier, NIXL requests conclude by NIXL's own notifications, which `null_transfer` lacks.
BACKENDS = ("mooncake", "nixl") if SINCE_0_5_23 else ("mooncake",)
RANKS = (8, 16, 32, 64)  # of each side
STAGES = 4
REQUESTS = 256  # of all decode ranks together, while processor time is measured
SECONDS = 20.0  # under load; a decode rank is killed after a third of it
IDLE_FRACTION = 0.2  # idle time, as a part of `SECONDS`
ENOUGH_REQUESTS = 4000  # more than a rank serves in `SECONDS`
HANG_TIMEOUT_S = 600.0  # reached only by a hang
# The costs of a fleet that lost more of its requests mean nothing; stock loses some.
ATTEMPTS, MAX_LOST_FRACTION = 2, 0.05
# Figures that grow with ranks, and the power that the work itself grows with: all pairs of ranks
# meet, and all prefill ranks serve a request. Where stock grows slower, costs that each rank has
# once hide it. Wall time is noisier than processor time, and only shown.
GROWTHS = {"meet_cpu_s": 2.0, "kib_a_peer": 0.0, "messages": 1.0, "cpu_ms": 1.0}
# Exponents may always differ by this much: a fifth from 8 to 64 ranks.
MIN_NOISE = 0.1


Rooms = tuple[int, int]  # the first room, and the one after the last


class RunningRanks:
    """A running fleet, with calls to many ranks at once."""

    def __init__(self, servers: fleets.Servers, ranks: int):
        self.servers, self.next_room = servers, 1
        self.pool = ThreadPoolExecutor(2 * ranks + 1)
        self.decode = [*servers.decode, *self._start_decode_ranks(ranks - 1)]

    def _start_decode_ranks(self, count: int) -> list[fleets.Rank]:
        with ThreadPoolExecutor(4) as few:
            return [
                one
                for (one,) in few.map(lambda _: self.servers.start_another("decode"), range(count))
            ]

    @property
    def all_ranks(self) -> list[fleets.Rank]:
        return [*self.servers.prefill, *self.decode]

    def call_ranks(self, do: str, ranks: list[fleets.Rank] | None = None, **given) -> list[dict]:
        ranks = self.all_ranks if ranks is None else ranks
        return list(self.pool.map(lambda one: one.call(do, **given), ranks))

    def new_rooms(self, count: int) -> Rooms:
        """``count`` unused rooms."""
        first, self.next_room = self.next_room, self.next_room + count
        return first, self.next_room

    def start_serving(self, lanes: dict[fleets.Rank, Rooms], seconds: float, *more: Rooms) -> list:
        """Start serving: decode ranks their lane, prefill ranks all lanes and `more`.

        Returns futures: prefill's, then decode's.
        """
        given = [(one, [*lanes.values(), *more]) for one in self.servers.prefill]
        given += [(one, [lane]) for one, lane in lanes.items()]
        return [
            self.pool.submit(one.call, "serve", lanes=own, seconds=seconds) for one, own in given
        ]

    def serve(self, requests: int, decode: list[fleets.Rank] | None = None) -> tuple[float, int]:
        """Serve `requests` requests of each decode rank.

        Returns:
            Seconds until the last was served, and how many were served in all.

        Raises:
            RuntimeError: a rank has exited.
        """
        begun = time.monotonic()
        lanes = {one: self.new_rooms(requests) for one in decode or self.decode}
        answers = [one.result() for one in self.start_serving(lanes, HANG_TIMEOUT_S)]
        for answer in answers:
            if "ends" not in answer:
                raise RuntimeError(f"a rank does not serve requests: {answer}")
        last = max(end for answer in answers for *_, end in answer["ends"])
        for why in sorted({str(lost) for answer in answers for lost in answer["lost"]})[:5]:
            print(f"lost, or open after all others: room, why: {why}", file=sys.stderr)
        return last - begun, sum(len(answer["ends"]) for answer in answers[-len(lanes) :])


@functools.cache
def fork_server(engine: str) -> fleets.ForkServer:
    return fleets.ForkServer(engine, program="rank_scale.py")


@contextlib.contextmanager
def running(engine: str, backend: str, ranks: int) -> Iterator[RunningRanks]:
    # Stock NIXL gives wrong results, or hangs, for GQA between such sides.
    fleet = fleets.Fleet(
        prefill=fleets.Side(tp=ranks // STAGES, pp=STAGES),
        backend=backend,
        layers=STAGES,
        kv_heads=max(RANKS) // STAGES,
        mla=backend == "nixl",
        pages=4,
    )
    server = fork_server(engine)
    with fleets.running(fleet, server, server) as servers:
        yield RunningRanks(servers, ranks)


def measure(engine: str, backend: str, ranks: int, seconds: float = SECONDS) -> dict:
    """One row of figures; `seconds` is the time under load."""
    requests = max(2, REQUESTS // ranks)
    with running(engine, backend, ranks) as fleet:
        fleet.serve(2, fleet.decode[:1])  # the first peer's costs include those that all share
        before = fleet.call_ranks("figures")
        meet_seconds, met_ranks = fleet.serve(1)
        met = fleet.call_ranks("figures")
        prefill = slice(len(fleet.servers.prefill))
        grown = sum_of_differences(before[prefill], met[prefill])["private_kib"]
        to_meet = sum_of_differences(before, met)
        rest = statistics.mean(
            one["part"] for one in fleet.call_ranks("rest", seconds=IDLE_FRACTION * seconds)
        )
        start = fleet.call_ranks("figures")
        _, each = fleet.serve(requests)
        end = fleet.call_ranks("figures")
        spent = sum_of_differences(start, end)
        asked = ranks * (1 + requests)
        row = {
            "lost": asked - met_ranks - each,
            "lost_part": 1 - (met_ranks + each) / asked,
            "workers_ended": sum(one["dropped"] for one in end),
            "meet_s": meet_seconds,
            "meet_cpu_s": to_meet["all_s"],
            "meet_ms_a_pair": 1e3 * to_meet["all_s"] / ranks / (ranks - 1),
            "meet_http": to_meet["asked_http"],
            "kib_a_peer": grown / len(fleet.servers.prefill) / (ranks - 1),
            "messages": spent["messages"] / each,
            "scheduler_ms": 1e3 * spent["scheduler_s"] / each,
            "reader_ms": 1e3 * spent["reader_s"] / each,
            "cpu_ms": 1e3 * (spent["scheduler_s"] + spent["reader_s"]) / each,
            "all_ms": 1e3 * spent["all_s"] / each,
            "rest_percent": 100 * rest,
            **measure_rank_replacement(fleet, seconds),
        }
    return {"engine": engine, "backend": backend, "ranks": ranks, **row}


def sum_of_differences(before: list[dict], after: list[dict]) -> dict:
    """Each figure's growth, of all ranks together."""
    return {name: sum(b[name] - a[name] for a, b in zip(before, after)) for name in after[0]}


def measure_with_retry(*fleet) -> dict:
    """The first row of `ATTEMPTS` that lost few requests, else the last one; see `measure`."""
    for attempt in range(1, ATTEMPTS + 1):
        row = {**measure(*fleet), "attempt": attempt}
        if row["lost_part"] <= MAX_LOST_FRACTION:
            break
    return row


def measure_rank_replacement(fleet: RunningRanks, seconds: float) -> dict:
    """Kill a decode rank under load, start another, and measure the other ranks' longest gaps.

    A gap is a time in which none of a decode rank's requests ends.
    """
    lanes = {one: fleet.new_rooms(ENOUGH_REQUESTS) for one in fleet.decode}
    new = fleet.new_rooms(ENOUGH_REQUESTS)
    begun = time.monotonic()
    serving = fleet.start_serving(lanes, seconds, new)
    time.sleep(seconds / 3)
    os.kill(fleet.decode[0].pid, signal.SIGKILL)
    killed = time.monotonic()
    (other,) = fleet.servers.start_another("decode")
    left = max(1.0, begun + seconds - time.monotonic())
    answer = other.call("serve", lanes=[new], seconds=left)
    answers = [one.result() for one in serving]
    prefill, others = answers[: len(fleet.servers.prefill)], answers[-len(fleet.decode) + 1 :]
    ends = [[end for *_, end in one["ends"]] for one in others]
    first = min((end for *_, end in answer["ends"]), default=None)
    return {
        "gap_before_s": max(longest_gap(one, begun, killed) for one in ends),
        "gap_after_s": max(longest_gap(one, killed, begun + seconds) for one in ends),
        "prefill_died": sum("ends" not in one for one in prefill),
        "new_rank_s": first and first - killed,
    }


def longest_gap(ends: list[float], since: float, until: float) -> float:
    """The longest time between two `ends` from `since` to `until`, which count as ends, too."""
    within = [since, *sorted(end for end in ends if since < end < until), until]
    return max(b - a for a, b in itertools.pairwise(within))


def growth(rows: list[dict], figure: str) -> float:
    """The exponent of a figure's growth with ranks: least squares of logarithms."""
    points = [(math.log(row["ranks"]), math.log(max(row[figure], 1e-9))) for row in rows]
    return statistics.linear_regression(*zip(*points)).slope


def growths(rows: list[dict], rounds: int) -> list[dict]:
    """For each backend and figure both engines' exponents, and how much they vary by round."""
    found = []
    for backend, figure in itertools.product(dict.fromkeys(r["backend"] for r in rows), GROWTHS):
        own = {
            engine: [
                growth([r for r in rows if (r["engine"], r["backend"], r["round"]) == key], figure)
                for key in ((engine, backend, number) for number in range(rounds))
            ]
            for engine in ENGINES
        }
        noise = max(max(values) - min(values) for values in own.values())
        means = {engine: statistics.mean(values) for engine, values in own.items()}
        work = GROWTHS[figure]
        found.append(dict(backend=backend, figure=figure, work=work, **means, noise=noise))
    return found


def faster_growing(found: list[dict]) -> list[str]:
    """A sentence for each figure that grows faster than in stock, and than the work does."""
    return [
        f"{one['backend']}: {one['figure']} grows with ranks to the power {one['patched']:.2f}, "
        f"on stock {one['stock']:.2f}, the work to {one['work']:.2f}, noise {one['noise']:.2f}"
        for one in found
        if one["patched"] > max(one["stock"], one["work"]) + max(one["noise"], MIN_NOISE)
    ]


def lost_requests(rows: list[dict]) -> list[str]:
    """A sentence for each row in which patched lost requests."""
    return [
        f"{row['backend']}, {row['ranks']} ranks: {row['lost']} requests were lost on patched"
        for row in rows
        if row["engine"] == "patched" and (row["lost"] or row["attempt"] > 1)
    ]


def main(
    json_file: JsonFile = None,
    ranks: Annotated[
        list[int] | None,
        typer.Option(show_default=False, help="Ranks per side, a multiple of 4; may be repeated."),
    ] = None,
    only: Annotated[
        str, typer.Option("--only", metavar="WORD", help="Only backends with WORD in their name.")
    ] = "",
    rounds: Annotated[
        int, typer.Option(min=1, help="Rounds, each of stock and patched in turns.")
    ] = 2,
    seconds: Annotated[
        float, typer.Option(help="Seconds under load while a rank is killed.")
    ] = SECONDS,
) -> None:
    """Measure fleets of all sizes; status 1 if a figure grows faster than it may."""
    rows, sizes = [], sorted(ranks or RANKS)
    for number, backend in itertools.product(range(rounds), filter(lambda b: only in b, BACKENDS)):
        for size, engine in itertools.product(sizes, ENGINES):
            rows.append({**measure_with_retry(engine, backend, size, seconds), "round": number})
            console().print(rows[-1], highlight=False)
    found = growths(rows, rounds) if len(sizes) > 1 else []
    missed = [*faster_growing(found), *lost_requests(rows)]
    show("Ranks per side, and their costs; see docs/evidence", SCALE, rows)
    load = os.getloadavg()[0]
    finish({"rows": rows, "growths": found, "missed": missed, "load": load}, json_file)


if __name__ == "__main__":
    typer.run(main)
