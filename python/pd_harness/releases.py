"""Which release of the engine is meant, where several are at hand."""

import importlib.metadata
import os
from pathlib import Path

VARIABLE = "SGLANG_PD_RELEASE"
DEFAULT = Path(__file__).resolve().parents[2] / "scripts" / "default_release"


def release() -> str:
    """The engine's that this Python has; without one, what the variable says, or the default.

    A local version (``0.5.9+vendor``) is its public release.
    """
    try:
        return importlib.metadata.version("sglang").partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return chosen_release()


def chosen_release() -> str:
    """What the variable says, or the default."""
    return os.environ.get(VARIABLE) or default_release()


def default_release() -> str:
    """The one that scripts take, and that every run tries most of."""
    return DEFAULT.read_text().strip()
