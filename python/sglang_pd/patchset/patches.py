"""The patch set as data: releases, patch records, fingerprints, and source trees."""

import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

from sglang_pd.errors import ExitCode, Refusal

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PACKAGE = Path(__file__).resolve().parents[1]
# A wheel has the trees inside the package, a checkout beside it.
TREES = PACKAGE / "data" if (PACKAGE / "data").is_dir() else PACKAGE.parent
RELEASES = TREES / "engines"

# {path: {symbol: fingerprint, None for a new symbol}}, {path: None} for a new file
Fingerprints = dict[str, dict[str, str | None] | None]
State = Literal["needed", "in part", "carried"]
# In reading order: the patch set's purpose, other mismatches of layouts, other defects.
Kind = Literal["mission", "layouts", "hardening"]


class ReleaseStatus(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A patch's status in one engine release; `change` and `symbols` are our edit, if any."""

    state: State
    what: str = ""  # remains of the defect, or what the release has itself
    change: str = ""
    symbols: list[str] = []  # patterns (`*` matches anything) of `path::Symbol`, or of new files
    names: list[str] = []  # that others may call and that are removed, moved or called differently
    tests: list[str] = []  # of the engine's own that fail, and what has changed for them

    def __post_init__(self) -> None:
        if bool(self.change) != bool(self.symbols):
            raise ValueError("give both `change` and `symbols`, or neither")
        for name in ("names", "tests"):
            if getattr(self, name) and not self.symbols:
                raise ValueError(f"`{name}` requires `symbols`")
        if self.symbols and self.state == "carried":
            raise ValueError("a carried patch must not have `symbols`")


class PatchRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The record of one patch; a release that is not in `releases` was not examined."""

    id: str
    title: str
    kind: Kind
    order: int  # within the kind
    upstream: str
    symptom: str
    cause: str
    drop_when: str
    releases: dict[str, State | ReleaseStatus]

    def at(self, release: str) -> ReleaseStatus | None:
        found = self.releases.get(release)
        return ReleaseStatus(found) if isinstance(found, str) else found


class Patch(msgspec.Struct, frozen=True):
    """A record for one release. need, what, symbols: its ReleaseStatus (`need` is the state)."""

    id: str
    title: str
    kind: Kind
    upstream: str
    need: State
    what: str
    symbols: list[str]

    def owns(self, symbol: str) -> bool:
        return any(fnmatchcase(symbol, pattern) for pattern in self.symbols)


@dataclass(frozen=True)
class Release:
    """The patch set for one engine release."""

    name: str
    folder: Path
    tree: dict[str, bytes]  # our files by path below `sglang/`
    # Those whose records mention the release, in the records' order, which the properties keep.
    all_patches: list[Patch]
    fingerprints: Fingerprints  # that the engine must have
    preview: str  # why not to rely on it yet; empty if the release is supported
    tested: dict[str, list[str]]  # by package, the versions that the tests have run with

    @property
    def patches(self) -> list[Patch]:
        """Patches for which we have an edit."""
        return [patch for patch in self.all_patches if patch.symbols]

    @property
    def carried(self) -> list[Patch]:
        """Patches that this engine has itself."""
        return [patch for patch in self.all_patches if patch.need == "carried"]

    @property
    def missing(self) -> list[Patch]:
        """Patches that this engine needs and for which we have no edit."""
        return [
            patch for patch in self.all_patches if patch.need != "carried" and not patch.symbols
        ]


def symbol_ids(fingerprints: Fingerprints) -> list[str]:
    """Returns `path::Symbol` of each symbol, and the bare path of each new file."""
    ids = []
    for path, symbols in fingerprints.items():
        ids += [path] if symbols is None else [f"{path}::{name}" for name in symbols]
    return ids


def supported_releases(releases: Path | None = None) -> list[str]:
    """Returns the releases for which there are edits, oldest first, including previews."""
    found = (folder.parent.name for folder in (releases or RELEASES).glob("*/release.toml"))
    return sorted(found, key=version_key)


def version_key(release: str) -> list[int]:
    """Returns a sort key for releases: 0.5.9 comes before 0.5.12.post1."""
    return [int(number) for number in re.findall(r"\d+", release)]


def public_version(version: str) -> str:
    """Returns the public release of a local version (`0.5.9+vendor`)."""
    return version.split("+")[0]


def read_records(releases: Path | None = None) -> list[PatchRecord]:
    """Returns all patch records in order. Raises Refusal PATCH_SET if one is invalid."""
    folder = (releases or RELEASES) / "patches"
    records = [read_data(path, PatchRecord) for path in folder.glob("*.toml")]
    kinds = get_args(Kind)
    return sorted(records, key=lambda one: (kinds.index(one.kind), one.order, one.id))


def load_release(
    name: str,
    releases: Path | None = None,
    trees: Path | None = None,
    with_fingerprints: bool = True,
) -> Release:
    """Loads a release by its name or by a local version of it.

    with_fingerprints: also read the fingerprints (False only while they are being made).
    Raises Refusal UNSUPPORTED for an unknown release, PATCH_SET if it does not fit its tree.
    """
    releases, trees = releases or RELEASES, trees or TREES
    name = public_version(name)
    if name not in supported_releases(releases):
        advice = ". Install one of these, or a newer sglang-pd."
        raise unsupported(f"SGLang {name}", advice, releases)
    folder = releases / name
    about = read_data(folder / "release.toml", _ReleaseManifest)
    tree = read_tree(trees / part for part in about.trees)
    fingerprints = (
        read_data(folder / "fingerprints.json", Fingerprints) if with_fingerprints else {}
    )
    differ = set(fingerprints) ^ set(tree)
    if with_fingerprints and differ:
        raise outdated_fingerprints(f"{name} do not match the patch set's files", differ, name)
    all_patches = [
        Patch(one.id, one.title, one.kind, one.upstream, at.state, at.what, at.symbols)
        for one in read_records(releases)
        if (at := one.at(name))
    ]
    return Release(name, folder, tree, all_patches, fingerprints, about.preview, about.tested)


def unsupported(what: str, advice: str, releases: Path | None = None) -> Refusal:
    """Returns the refusal of a release or an engine, `what`, with a list of those supported."""
    known = ", ".join(supported_releases(releases))
    return Refusal(
        ExitCode.UNSUPPORTED, f"{what} is not supported; this patch set supports {known}{advice}"
    )


def outdated_fingerprints(what: str, differ: Iterable[str], release: str) -> Refusal:
    """Returns the refusal of a patch set whose fingerprints do not match it. differ: the names."""
    return Refusal(
        ExitCode.PATCH_SET,
        f"fingerprints of {what} ({', '.join(sorted(differ))}): run `python -m "
        f"sglang_pd.dev.fingerprints --release {release}` on an unmodified engine",
    )


class _ReleaseManifest(msgspec.Struct, forbid_unknown_fields=True):
    trees: list[str]
    preview: str = ""
    tested: dict[str, list[str]] = {}


def read_data(path: Path, kind: Any) -> Any:
    """Reads a TOML or JSON file as type `kind`. Raises Refusal PATCH_SET, naming file and key."""
    try:
        if path.suffix == ".json":
            return msgspec.json.decode(path.read_bytes(), type=kind)
        return msgspec.convert(tomllib.loads(path.read_text()), kind)
    except (msgspec.MsgspecError, tomllib.TOMLDecodeError) as error:
        raise Refusal(ExitCode.PATCH_SET, f"{path} is invalid: {error}") from error


def read_tree(folders: Iterable[Path]) -> dict[str, bytes]:
    """Returns the folders' Python files by relative path; later folders override earlier ones."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for folder in folders
        for path in sorted(folder.rglob("*.py"))
    }
