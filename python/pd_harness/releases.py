"""Which release of the engine is meant, where several are at hand."""

import importlib.metadata
import os
from pathlib import Path

RELEASE_VARIABLE = "SGLANG_PD_RELEASE"
DEFAULT_RELEASE_FILE = Path(__file__).resolve().parents[2] / "scripts" / "default_release"


def release() -> str:
    """The release that the engine of this Python is taken for, of those that we know.

    Without an engine, what the variable says, or the default.
    """
    try:
        version = importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return chosen_release()
    return known_release_for(version) or chosen_release()


def known_release_for(version: str) -> str | None:
    """The newest release that is not later: 0.5.9 for ``0.5.9.post1``, ``0.5.9+acme``.

    A version that is made of a commit names the release to come (``0.5.24.dev3``). None where all
    releases are later, as for ``0.0.0``.
    """
    # Not above: set-up reads this file, and runs before what the tool needs is installed.
    from sglang_pd.patchset.patches import public_version, supported_releases, version_key

    earlier = [
        known
        for known in supported_releases()
        if version_key(known) <= version_key(public_version(version))
    ]
    return earlier[-1] if earlier else None


def chosen_release() -> str:
    """What the variable says, or the default."""
    return os.environ.get(RELEASE_VARIABLE) or default_release()


def default_release() -> str:
    """The one that scripts take, and that every run tries most of."""
    return DEFAULT_RELEASE_FILE.read_text().strip()
