"""The patch set as data: releases, patch records, fingerprints, and the trees of sources."""

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import msgspec

from sglang_pd.errors import Code, Refusal

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PACKAGE = Path(__file__).resolve().parents[1]
# The wheel carries them inside the package; in a checkout they stand beside it.
TREES = PACKAGE / "data" if (PACKAGE / "data").is_dir() else PACKAGE.parent
RELEASES = TREES / "engines"

# {path: {symbol: fingerprint, None for a new symbol}}, {path: None} for a new file
Fingerprints = dict[str, dict[str, str | None] | None]


class Patch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The record of one patch.

    symbols: patterns (`*` matches anything) of `path::Symbol`, or of the path of a new file.
    names: what others may call and is gone, is elsewhere or is called in another way.
    """

    id: str
    title: str
    upstream: str
    symptom: str
    cause: str
    change: str
    carried_by: str
    drop_when: str
    symbols: list[str]
    names: list[str] = []

    def owns(self, symbol: str) -> bool:
        return any(fnmatchcase(symbol, pattern) for pattern in self.symbols)


@dataclass(frozen=True)
class Release:
    """What the patch set is for one engine release.

    tree: our files by their path below `sglang/`. fingerprints: what the engine must hold for them.
    """

    name: str
    folder: Path
    tree: dict[str, bytes]
    patches: list[Patch]
    fingerprints: Fingerprints


def symbol_ids(fingerprints: Fingerprints) -> list[str]:
    """`path::Symbol` of each symbol, the bare path of each new file."""
    ids = []
    for path, symbols in fingerprints.items():
        ids += [path] if symbols is None else [f"{path}::{name}" for name in symbols]
    return ids


def supported(releases: Path | None = None) -> list[str]:
    return sorted(folder.parent.name for folder in (releases or RELEASES).glob("*/release.toml"))


def load(
    name: str,
    releases: Path | None = None,
    trees: Path | None = None,
    with_fingerprints: bool = True,
) -> Release:
    """Reads a release; a local version (`0.5.9+vendor`) is its public release.

    with_fingerprints: also read the fingerprints (False only while they are being made).
    Raises Refusal UNSUPPORTED for an unknown release, PATCH_SET if it does not fit its tree.
    """
    releases, trees = releases or RELEASES, trees or TREES
    public = name.split("+")[0]
    if public not in supported(releases):
        raise Refusal(
            Code.UNSUPPORTED,
            f"SGLang {name} is not supported; this patch set knows "
            f"{', '.join(supported(releases))}. Install one of these, or a newer sglang-pd.",
        )
    folder = releases / public
    names = _read(folder / "release.toml", _Trees).trees
    tree = read_tree(trees / part for part in names)
    patches = [_read(path, Patch) for path in sorted((folder / "patches").glob("*.toml"))]
    fingerprints = _read(folder / "fingerprints.json", Fingerprints) if with_fingerprints else {}
    if with_fingerprints and set(fingerprints) != set(tree):
        differ = ", ".join(sorted(set(fingerprints) ^ set(tree)))
        raise Refusal(
            Code.PATCH_SET,
            f"fingerprints of {public} do not fit the patch set's files ({differ}): "
            f"run `python -m sglang_pd.patchset.fingerprints --release {public}` on an unmodified "
            "engine",
        )
    return Release(public, folder, tree, patches, fingerprints)


class _Trees(msgspec.Struct, forbid_unknown_fields=True):
    trees: list[str]


def _read(path: Path, kind: Any) -> Any:
    """A TOML or JSON file as this type. Raises Refusal PATCH_SET, naming the file and the key."""
    try:
        if path.suffix == ".json":
            return msgspec.json.decode(path.read_bytes(), type=kind)
        return msgspec.convert(tomllib.loads(path.read_text()), kind)
    except (msgspec.MsgspecError, tomllib.TOMLDecodeError) as error:
        raise Refusal(Code.PATCH_SET, f"{path} is not as it must be: {error}") from error


def read_tree(folders: Iterable[Path]) -> dict[str, bytes]:
    """Every Python file of the folders by relative path; of two, the later folder's."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for folder in folders
        for path in sorted(folder.rglob("*.py"))
    }
