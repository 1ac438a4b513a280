"""The host under check, and the server to be launched there."""

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
    """Returns, in one line, why this Python cannot import a module; empty if it can."""
    command = [sys.executable, "-c", f"import {module}"]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=IMPORT_SECONDS)
    except subprocess.TimeoutExpired:
        return f"the import takes more than {IMPORT_SECONDS} s"
    lines = ran.stderr.strip().splitlines()
    return (lines[-1] if lines else f"exit code {ran.returncode}") if ran.returncode else ""


@dataclass(frozen=True)
class Host:
    """A machine or an image."""

    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    root: Path = Path("/")  # the folder with its /proc, /sys and /dev
    folders: Sequence[str] = field(default_factory=lambda: sys.path)  # of its Python's packages
    import_error: Callable[[str], str] | None = import_error  # None: imports cannot be tried

    def path(self, name: str) -> Path:
        """Returns the path, below `root`, of an absolute name on the host."""
        return self.root / name.lstrip("/")

    def text(self, name: str) -> str:
        """Returns a file's text; empty if the file cannot be read."""
        try:
            return self.path(name).read_text(errors="replace")
        except OSError:
            return ""

    def names(self, folder: str) -> list[str]:
        """Returns a folder's entries, sorted; empty if the folder cannot be read."""
        try:
            return sorted(os.listdir(self.path(folder)))
        except OSError:
            return []

    def versions(self, *packages: str) -> dict[str, str]:
        """Returns {name: version} of those installed; names must be normalized."""
        return {name: self._installed[name] for name in packages if name in self._installed}

    @cached_property
    def _installed(self) -> dict[str, str]:
        found: dict[str, str] = {}
        for one in distributions(path=list(self.folders)):
            name = re.sub(r"[-_.]+", "-", one.metadata["Name"] or "").lower()
            found.setdefault(name, one.version)
        return found


@dataclass(frozen=True)
class LaunchOptions:
    """The server to be launched."""

    role: str  # `prefill`, `decode`, or empty for either
    backend: str  # `nixl`, `mooncake` or `ascend`
    port: int
    bootstrap_port: int  # of prefill's bootstrap server
    in_image: bool = False  # skips what only a host has: devices, limits, ports, variables
    nodes: int = 1
