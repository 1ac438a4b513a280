"""Helpers of all set-up steps: paths, logging, and running commands."""

import hashlib
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "python"))

PD_ENV = ROOT / ".pd-env"
BASE = PD_ENV / "base"
REQUIREMENTS = ROOT / "scripts" / "requirements"


def log(text: str) -> None:
    print(f"setup: {text}", file=sys.stderr, flush=True)


@contextmanager
def step(title: str) -> Iterator[None]:
    """Log a step's start, and its duration at the end."""
    log(f"{title} ...")
    start = time.monotonic()
    yield
    log(f"{title}: done, {time.monotonic() - start:.0f} s")


def run(*command: str | Path, quiet: bool = False) -> None:
    """Run a command and show its output; with ``quiet`` only if it fails.

    Raises:
        SystemExit: the command failed.
    """
    words = [str(word) for word in command]
    shown = subprocess.PIPE if quiet else sys.stderr
    done = subprocess.run(words, stdout=shown, stderr=subprocess.STDOUT if quiet else None)
    if done.returncode != 0:
        sys.stderr.write((done.stdout or b"").decode(errors="replace"))
        sys.exit(
            f"setup: this command failed (status {done.returncode}): {shlex.join(words)}\n"
            "setup: see its output above; run this script again to resume"
        )


def uv_install(python: Path, *what: str | Path) -> None:
    """Install packages for a Python, without their dependencies."""
    run(BASE / "bin" / "uv", "pip", "install", "--python", python, "--no-deps", *what)


def digest(*paths: Path, text: str = "") -> str:
    """A hash of ``text`` and of the names and bytes of all files at or below ``paths``."""
    state = hashlib.sha256(text.encode())
    for path in paths:
        files = [path] if path.is_file() else sorted(path.rglob("*"))
        for file in files:
            if file.is_file() and "__pycache__" not in file.parts:
                data = file.read_bytes()
                state.update(f"{file.relative_to(ROOT)}\0{len(data)}\0".encode() + data)
    return state.hexdigest()
