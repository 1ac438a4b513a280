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
# In reading order.
Kind = Literal["mission", "layouts", "hardening"]


class ReleaseStatus(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A patch's status in one engine release.

    what: what remains of the defect, or what the release has itself.
    change, symbols: our edit for that release, if there is one; the symbols are patterns (`*`
    matches anything) of `path::Symbol`, or of a new file's path.
    names: names that others may call and that are removed, moved or called differently.
    """

    state: State
    what: str = ""
    change: str = ""
    symbols: list[str] = []
    names: list[str] = []

    def __post_init__(self) -> None:
        if bool(self.change) != bool(self.symbols):
            raise ValueError("give both `change` and `symbols`, or neither")
        if self.names and not self.symbols:
            raise ValueError("`names` requires `symbols`")
        if self.symbols and self.state == "carried":
            raise ValueError("a carried patch must not have `symbols`")


class PatchRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The record of one patch; a release that is not in `releases` was not examined.

    kind: `mission` is the patch set's purpose, `layouts` other mismatches of prefill's and
    decode's layouts, `hardening` other defects. order: the position within the kind.
    """

    id: str
    title: str
    kind: Kind
    order: int
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
    """The patch set for one engine release.

    tree: our files by path below `sglang/`. fingerprints: those that the engine must have.
    all_patches: patches whose records mention the release, in the records' order, which the
    properties below keep. preview: why not to rely on it yet; empty if the release is supported.
    tested: by package, the versions that the tests have run with.
    """

    name: str
    folder: Path
    tree: dict[str, bytes]
    all_patches: list[Patch]
    fingerprints: Fingerprints
    preview: str
    tested: dict[str, list[str]]

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
    """Returns the releases that have seams, oldest first, including previews."""
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
        raise Refusal(
            ExitCode.UNSUPPORTED,
            f"SGLang {name} is not supported; this patch set supports "
            f"{', '.join(supported_releases(releases))}. Install one of these, or a newer "
            "sglang-pd.",
        )
    folder = releases / name
    about = read_data(folder / "release.toml", _ReleaseManifest)
    tree = read_tree(trees / part for part in about.trees)
    fingerprints = (
        read_data(folder / "fingerprints.json", Fingerprints) if with_fingerprints else {}
    )
    if with_fingerprints and set(fingerprints) != set(tree):
        differ = ", ".join(sorted(set(fingerprints) ^ set(tree)))
        raise Refusal(
            ExitCode.PATCH_SET,
            f"fingerprints of {name} do not match the patch set's files ({differ}): "
            f"run `python -m sglang_pd.patchset.fingerprints --release {name}` on an unmodified "
            "engine",
        )
    all_patches = _patches(name, read_records(releases))
    return Release(name, folder, tree, all_patches, fingerprints, about.preview, about.tested)


def _patches(release: str, records: list[PatchRecord]) -> list[Patch]:
    """Returns the patches whose records mention a release."""
    stands = [(record, record.at(release)) for record in records]
    return [
        Patch(one.id, one.title, one.kind, one.upstream, stand.state, stand.what, stand.symbols)
        for one, stand in stands
        if stand
    ]


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
