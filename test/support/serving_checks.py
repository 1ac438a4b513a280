"""What the serving tests look at, and how they keep it: answers, what a server holds, evidence."""

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
from pd_harness.device import DTYPES, device

Answered = TypeVar("Answered")

# What MemFabric logs of its own faults, after which a test starts its servers again. 1.0.8 now and
# then refuses one of two ranks that join its store at the same moment, and the server of that rank
# exits. 1.3.0 may lose part of a decode rank's memory while two prefill ranks join that rank; it
# then refuses every write there. For a wrong address it logs something else.
NOT_JOINED = "smem trans create failed"
LOST_MEMORY = "failed to auto infer copy direction"
STARTS = 3
# Another TP size or kernel sums in another order. In half precision that may also decide between
# two tokens of nearly one logprob: there and after it, a prompt's answer says nothing.
LOGPROB_TOLERANCE = {"float32": 2e-3, "float16": 0.05}
# Without work: where a hang is expected, and where it is none that the machine does much else.
LOST_SECONDS = 8
SLOW_SECONDS = 60
TOKENS_MUST_AGREE = {"float32": True, "float16": False}


def tool(*words: str) -> tuple[int, dict]:
    """Exit status of `sglang-pd`, and what it found."""
    command = [str(cluster.interpreter("base")), "-m", "sglang_pd", *words, "--json"]
    done = subprocess.run(
        command, cwd=cluster.CHECKOUT / "python", capture_output=True, text=True, timeout=600
    )
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def retry_memfabric_faults(serve: Callable[[], Answered]) -> Answered:
    """What ``serve`` returns; called again, with a warning, after one of MemFabric's own faults."""
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
    """As `cluster.running`; at the end, unless a server has exited, `check_no_memory_lost`."""
    with cluster.running(servers):
        yield
        if not any(server.has_ended() for server in servers):
            check_no_memory_lost(servers)


def check_no_memory_lost(servers: Iterable[cluster.Server]) -> None:
    """Raise ServerFailed if a server's MemFabric has lost memory of a rank, all of which run."""
    for server in servers:
        if LOST_MEMORY in server.log.read_text(errors="replace"):
            raise cluster.ServerFailed(f"{server.name}: {LOST_MEMORY}\n{server.log_tail()}")


def outcome(
    answers: list[cluster.Answer], ended: list[str], expected: list[cluster.Answer]
) -> tuple[str, str]:
    """What became of the prompts: "right", "wrong", or how the first failed; and the details.

    "dead" is a failure where a server has ended, or where the router, 502, lost one that is ending.
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
    if other_ids and (TOKENS_MUST_AGREE[dtype] or apart > LOGPROB_TOLERANCE[dtype]):
        return "wrong", f"{other_ids} of {len(answers)} prompts have other tokens"
    if apart > LOGPROB_TOLERANCE[dtype]:
        return "wrong", f"same tokens, but logprobs differ by up to {apart:.4f}"
    slowest = max(answer.seconds for answer in answers)
    ties = f"{other_ids} prompts part at a tie, " if other_ids else ""
    return "right", f"{ties}logprobs within {apart:.1e}, {slowest:.1f} s"


def _apart(got: cluster.Answer, want: cluster.Answer) -> float:
    """How far logprobs are apart, up to and with the first token that differs."""
    others = (at for at, (a, b) in enumerate(zip(got.ids, want.ids, strict=True)) if a != b)
    end = next(others, len(want.ids)) + 1
    logprobs = zip(got.logprobs[:end], want.logprobs[:end], strict=True)
    return max(abs(a - b) for a, b in logprobs)


def retractions(log: str) -> int:
    """Requests that a decode server has retracted by its log."""
    return sum(map(int, re.findall(r"#retracted_reqs: (\d+)", log)))


def held(server: cluster.Server) -> dict[str, int]:
    """Tokens and requests that an engine server holds, by its own count.

    Prefixes that it only keeps for reuse are not among them.
    """
    answer = httpx.get(f"{server.url}/v1/loads", timeout=30, trust_env=False).json()
    sums: Counter[str] = Counter()  # over the groups of DP attention
    for load in answer["loads"]:
        queues = load["disaggregation"].items()
        sums.update({name: size for name, size in queues if name.endswith("_queue_reqs")})
        names = ("num_used_tokens", "num_running_reqs", "num_waiting_reqs")
        sums.update({name: load[name] for name in names})
    return dict(sums)


def holds_nothing(server: cluster.Server) -> bool:
    return not any(held(server).values())


class Lost:
    """Whether no answer is to be expected: for long nothing has been computed.

    Prefill has done its part, or has raised, and decode runs nothing; or one of them has died, and
    the router, which waits for both, does not say so.
    """

    def __init__(
        self, prefill: cluster.Server, decode: cluster.Server, seconds: float = SLOW_SECONDS
    ):
        self.prefill, self.decode, self.seconds = prefill, decode, seconds
        # A busy machine's server may log one when it starts, and lives.
        self.raised_before = self._raised()
        self.begin()

    def begin(self) -> None:
        """Prompts are sent now."""
        self.busy_at = time.monotonic()

    def __call__(self) -> bool:
        if not self._is_idle():
            self.busy_at = time.monotonic()
        return time.monotonic() - self.busy_at > self.seconds

    def _is_idle(self) -> bool:
        if any(server.has_ended() for server in (self.prefill, self.decode)):
            return True
        raised = self._raised() > self.raised_before
        try:
            return held(self.decode)["num_running_reqs"] == 0 and (
                raised or holds_nothing(self.prefill)
            )
        except httpx.HTTPError:
            return False

    def _raised(self) -> int:
        log = self.prefill.log.read_text(errors="replace")
        return log.count("Traceback (most recent call last)")


def seconds_until(condition: Callable[[], bool], patience: float, pause: float = 0.05) -> float:
    """How long a condition takes to become true."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < patience, f"not in {patience} s"
        time.sleep(pause)
    return time.monotonic() - start


def resident_mib(server: cluster.Server) -> float:
    """Memory of a server's processes."""
    return sum(process.memory_info().rss for process in _processes(server)) / 2**20


@contextlib.contextmanager
def stopped(server: cluster.Server) -> Iterator[None]:
    """All of a server's processes stand still."""
    processes = _processes(server)
    for process in processes:
        process.suspend()
    try:
        yield
    finally:
        for process in processes:
            process.resume()


def open_files(server: cluster.Server) -> int:
    """Files and sockets of a server's processes."""
    return sum(process.num_fds() for process in _processes(server))


def _processes(server: cluster.Server) -> list[psutil.Process]:
    # The first child of the server's keeper, which is no part of it, is the server.
    return psutil.Process(server.process.pid).children(recursive=True)


def record(kind: str, **row) -> None:
    """Append a row to .pd-env/RELEASE/evidence/KIND.jsonl, for `scripts/evidence.sh`."""
    file = cluster.OF_RELEASE / "evidence" / f"{kind}.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as out:
        out.write(json.dumps(row) + "\n")
