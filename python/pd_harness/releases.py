"""The engine release that the harness works with."""

import importlib.metadata
import os
from functools import cache
from pathlib import Path

RELEASE_VARIABLE = "SGLANG_PD_RELEASE"
DEFAULT_RELEASE_FILE = Path(__file__).resolve().parents[2] / "scripts" / "default_release"


def release() -> str:
    """The supported release that this Python's engine counts as.

    Without an engine it is `chosen_release`.
    """
    return installed_release() or chosen_release()


@cache  # tests ask a thousand times while they are collected
def installed_release() -> str | None:
    """The supported release that this Python's engine counts as; None without such an engine."""
    try:
        return known_release_for(importlib.metadata.version("sglang"))
    except importlib.metadata.PackageNotFoundError:
        return None


def known_release_for(version: str) -> str | None:
    """The newest supported release that is not later: 0.5.9 for ``0.5.9.post1``, ``0.5.9+acme``.

    A version built from a commit names the next release (``0.5.24.dev3``). Returns None if all
    releases are later, as for ``0.0.0``.
    """
    # Imported here because set-up imports this module before the tool's dependencies exist.
    from sglang_pd.patchset.patches import public_version, supported_releases, version_key

    earlier = [
        known
        for known in supported_releases()
        if version_key(known) <= version_key(public_version(version))
    ]
    return earlier[-1] if earlier else None


def chosen_release() -> str:
    """The release that ``SGLANG_PD_RELEASE`` names, or the default."""
    return os.environ.get(RELEASE_VARIABLE) or default_release()


def default_release() -> str:
    """The release that scripts use by default, and that every test run covers most."""
    return DEFAULT_RELEASE_FILE.read_text().strip()
