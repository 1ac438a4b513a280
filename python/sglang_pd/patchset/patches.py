"""The patch set as data: releases, patch records, fingerprints, and the trees of sources."""

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
# The wheel carries them inside the package; in a checkout they stand beside it.
TREES = PACKAGE / "data" if (PACKAGE / "data").is_dir() else PACKAGE.parent
RELEASES = TREES / "engines"

# {path: {symbol: fingerprint, None for a new symbol}}, {path: None} for a new file
Fingerprints = dict[str, dict[str, str | None] | None]
State = Literal["needed", "in part", "carried"]
# In the order in which a person reads them.
Kind = Literal["mission", "layouts", "hardening"]


class ReleaseStatus(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a patch stands to one engine release.

    what: of the defect, what is left, or what the release carries itself.
    change, symbols: what we do about it, where we have an edit for that release; the symbols are
    patterns (`*` matches anything) of `path::Symbol`, or of the path of a new file.
    names: what others may call and is gone, is elsewhere or is called in another way.
    """

    state: State
    what: str = ""
    change: str = ""
    symbols: list[str] = []
    names: list[str] = []

    def __post_init__(self) -> None:
        if bool(self.change) != bool(self.symbols):
            raise ValueError("`change` and `symbols` are given together, or neither")
        if self.names and not self.symbols:
            raise ValueError("without `symbols` no `names` can change")
        if self.symbols and self.state == "carried":
            raise ValueError("what the engine carries whole has no `symbols` of ours")


class PatchRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The record of one patch, for all releases; one that is not in `releases` was not examined.

    kind: `mission` is what the patch set is for, `layouts` what else keeps prefill's and decode's
    layouts from fitting, `hardening` what goes wrong besides. order: of those of a kind.
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
    """A record as one release has it. need: the state in Stand; what, symbols: as there."""

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
    """What the patch set is for one engine release.

    tree: our files by their path below `sglang/`. fingerprints: what the engine must hold for them.
    every: all patches whose records speak of it, in the records' order, as the parts below are.
    preview: why it is none to rely on yet; empty for a supported one.
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
        """Those that we have an edit for."""
        return [patch for patch in self.all_patches if patch.symbols]

    @property
    def carried(self) -> list[Patch]:
        """Those that this engine has itself."""
        return [patch for patch in self.all_patches if patch.need == "carried"]

    @property
    def missing(self) -> list[Patch]:
        """Those that it needs, and we have not."""
        return [
            patch for patch in self.all_patches if patch.need != "carried" and not patch.symbols
        ]


def symbol_ids(fingerprints: Fingerprints) -> list[str]:
    """`path::Symbol` of each symbol, the bare path of each new file."""
    ids = []
    for path, symbols in fingerprints.items():
        ids += [path] if symbols is None else [f"{path}::{name}" for name in symbols]
    return ids


def supported_releases(releases: Path | None = None) -> list[str]:
    """The releases that there are seams for, oldest first, previews among them."""
    found = (folder.parent.name for folder in (releases or RELEASES).glob("*/release.toml"))
    return sorted(found, key=version_key)


def version_key(release: str) -> list[int]:
    """Sorts releases: 0.5.9 before 0.5.12.post1."""
    return [int(number) for number in re.findall(r"\d+", release)]


def public_version(version: str) -> str:
    """A local version (`0.5.9+vendor`) is its public release."""
    return version.split("+")[0]


def read_records(releases: Path | None = None) -> list[PatchRecord]:
    """All patch records, in their order. Raises Refusal PATCH_SET where one is not right."""
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
    """Reads a release, given by its name or a local version of it.

    with_fingerprints: also read the fingerprints (False only while they are being made).
    Raises Refusal UNSUPPORTED for an unknown release, PATCH_SET if it does not fit its tree.
    """
    releases, trees = releases or RELEASES, trees or TREES
    name = public_version(name)
    if name not in supported_releases(releases):
        raise Refusal(
            ExitCode.UNSUPPORTED,
            f"SGLang {name} is not supported; this patch set knows "
            f"{', '.join(supported_releases(releases))}. Install one of these, or a newer sglang-pd.",
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
            f"fingerprints of {name} do not fit the patch set's files ({differ}): "
            f"run `python -m sglang_pd.patchset.fingerprints --release {name}` on an unmodified "
            "engine",
        )
    all_patches = _patches(name, read_records(releases))
    return Release(name, folder, tree, all_patches, fingerprints, about.preview, about.tested)


def _patches(release: str, records: list[PatchRecord]) -> list[Patch]:
    """The records that speak of a release."""
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
    """A TOML or JSON file as this type. Raises Refusal PATCH_SET, naming the file and the key."""
    try:
        if path.suffix == ".json":
            return msgspec.json.decode(path.read_bytes(), type=kind)
        return msgspec.convert(tomllib.loads(path.read_text()), kind)
    except (msgspec.MsgspecError, tomllib.TOMLDecodeError) as error:
        raise Refusal(ExitCode.PATCH_SET, f"{path} is not as it must be: {error}") from error


def read_tree(folders: Iterable[Path]) -> dict[str, bytes]:
    """Every Python file of the folders by relative path; of two, the later folder's."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for folder in folders
        for path in sorted(folder.rglob("*.py"))
    }
