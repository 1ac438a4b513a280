"""Finds the engine and its release, without importing it."""

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import Distribution, PackagePath, distributions
from pathlib import Path

from sglang_pd.errors import ExitCode, Refusal

CHECKOUT_PREFIX = "python/sglang/"


@dataclass(frozen=True)
class Engine:
    """An engine, installed or a checkout."""

    root: Path  # the folder `sglang/`
    version: str | None  # None if unknown
    dist_record: Path | None  # its RECORD, if installed

    def prefix(self) -> str:
        """Returns the engine's folder relative to where its diff applies, with a final slash."""
        is_checkout = (
            self.root.parent.name == "python" and (self.root.parent.parent / ".git").exists()
        )
        return CHECKOUT_PREFIX if is_checkout else "sglang/"


def find_engine(path: Path | None = None, release: str | None = None) -> Engine:
    """Finds the engine at `path` (`sglang/`, site-packages or a checkout), else the importable one.

    release: overrides the engine's version. Raises Refusal NO_ENGINE.
    """
    root = find_root(path)
    installed = _distribution(root)
    files = installed.files if installed else []
    dist_record = next((Path(file.locate()) for file in files if file.name == "RECORD"), None)
    return Engine(root, release or _version(root, installed), dist_record)


def _is_engine(folder: Path) -> bool:
    # Our own sources are in a `sglang/` folder, too, but without `__init__.py`.
    return (folder / "__init__.py").is_file() and (folder / "srt").is_dir()


def find_root(path: Path | None = None) -> Path:
    """Finds the engine's folder only, as `find_engine`."""
    below = [path, path / "sglang", path / "python" / "sglang"] if path else []
    for folder in below or _package_folders():
        if _is_engine(folder):
            return folder.resolve()
    if path:
        text = (
            f"no SGLang at {path}: none of {', '.join(map(str, below))} has `__init__.py` and "
            "`srt/`. Pass the `sglang/` folder, the site-packages folder that contains it, or a "
            "checkout as --engine"
        )
    else:
        text = (
            f"no SGLang that {sys.executable} can import. Run sglang-pd with the Python that runs "
            "the engine, or pass the engine's folder as --engine"
        )
    raise Refusal(ExitCode.NO_ENGINE, text)


def _package_folders() -> Iterator[Path]:
    """Yields where each import finder has `sglang`; a namespace folder must not hide an engine."""
    for finder in sys.meta_path:
        find_spec = getattr(finder, "find_spec", None)
        spec = find_spec("sglang", None) if find_spec else None
        if spec and spec.origin:
            yield Path(spec.origin).parent


def _distribution(root: Path) -> Distribution | None:
    """Returns the distribution that installed this folder; None for a checkout."""
    for one in distributions(path=[str(root.parent)]):
        # A fork's name may have a suffix; others are skipped, for they may have thousands of files.
        ours = (one.metadata["Name"] or "").startswith("sglang")
        if ours and PackagePath(root.name, "__init__.py") in (one.files or ()):
            return one
    return None


def _version(root: Path, installed: Distribution | None) -> str | None:
    for name in ("_version.py", "version.py"):
        if (root / name).is_file() and (version := _literal(root / name)):
            return version
    return installed.version if installed else None


def _literal(path: Path) -> str | None:
    """Returns the constant that a module's top level assigns to `__version__`; None without it."""
    for node in ast.parse(path.read_bytes()).body:
        if not (isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)):
            continue
        if "__version__" in [getattr(target, "id", None) for target in node.targets]:
            return str(node.value.value)
    return None
