"""Checks of the serving tests: answers, server load and hangs; and records of evidence."""

import contextlib
import json
import re
import subprocess
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import httpx
import psutil

from pd_harness import cluster
from pd_harness.cpu_host.packing_log import INTERLEAVED_LOG_LINE, PACKED_LOG_LINE
from pd_harness.device import DTYPES, device, machine
from pd_harness.polling import wait_until

Answered = TypeVar("Answered")

# What MemFabric logs of its own faults, after which a test restarts the servers. 1.0.8 sometimes
# rejects one of two ranks that join its store at the same moment, and that rank's server exits.
# 1.3.0 may lose part of a decode rank's memory when two prefill ranks join that rank at the same
# moment; it then rejects every write there. For a wrong address it logs something else.
NOT_JOINED = "smem trans create failed"
LOST_MEMORY = "failed to auto infer copy direction"
STARTS = 3
# Another TP size or kernel sums in another order. In half precision that may also decide between
# two tokens with nearly equal logprobs; from such a token on, a prompt's answer proves nothing.
LOGPROB_TOLERANCE = {"float32": 2e-3, "float16": 0.05}
# Seconds without work until a test assumes a hang: if it expects one, and on a busy machine.
LOST_SECONDS = 8
SLOW_SECONDS = 60


def run_tool(*words: str) -> tuple[int, dict]:
    """Runs `sglang-pd` with these words; returns its exit status and its JSON output."""
    command = [str(cluster.interpreter("base")), "-m", "sglang_pd", *words, "--json"]
    done = subprocess.run(
        command, cwd=cluster.CHECKOUT / "python", capture_output=True, text=True, timeout=600
    )
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def retry_memfabric_faults(serve: Callable[[], Answered]) -> Answered:
    """Returns ``serve()``; warns and calls it again after one of MemFabric's own faults."""
    for start in range(1, STARTS):
        try:
            return serve()
        except cluster.ServerFailed as error:
            fault = next((one for one in (NOT_JOINED, LOST_MEMORY) if one in str(error)), None)
            if fault is None:
                raise
            warnings.warn(f"start {start} of {STARTS} failed: MemFabric: {fault}", stacklevel=2)
    return serve()


@contextlib.contextmanager
def running(servers: Sequence[cluster.Server]) -> Iterator[None]:
    """Runs servers as `cluster.running`; at the end checks that MemFabric lost no memory."""
    with cluster.running(servers):
        yield
        if not any(server.has_ended() for server in servers):
            check_no_memory_lost(servers)


def check_no_memory_lost(servers: Iterable[cluster.Server]) -> None:
    """Raises ServerFailed if a server's MemFabric has lost memory of a rank that is alive."""
    for server in servers:
        if LOST_MEMORY in server.log.read_text(errors="replace"):
            raise cluster.ServerFailed(f"{server.name}: {LOST_MEMORY}\n{server.log_tail()}")


def outcome(
    answers: list[cluster.Answer], ended: list[str], expected: list[cluster.Answer]
) -> tuple[str, str]:
    """Returns the prompts' outcome and its details.

    The outcome is "right", "wrong", or the kind of the first failure. It is "dead" if a server has
    exited, or if the router returned 502 because it lost a server that is exiting.

    Args:
        answers: The answers to judge.
        ended: Names of the servers that have exited.
        expected: The reference answers.
    """
    failures = [answer.failure for answer in answers if answer.failure]
    if failures:
        of_servers = "".join(f"; the {name} server ended" for name in ended)
        detail = f"{len(failures)} of {len(answers)} prompts: {failures[0]}{of_servers}"
        kind = failures[0].partition(":")[0]
        return "dead" if ended or kind == "http 502" else kind, detail
    return _compare(answers, expected)


def _compare(answers, expected) -> tuple[str, str]:
    dtype = DTYPES[device()]
    pairs = list(zip(answers, expected, strict=True))
    other_ids = sum(got.ids != want.ids for got, want in pairs)
    apart = max(_apart(got, want) for got, want in pairs)
    if other_ids and (dtype == "float32" or apart > LOGPROB_TOLERANCE[dtype]):
        return "wrong", f"{other_ids} of {len(answers)} prompts have other tokens"
    if apart > LOGPROB_TOLERANCE[dtype]:
        return "wrong", f"same tokens, but logprobs differ by up to {apart:.4f}"
    slowest = max(answer.seconds for answer in answers)
    ties = f"{other_ids} prompts part at a tie, " if other_ids else ""
    return "right", f"{ties}logprobs within {apart:.1e}, {slowest:.1f} s"


def _apart(got: cluster.Answer, want: cluster.Answer) -> float:
    """Returns the largest logprob difference up to and including the first differing token."""
    others = (at for at, (a, b) in enumerate(zip(got.ids, want.ids, strict=True)) if a != b)
    end = next(others, len(want.ids)) + 1
    logprobs = zip(got.logprobs[:end], want.logprobs[:end], strict=True)
    return max(abs(a - b) for a, b in logprobs)


def heads_moved_by(prefill: cluster.Server, decode: cluster.Server) -> str:
    """Returns which of the two has packed or interleaved KV heads: empty if neither has.

    On NPUs, whose servers do not log it, the answer is always empty.
    """
    said = {"prefill": (prefill, PACKED_LOG_LINE), "decode": (decode, INTERLEAVED_LOG_LINE)}
    return " and ".join(
        side
        for side, (server, line) in said.items()
        if line in server.log.read_text(errors="replace")
    )


def retractions(log: str) -> int:
    """Counts the requests that a decode server has retracted according to its log."""
    return sum(map(int, re.findall(r"#retracted_reqs: (\d+)", log)))


def server_load(server: cluster.Server) -> dict[str, int]:
    """Returns an engine server's own counts of tokens in use and of requests.

    Tokens in the radix cache that no request uses do not count.
    """
    answer = httpx.get(f"{server.url}/v1/loads", timeout=30, **cluster.LOCAL_HTTP).json()
    sums: Counter[str] = Counter()  # over the DP ranks
    for load in answer["loads"]:
        queues = load["disaggregation"].items()
        sums.update({name: size for name, size in queues if name.endswith("_queue_reqs")})
        names = ("num_used_tokens", "num_running_reqs", "num_waiting_reqs")
        sums.update({name: load[name] for name in names})
    return dict(sums)


def holds_nothing(server: cluster.Server) -> bool:
    return not any(server_load(server).values())


class HangDetector:
    """A callable that returns whether no answer will come: no server works for `seconds`.

    A fleet is idle if prefill has finished or has raised while decode runs no request. It is also
    idle if a server has exited, which the router, waiting for both, does not report; what is not
    answered `LOST_SECONDS` later never is.
    """

    def __init__(
        self, prefill: cluster.Server, decode: cluster.Server, seconds: float = SLOW_SECONDS
    ):
        self.prefill, self.decode, self.seconds = prefill, decode, seconds
        # On a busy machine, a server may log a traceback at its start, and still work.
        self.raised_before = self._raised()
        self.has_ended = False
        self.begin()

    def begin(self) -> None:
        """Restarts the clock; call it when prompts are sent."""
        self.busy_at = time.monotonic()

    def __call__(self) -> bool:
        if not self.has_ended and any(one.has_ended() for one in (self.prefill, self.decode)):
            self.has_ended = True
            self.seconds = min(self.seconds, LOST_SECONDS)
            self.begin()
        if not self._is_idle():
            self.busy_at = time.monotonic()
        return time.monotonic() - self.busy_at > self.seconds

    def _is_idle(self) -> bool:
        if self.has_ended:
            return True
        raised = self._raised() > self.raised_before
        try:
            return server_load(self.decode)["num_running_reqs"] == 0 and (
                raised or holds_nothing(self.prefill)
            )
        except httpx.HTTPError:
            return False

    def _raised(self) -> int:
        log = self.prefill.log.read_text(errors="replace")
        return log.count("Traceback (most recent call last)")


def seconds_until(condition: Callable[[], bool], patience: float, pause: float = 0.05) -> float:
    """Waits until a condition is true, for at most `patience` seconds; returns the seconds."""
    start = time.monotonic()
    assert wait_until(condition, patience, pause), f"not in {patience} s"
    return time.monotonic() - start


def resident_mib(server: cluster.Server) -> float:
    """Returns the resident memory of a server's processes, in MiB."""
    return sum(process.memory_info().rss for process in _processes(server)) / 2**20


@contextlib.contextmanager
def stopped(server: cluster.Server) -> Iterator[None]:
    """Stops all of a server's processes during the block."""
    processes = _processes(server)
    for process in processes:
        process.suspend()
    try:
        yield
    finally:
        for process in processes:
            process.resume()


def open_files(server: cluster.Server) -> int:
    """Counts the open files and sockets of a server's processes."""
    return sum(process.num_fds() for process in _processes(server))


def _processes(server: cluster.Server) -> list[psutil.Process]:
    # `server.process` is the server's supervisor; the server is its child.
    return psutil.Process(server.process.pid).children(recursive=True)


def record(kind: str, **row) -> None:
    """Appends a row to .pd-env/RELEASE/evidence/KIND.jsonl, for `scripts/evidence.sh`."""
    file = cluster.RELEASE_ENV / "evidence" / f"{kind}.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as out:
        out.write(json.dumps({**row, **machine()}) + "\n")
