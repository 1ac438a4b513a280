"""Put one fault at a time into the patch set; `scripts/test.sh` must find each.

Run by `scripts/mutants.sh`. Each fault is made in a copy of the checkout with an environment of its
own, in which the tests run, the quick ones first, until one fails.
"""

import contextlib
import dataclasses
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import tomllib
import typer
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
RELEASE = "0.5.9"
RELEASE_FILE = ROOT / "python" / "engines" / RELEASE / "release.toml"
TREES = [f"python/{tree}/srt" for tree in tomllib.loads(RELEASE_FILE.read_text())["trees"]]
LAYOUT = "disaggregation/kv_layout"
TESTS = ("unit", "engine", "transport", "harness", "serving")  # the tool's do not look at it
NOT_COPIED = (".git", ".pd-env", "__pycache__", ".ruff_cache", ".pytest_cache", ".hypothesis")


@dataclasses.dataclass(frozen=True)
class Mutant:
    """In ``file``, each text is replaced by another; it must be there once."""

    name: str
    file: str
    changes: tuple[tuple[str, str], ...]


def mutant(name: str, file: str, *changes: tuple[str, str]) -> Mutant:
    return Mutant(name, file, changes)


MUTANTS = (
    mutant(
        "replicated heads in another order",
        f"{LAYOUT}/heads.py",
        ("head = rank // (tp_size // total)", "head = rank % total"),
    ),
    mutant(
        "each stage's layers begin with 0",
        f"{LAYOUT}/pools.py",
        (
            "list(range(pool.start_layer, pool.start_layer + pool.layer_num))",
            "list(range(pool.layer_num))",
        ),
    ),
    mutant(
        "a run of pages where decode's have a gap",
        f"{LAYOUT}/plan.py",
        (" | (dst[1:] - dst[:-1] != 1)", ""),
    ),
    mutant(
        "a long page without its last token",
        f"{LAYOUT}/plan.py",
        ("row = np.arange(self.rows)", "row = np.arange(min(self.rows, max(16, self.rows - 1)))"),
        ("np.full(src.size * self.rows, self.length)", "np.full(src.size * row.size, self.length)"),
    ),
    mutant(
        "more pages on decode than prefill sends",
        f"{LAYOUT}/plan.py",
        ("if src.size != dst.size:", "if src.size > dst.size:"),
    ),
    mutant(
        "stages that have one sender's number",
        "disaggregation/pd/rooms.py",
        ("return self.attn_tp_rank * self.pp_size + self.pp_rank", "return self.attn_tp_rank"),
    ),
    mutant(
        "done before the last chunk has come",
        f"{LAYOUT}/transfer_status.py",
        ("if len(self._chunks[who]) == count}", "if self._chunks[who]}"),
    ),
    mutant(
        "a peer made known beside other calls of the agent",
        "disaggregation/nixl/conn.py",
        (
            "            with self.agent_lock:\n"
            "                self.agent.add_remote_agent(decode_kv_args.agent_metadata)",
            "            self.agent.add_remote_agent(decode_kv_args.agent_metadata)",
        ),
    ),
    mutant(
        "FIA: a token for a page",
        "hardware_backend/npu/memory_pool_npu.py",
        ("[buffer.nbytes // pages for buffer in buffers]", "[b[0].nbytes for b in buffers]"),
    ),
    mutant(
        "index keys that stay behind in a copy",
        "hardware_backend/npu/memory_pool_npu.py",
        ("            buffers.append(self.index_k_buffer)\n", "            pass\n"),
    ),
    mutant(
        "the draft's state is not registered",
        "disaggregation/utils.py",
        ("            pools.append(draft_token_to_kv_pool)\n", "            pass\n"),
    ),
    mutant(
        "metadata rows by prefill's width alone",
        f"{LAYOUT}/aux_rows.py",
        ("if width == theirs[i] != 0)", "if width)"),
    ),
    mutant(
        "a stage goes by what it hears itself",
        "disaggregation/pd/agreement.py",
        ("poller.poll = lambda state=states[rid]: state", "poller.poll = poller.poll"),
    ),
    mutant(
        "a rank fails alone",
        "disaggregation/pd/agreement.py",
        ("op=dist.ReduceOp.MIN", "op=dist.ReduceOp.MAX"),
    ),
)


def copied(folder: Path) -> Path:
    """A copy of the checkout that shares packages, the models and the references."""
    copy = folder / "checkout"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*NOT_COPIED), symlinks=True)
    (copy / ".pd-env" / RELEASE).mkdir(parents=True)
    for name in ("base", *(f"{RELEASE}/{name}" for name in ("packages", "models", "references"))):
        (copy / ".pd-env" / name).symlink_to(ROOT / ".pd-env" / name)
    return copy


def source(fault: Mutant, checkout: Path) -> Path:
    return next(file for tree in TREES if (file := checkout / tree / fault.file).exists())


@contextlib.contextmanager
def having(fault: Mutant, checkout: Path) -> Iterator[None]:
    """The checkout has the fault within the block.

    Raises:
        SystemExit: the text that is to be replaced is not there once.
    """
    file = source(fault, checkout)
    whole = text = file.read_text()
    for old, new in fault.changes:
        if text.count(old) != 1:
            sys.exit(f"mutants: {fault.name}: {old!r} is {text.count(old)} times in {fault.file}")
        text = text.replace(old, new)
    file.write_text(text)
    yield
    file.write_text(whole)


def first_failure(checkout: Path, tests: str) -> str | None:
    """Of these tests; None if all pass."""
    done = subprocess.run(
        ["scripts/cpu_host.sh", "pytest", "-x", "-q", "-m", "not nightly", tests],
        cwd=checkout,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    lines = done.stdout.splitlines()  # a log's may begin with ERROR, too
    failed = [line for line in lines if line.startswith(("FAILED test/", "ERROR test/"))]
    if done.returncode == 1 and failed:
        return failed[0].partition(" ")[2].partition(" - ")[0]  # parameters may have spaces
    if done.returncode != 0:
        sys.exit(f"mutants: the tests did not run:\n{done.stdout[-4000:]}")
    return None


def caught_by(fault: Mutant, checkout: Path) -> str | None:
    """The first test that fails with the fault, and passes without; None if there is none.

    Raises:
        SystemExit: a test fails without the fault, too.
    """
    with having(fault, checkout):
        each = (first_failure(checkout, f"test/{ring}") for ring in TESTS)
        found = next(filter(None, each), None)
    if found and first_failure(checkout, found):
        sys.exit(f"mutants: {found} fails without a fault, too, and has found none")
    return found


def main(
    only: Annotated[str, typer.Option(help="Of these the faults with WORD in their name.")] = "",
    check: Annotated[
        bool, typer.Option("--check", help="Only see that each fault can be made.")
    ] = False,
) -> None:
    """Exit status 0 if each fault is found."""
    console = Console()
    table = Table("fault", "found by", "seconds", title="Faults in the patch set, one at a time")
    missed = 0
    with tempfile.TemporaryDirectory(prefix="sglang-pd-mutants-") as folder:
        checkout = copied(Path(folder))
        if not check:
            subprocess.run(["scripts/setup.sh"], cwd=checkout, check=True)
        for fault in MUTANTS:
            if only not in fault.name:
                continue
            if check:
                with having(fault, checkout):
                    continue
            start = time.monotonic()
            found = caught_by(fault, checkout)
            missed += found is None
            seconds = f"{time.monotonic() - start:.0f}"
            console.print(f"{fault.name}: {found or 'NOT FOUND'}, {seconds} s")
            table.add_row(fault.name, found or "NOT FOUND", seconds)
    if not check:
        console.print(table)
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    typer.run(main)
