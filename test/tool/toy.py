"""A toy engine with a patch set, and helpers for tests that use them."""

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from sglang_pd.dev import fingerprints
from sglang_pd.errors import ExitCode, Refusal
from sglang_pd.install import dist_record, operations
from sglang_pd.install.engine import Engine, find_engine
from sglang_pd.patchset import patches
from sglang_pd.patchset.edits import Edit

ROOT = Path(__file__).resolve().parents[2]

VERSION = "9.9"

# What our wheel is made of.
WHEEL_SOURCES = {"pyproject.toml", "hatch_build.py", "LICENSE", "README.md", "python"}

ENGINE = {
    "__init__.py": "",
    "version.py": f'__version__ = "{VERSION}"\n',
    "srt/__init__.py": "",
    "srt/pool.py": '''\
"""Pools."""

import os
from typing import List

SIZE = 4


class Pool(object):
    """Holds pages."""

    pages: int = SIZE

    # How many bytes.
    def nbytes(self):
        return self.pages  * 3

    def free(self): return None


def make(n):  # keeps   its odd spacing
    return [ Pool() for _ in range(n) ]
''',
    "srt/net/__init__.py": "",
    "srt/net/conn.py": "def send(x):\n    return x\n\n\ndef receive():\n    return None\n",
    "srt/net/other.py": "UNTOUCHED = True\n",
}

TREE = {
    "srt/pool.py": '''\
"""Ours."""

from typing import Dict

from sglang.srt.layout import describe


class Pool:
    width: int = 2

    def nbytes(self):
        """Bytes of all pages."""
        return describe(self.pages * self.width)


TABLE: Dict[str, int] = {}
''',
    "srt/net/conn.py": "def send(x):\n    return [x]\n",
    "srt/net/plan.py": "PLAN = 1\n",
    "srt/layout/__init__.py": "def describe(x):\n    return x\n",
    "srt/layout/deep/more.py": "MORE = 2\n",
}

RECORDS = {
    "pools": ["srt/pool.py::*", "srt/layout/*"],
    "net": ["srt/net/conn.py::send", "srt/net/plan.py"],
}


@dataclass(frozen=True)
class Toy:
    """An engine with a patch set.

    Attributes:
        site: The engine's site-packages folder.
        releases: The patch set's folder of releases and patch records.
        trees: The patch set's folder of patch trees.
        version: The engine's release.
    """

    site: Path
    releases: Path
    trees: Path
    version: str = VERSION

    @classmethod
    def make(cls, folder: Path) -> "Toy":
        toy = cls(folder / "site", folder / "releases", folder / "trees")
        for path, text in ENGINE.items():
            write(toy.root / path, text)
        (toy.root / "srt" / "pool.py").chmod(0o640)
        os.utime(toy.root / "srt" / "pool.py", (1_500_000_000, 1_500_000_000))
        toy.write_record()
        for path, text in TREE.items():
            write(toy.trees / "sglang" / path, text)
        write(toy.releases / VERSION / "release.toml", 'trees = ["sglang"]\n')
        for name, symbols in RECORDS.items():
            toy.write_patch(
                name,
                f'[releases."{VERSION}"]\nstate = "needed"\nchange = "change of {name}"\n'
                f"symbols = {json.dumps(symbols)}\n",
            )
        toy.make_fingerprints()
        return toy

    @classmethod
    def from_published(cls, published: Path, version: str, site: Path) -> "Toy":
        """Copies what the patch set changes in a published engine, and what names its version.

        RECORD keeps the rows of the copied files: to read the other 5,000 takes longest.
        """
        made = cls(site, patches.RELEASES, patches.TREES, version)
        for path in ("__init__.py", "version.py", "_version.py", *made.release().tree):
            if (source := published / "sglang" / path).exists():
                (made.root / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, made.root / path)
        for info in published.glob("sglang-*.dist-info"):
            shutil.copytree(info, site / info.name)
        for record in site.glob("*/RECORD"):
            rows = record.read_text().splitlines(keepends=True)
            record.write_text("".join(row for row in rows if (site / row.split(",")[0]).exists()))
        return made

    def copy(self, folder: Path) -> "Toy":
        shutil.copytree(self.site.parent, folder)
        return Toy(folder / "site", folder / "releases", folder / "trees")

    def branch(self, folder: Path) -> "Toy":
        """Copies the engine, but not its patch set, to `folder`."""
        shutil.copytree(self.site, folder)
        return replace(self, site=folder)

    def as_checkout(self, folder: Path) -> "Toy":
        """Moves the engine into a new git checkout, of one commit."""
        (folder / "python").mkdir(parents=True)
        self.root.rename(folder / "python/sglang")
        git(folder, "init", "-q")
        commit_all(folder)
        return replace(self, site=folder / "python")

    @property
    def root(self) -> Path:
        return self.site / "sglang"

    @property
    def dist_record(self) -> Path:
        return self.site / f"sglang-{VERSION}.dist-info" / "RECORD"

    def write_record(self) -> None:
        info = self.dist_record.parent.name
        write(self.dist_record.with_name("METADATA"), f"Name: sglang\nVersion: {VERSION}\n")
        rows = [
            dist_record.record_entry(str(path.relative_to(self.site)), path.read_bytes())
            for path in sorted(self.root.rglob("*.py"))
        ]
        rows += [f"{info}/METADATA,,", f"{info}/RECORD,,"]
        write(self.dist_record, "\n".join(rows) + "\n")

    def write_patch(self, name: str, releases: str, kind: str = "mission", order: int = 0) -> None:
        """Writes a patch record; `releases` is the TOML of its release tables."""
        fields = ("title", "symptom", "cause", "drop_when")
        text = "".join(f'{field} = "{field} of {name}"\n' for field in fields)
        text += f'id = "{name}"\nkind = "{kind}"\norder = {order}\nupstream = "none"\n{releases}'
        write(self.releases / "patches" / f"{name}.toml", text)

    def pin(self, release: Path, path: str, symbol: str, digest: str | None) -> None:
        """Makes a release expect `digest` for a symbol; None: expect the symbol to be absent."""
        file = release / "fingerprints.json"
        known = json.loads(file.read_text())
        known[path][symbol] = digest
        file.write_text(json.dumps(known))

    def make_fingerprints(self) -> None:
        release = patches.load_release(VERSION, self.releases, self.trees, with_fingerprints=False)
        target = release.folder / "fingerprints.json"
        target.write_text(json.dumps(fingerprints.make_fingerprints(self.engine(), release)))

    def engine(self) -> Engine:
        return find_engine(self.site)

    def release(self) -> patches.Release:
        return patches.load_release(self.version, self.releases, self.trees)

    def apply(self, **options) -> list[Edit]:
        return operations.apply(self.engine(), self.release(), **options)

    def revert(self) -> bool:
        return operations.revert(self.engine())

    def status(self) -> operations.Status:
        return operations.status(self.engine(), self.release())

    def snapshot(self) -> dict:
        return snapshot(self.site)

    def assert_refused(self, work: Callable, code: ExitCode, *words: str) -> Refusal:
        """Checks that `work(self)` raises a Refusal with this code and text and changes nothing."""
        before = self.snapshot()
        with pytest.raises(Refusal) as error:
            work(self)
        assert error.value.code == code
        for word in words:
            assert word in str(error.value)
        assert self.snapshot() == before
        return error.value


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def git(folder: Path, *words: str) -> str:
    """Runs git in a folder; returns what it prints."""
    who = ("-c", "user.name=t", "-c", "user.email=t@example.org")
    ran = subprocess.run(["git", *who, *words], cwd=folder, capture_output=True, text=True)
    assert ran.returncode == 0, (words, ran.stderr)
    return ran.stdout


def commit_all(folder: Path) -> None:
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "engine")


def install_package(site: Path, name: str, version: str) -> None:
    """Writes a distribution's metadata."""
    text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    write(site / f"{name}-{version}.dist-info" / "METADATA", text)


def snapshot(folder: Path) -> dict:
    """Every entry below a folder: its mode, and a file's bytes and modification time."""
    found = {}
    for path in sorted(folder.rglob("*")):
        stat = path.lstat()
        file = (path.read_bytes(), stat.st_mtime_ns) if path.is_file() else (None, None)
        found[str(path.relative_to(folder))] = (oct(stat.st_mode), *file)
    return found


def start_forked(work: Callable[[], int]) -> int:
    """Runs `work` in a child process, which exits with its result; returns the process id."""
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            code = work()
        finally:
            os._exit(code)
    return pid


def wait_forked(pid: int) -> int:
    """Returns a child process's exit code, negative if a signal killed it."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
