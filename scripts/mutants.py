"""Put one fault at a time into the patch set; `scripts/test.sh` must find each.

Run by `scripts/mutants.sh`. Each fault is applied to a copy of the checkout with its own
environments, where the tests run, quick ones first, until one fails. The faults are in
`scripts/mutants/`: those of the tree that all releases share in `shared.toml`, those of a tree in
`python/engines/` in a file of its name, where a release's own also has those of shared files that
only its tests find. A table's name is the file's path below `srt`, and the tests that find its
faults soon, unless these are named after the file. A row is a fault:

    "what is wrong then" = [["old text", "new text"]]
"""

import ast
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tomllib
import typer
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
FAULTS = ROOT / "scripts" / "mutants"
DEFAULT_RELEASE = (ROOT / "scripts" / "default_release").read_text().strip()
SHARED = "sglang"  # the tree that every release has
SUITES = ("unit", "engine", "transport", "harness", "serving")  # the tool's tests do not use it
NOT_COPIED_NAMES = (".git", ".pd-env", "__pycache__", ".ruff_cache", ".pytest_cache", ".hypothesis")
LINKED_FOLDERS = ("packages", "models", "references")


@dataclass(frozen=True)
class Fault:
    """A fault in one file of the patch set.

    Attributes:
        file: Path below `python/`.
        change: (old, new) texts; each old text must occur exactly once.
        first: Tests that find the fault soon, if not those named after the file.
    """

    name: str
    file: str
    change: list[tuple[str, str]]
    first: str = ""

    @property
    def words(self) -> str:
        """The fault's name, file and first tests, in which `--only` looks."""
        return f"{self.name} {self.file} {self.first}"


def faults(release: str) -> list[Fault]:
    """The faults of this release's trees; of trees that it shares only for the default release."""
    engine = tomllib.loads((ROOT / "python" / "engines" / release / "release.toml").read_text())
    found = []
    for tree in engine["trees"]:
        table = "shared" if tree == SHARED else Path(tree).parent.name
        if table != release and release != DEFAULT_RELEASE:
            continue
        for name, rows in tomllib.loads((FAULTS / f"{table}.toml").read_text()).items():
            homes = [f"{home}/srt/{name}" for home in (tree, *reversed(engine["trees"]))]
            file = next((path for path in homes if (ROOT / "python" / path).exists()), homes[0])
            for key, value in rows.items():
                first, changes = (key, value) if isinstance(value, dict) else ("", {key: value})
                found += [Fault(wrong, file, change, first) for wrong, change in changes.items()]
    return found


def copy_checkout(folder: Path, releases: list[str]) -> Path:
    """Copy the checkout, with links to base and each release's packages, models, references."""
    copy = folder / "checkout"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*NOT_COPIED_NAMES), symlinks=True)
    for name in ["base", *(f"{release}/{name}" for release in releases for name in LINKED_FOLDERS)]:
        link = copy / ".pd-env" / name
        link.parent.mkdir(parents=True, exist_ok=True)
        (ROOT / ".pd-env" / name).mkdir(parents=True, exist_ok=True)
        link.symlink_to(ROOT / ".pd-env" / name)
    return copy


@contextlib.contextmanager
def apply_fault(fault: Fault, checkout: Path) -> Iterator[None]:
    """Apply the fault to the checkout within the block.

    Raises:
        SystemExit: an old text does not occur exactly once, or what is left is not Python.
    """
    file = checkout / "python" / fault.file
    whole = text = file.read_text()
    for old, new in fault.change:
        if (count := text.count(old)) != 1:
            sys.exit(f"mutants: {fault.name}: {old!r} occurs {count} times in {fault.file}")
        text = text.replace(old, new)
    try:
        ast.parse(text)
    except SyntaxError as error:
        sys.exit(f"mutants: {fault.name}: {fault.file} is not Python any more: {error}")
    file.write_text(text)
    yield
    file.write_text(whole)


def first_failure(checkout: Path, release: str, tests: str) -> str | None:
    """Run these tests; returns the first that fails, None if all pass.

    Raises:
        SystemExit: the tests did not run.
    """
    done = subprocess.run(
        ["scripts/cpu_host.sh", "--release", release]
        + ["pytest", "-x", "-q", "-m", "not nightly or elsewhere", tests],
        cwd=checkout,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    lines = done.stdout.splitlines()  # a log's lines may begin with ERROR, too
    failed = [line for line in lines if line.startswith(("FAILED test/", "ERROR test/"))]
    if done.returncode == 1 and failed:
        return failed[0].partition(" ")[2].partition(" - ")[0]  # parameters may have spaces
    if done.returncode != 0:
        sys.exit(f"mutants: the tests did not run:\n{done.stdout[-4000:]}")
    return None


def quick_tests(fault: Fault, release: str) -> list[str]:
    """Tests to run first: the fault's, or those named after its file."""
    if fault.first:
        return [fault.first]
    folders = ["test/unit", "test/engine", f"test/engine/v{release.replace('.', '_')}"]
    if release != "0.5.9":
        folders.append("test/engine/from_0_5_18")
    named = [f"{folder}/test_{Path(fault.file).stem}.py" for folder in folders]
    return [name for name in named if (ROOT / name).exists()]


def find_failing_test(fault: Fault, checkout: Path, release: str) -> str | None:
    """The first test that fails with the fault, and passes without it; None if all pass with it.

    Raises:
        SystemExit: that test fails without the fault, too.
    """
    with apply_fault(fault, checkout):
        tests = [*quick_tests(fault, release), *(f"test/{suite}" for suite in SUITES)]
        found = next(filter(None, (first_failure(checkout, release, one) for one in tests)), None)
    if found and first_failure(checkout, release, found):
        sys.exit(f"mutants: {found} fails without the fault, too, so it proves nothing")
    return found


def main(
    releases: Annotated[list[str], typer.Argument(help="Releases of the engine.")],
    only: Annotated[
        str, typer.Option(help="Only faults with WORD in their name, file or tests.")
    ] = "",
    check: Annotated[
        bool, typer.Option("--check", help="Only check that each fault can be applied.")
    ] = False,
) -> None:
    """Run the tests with each fault; exit status 0 if all faults are found."""
    console = Console()
    title = "Faults in the patch set, one at a time"
    table = Table("release", "fault", "found by", "seconds", title=title)
    missed = 0
    chosen = [(name, one) for name in releases for one in faults(name) if only in one.words]
    with tempfile.TemporaryDirectory(prefix="sglang-pd-mutants-") as folder:
        checkout = copy_checkout(Path(folder), releases)
        if not check:
            setup = ["scripts/setup.sh", *(f"--release={release}" for release in releases)]
            subprocess.run(setup, cwd=checkout, check=True)
        for release, fault in chosen:
            if check:
                with apply_fault(fault, checkout):
                    continue
            start = time.monotonic()
            found = find_failing_test(fault, checkout, release)
            missed += found is None
            seconds = f"{time.monotonic() - start:.0f}"
            console.print(f"{release}: {fault.name}: {found or 'NOT FOUND'}, {seconds} s")
            table.add_row(release, fault.name, found or "NOT FOUND", seconds)
    console.print(f"{len(chosen)} faults can be applied" if check else table)
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    typer.run(main)
