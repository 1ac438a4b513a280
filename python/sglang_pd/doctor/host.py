"""What the checks look at: a host, and the server that is to be launched there."""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import distributions
from pathlib import Path

IMPORT_SECONDS = 120


def import_error(module: str) -> str:
    """Why this Python cannot import a module, in one line; empty if it can."""
    command = [sys.executable, "-c", f"import {module}"]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=IMPORT_SECONDS)
    except subprocess.TimeoutExpired:
        return f"it takes more than {IMPORT_SECONDS} s"
    lines = ran.stderr.strip().splitlines()
    return (lines[-1] if lines else f"exit code {ran.returncode}") if ran.returncode else ""


@dataclass(frozen=True)
class Host:
    """A machine or an image.

    environ: its variables. root: where its /proc, /sys and /dev are. folders: where its Python
    looks for packages. import_error: of a module, see there; None if it cannot be tried.
    """

    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    root: Path = Path("/")
    folders: Sequence[str] = field(default_factory=lambda: sys.path)
    import_error: Callable[[str], str] | None = import_error

    def path(self, name: str) -> Path:
        """Of an absolute name on the host."""
        return self.root / name.lstrip("/")

    def text(self, name: str) -> str:
        """What a file says; nothing where there is none that can be read."""
        try:
            return self.path(name).read_text(errors="replace")
        except OSError:
            return ""

    def names(self, folder: str) -> list[str]:
        """The entries of a folder; none where there is no such folder."""
        try:
            return sorted(os.listdir(self.path(folder)))
        except OSError:
            return []

    def versions(self, *packages: str) -> dict[str, str]:
        """Version by name of those packages that are installed; names as `_normalized_name` has them."""
        return {name: self._installed[name] for name in packages if name in self._installed}

    @cached_property
    def _installed(self) -> dict[str, str]:
        found: dict[str, str] = {}
        for one in distributions(path=list(self.folders)):
            found.setdefault(_normalized_name(one.metadata["Name"] or ""), one.version)
        return found


def _normalized_name(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@dataclass(frozen=True)
class LaunchOptions:
    """The server that is meant.

    role: `prefill`, `decode`, or empty for either. backend: `nixl`, `mooncake` or `ascend`.
    port: the server's. bootstrap_port: of prefill's bootstrap server. in_image: what only the
    host has (devices, limits, ports, variables) is not looked at. nodes: that the server has.
    """

    role: str
    backend: str
    port: int
    bootstrap_port: int
    in_image: bool = False
    nodes: int = 1
