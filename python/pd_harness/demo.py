"""Compare a fleet that the stock engine gets wrong with a single server.

Run by `scripts/demo.sh`.  With the patched engine both give the same tokens; with the stock engine
no answer comes over NIXL, and wrong tokens come with the ``ascend`` backend.  The fleet depends on
the release.  At the end the tool compares the KV of more requests, on the patched engine.  Exit
status 0 if all prompts have equal tokens and all KV is equal, 1 if not, 2 if the servers did not
start.
"""

import asyncio
import contextlib
import dataclasses
import enum
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Annotated

import httpx
import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from pd_harness import cluster
from pd_harness.cpu_host.memfabric import memfabric_for
from pd_harness.cpu_host.models import TinyGQA, TinyMLA, TinyModel
from pd_harness.device import wait_for_memfabric_peers
from pd_harness.releases import release

LOGS = cluster.PD_ENV / "logs" / "demo"
NEW_TOKENS = 16
VERIFY_LENGTHS = "1,2,100,600,1024"  # in tokens, of the prompts whose KV is compared
ANSWER_TIMEOUT_S = 60  # a right answer takes a few
PROMPTS = [
    "A",
    "Hello, world.",
    "The prefill server computes the keys and values of a prompt.",
    "The decode server continues from them, one token after the other. " * 3,
    "0, 1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233, 377, 610, 987. " * 6,
]


class Backend(str, enum.Enum):
    """The transfer backend."""

    nixl = "nixl"
    ascend = "ascend"


# Fleets that stock gets wrong: in words, the topology, and the model.
DEMO_CASES_0_5_9 = {
    Backend.nixl: (
        "prefill TP 2, decode TP 1 over NIXL",
        cluster.Topology("nixl", prefill_tp=2, page_size=16),
        TinyGQA(),
    ),
    Backend.ascend: (
        "MLA, prefill PP 2 (7 layers), decode PP 1 with the ascend backend",
        cluster.Topology("ascend", prefill_pp=2, page_size=16),
        TinyMLA(layers=7),
    ),
}
DEMO_CASES = {
    Backend.nixl: (
        "GQA, prefill PP 2 (5 layers), decode PP 1 over NIXL",
        cluster.Topology("nixl", prefill_pp=2, page_size=16),
        TinyGQA(layers=5),
    ),
    Backend.ascend: (
        "GQA with FIA, prefill PP 2 (5 layers), decode PP 1 with the ascend backend",
        cluster.Topology("ascend", prefill_pp=2, page_size=16, fia=True),
        TinyGQA(layers=5),
    ),
}


@dataclasses.dataclass(frozen=True)
class Completion:
    """One answer of an OpenAI endpoint; each token reads as one character (see `models`)."""

    text: str = ""
    failure: str | None = None

    def as_text(self) -> Text:
        if self.failure is not None:
            return Text(self.failure, style="red")
        return Text(self.text)


def complete_prompts(url: str, seconds: float) -> list[Completion]:
    """Send all prompts at once to ``url``'s completions endpoint, decoding greedily."""

    async def one(client: httpx.AsyncClient, prompt: str) -> Completion:
        body = {
            "model": "tiny",
            "prompt": prompt,
            "max_tokens": NEW_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "skip_special_tokens": False,
        }
        try:
            response = await client.post(f"{url}/v1/completions", json=body)
        except httpx.TimeoutException:
            return Completion(failure=f"no answer in {seconds:.0f} s")
        except httpx.HTTPError as error:
            return Completion(failure=f"{error!r}")
        if response.status_code != 200:
            return Completion(failure=f"HTTP {response.status_code}: {response.text[:200]}")
        return Completion(response.json()["choices"][0]["text"])

    async def everything() -> list[Completion]:
        async with httpx.AsyncClient(timeout=seconds, trust_env=False) as client:
            return await asyncio.gather(*(one(client, prompt) for prompt in PROMPTS))

    return asyncio.run(everything())


@contextlib.contextmanager
def running(servers: list[cluster.Server], console: Console) -> Iterator[None]:
    """`cluster.running` with a line per server: a spinner until it is ready, then its time."""
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    start = time.monotonic()
    with contextlib.ExitStack() as stack:
        with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
            tasks = {server.name: progress.add_task(server.name, total=1) for server in servers}

            def ready(server: cluster.Server) -> None:
                progress.update(tasks[server.name], completed=1)
                if not console.is_terminal:
                    console.print(f"{server.name} ready, {time.monotonic() - start:.0f} s")

            stack.enter_context(cluster.running(servers, on_ready=ready))
        yield


def report(served: list[Completion], single: list[Completion], console: Console) -> int:
    """Print the answers side by side and return how many prompts have equal tokens."""
    table = Table(title=f"{NEW_TOKENS} tokens each, one character per token", show_lines=True)
    for heading in ("prompt", "through the router", "single server", "equal"):
        table.add_column(heading, overflow="fold")
    equal = 0
    for prompt, got, want in zip(PROMPTS, served, single, strict=True):
        same = got.failure is None and got == want
        equal += same
        short = prompt if len(prompt) <= 24 else f"{prompt[:20]}... ({len(prompt)} tokens)"
        mark = Text("yes", style="green") if same else Text("NO", style="red")
        table.add_row(Text(short), got.as_text(), want.as_text(), mark)
    console.print(table)
    return equal


def verify(router: str, console: Console) -> bool:
    """Let the tool compare all KV of some more requests; returns whether it is right."""
    words = ["verify", "--router", router, "--lengths", VERIFY_LENGTHS, "--requests", "8"]
    console.print(f"sglang-pd {' '.join(words)}", highlight=False, soft_wrap=True)
    tool = [sys.executable, "-m", "sglang_pd", *words]
    return subprocess.run(tool, cwd=cluster.CHECKOUT / "python").returncode == 0


def run(fleet: str, topology: cluster.Topology, kind: TinyModel, stock: bool) -> int:
    """Start the servers, send the prompts, print the report and return the exit status."""
    console = Console()
    engine = "stock" if stock else "patched"
    model = kind.make(cluster.RELEASE_ENV / "models")
    environment = {} if stock else {"SGLANG_PD_VERIFY": "1"}
    prefill, decode, router = cluster.pd_servers(topology, model, LOGS, engine, engine, environment)
    single = cluster.engine_server("single", "stock", model, LOGS)
    console.print(f"{engine} engine: router, {fleet}; and a single server (stock). Starting ...")
    try:
        with running([prefill, decode, router, single], console):
            if topology.backend == "ascend":
                wait_for_memfabric_peers(memfabric_for(engine))
            console.print(f"sending {len(PROMPTS)} prompts to each, all at once")
            expected = complete_prompts(single.url, ANSWER_TIMEOUT_S)
            start = time.monotonic()
            served = complete_prompts(router.url, ANSWER_TIMEOUT_S)
            seconds = time.monotonic() - start
            equal = report(served, expected, console)
            verified = stock or verify(router.url, console)
    except cluster.ServerFailed as failure:
        console.print(Text(f"the servers did not start: {failure}", style="red"))
        return 2
    console.print(f"{equal} of {len(PROMPTS)} prompts have equal tokens; {seconds:.1f} s")
    console.print(f"logs: {LOGS}")
    return 0 if equal == len(PROMPTS) and verified else 1


def main(
    backend: Annotated[
        Backend, typer.Argument(help="Transfer backend; the fleet depends on the release.")
    ] = Backend.nixl,
    stock: Annotated[
        bool, typer.Option("--stock", help="Serve with the stock engine, which fails.")
    ] = False,
) -> None:
    """Serve with a prefill and a decode server and compare the answers with a single server's."""
    try:
        cases = DEMO_CASES_0_5_9 if release() == "0.5.9" else DEMO_CASES
        sys.exit(run(*cases[backend], stock))
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    typer.run(main)
