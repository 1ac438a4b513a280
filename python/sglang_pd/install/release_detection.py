"""Detects which release's patch set fits an engine: by its version, else by its symbols."""

from dataclasses import dataclass

from sglang_pd.errors import Refusal
from sglang_pd.install.engine import Engine
from sglang_pd.install.transaction import Journal, is_replaced, originals, read_journal
from sglang_pd.patchset.edits import Drift, is_applied, plan
from sglang_pd.patchset.patches import (
    Release,
    load_release,
    public_version,
    supported_releases,
    symbol_ids,
    unsupported,
)

MAX_SHOWN = 10  # drifts that a refusal lists


@dataclass(frozen=True)
class ReleaseMatch:
    """A release compared with an engine. drifts: where the engine's text differs from it."""

    release: Release
    drifts: list[Drift]

    @property
    def differing(self) -> int:
        return sum(drift.count for drift in self.drifts)

    @property
    def symbols(self) -> int:
        return len(symbol_ids(self.release.fingerprints))


def detect_release(engine: Engine) -> Release:
    """Returns the release of the engine's version, else the applied one, else a matching one.

    An unsupported version is matched by fingerprints: none of the symbols that the patch set
    touches may differ. Raises Refusal UNSUPPORTED, which names the nearest release.
    """
    journal = read_journal(engine.root)
    names = [public_version(engine.version or "")]
    if journal and not is_replaced(engine.root, journal):
        names.append(journal.release)
    if known := [name for name in names if name in supported_releases()]:
        return load_release(known[0])
    nearest = _nearest_match(engine, journal)
    if nearest.drifts:
        raise _unsupported_refusal(engine, nearest)
    return nearest.release


def release_notes(engine: Engine, release: Release) -> list[str]:
    """Returns what a user should know about this release for this engine."""
    notes = []
    if public_version(engine.version or "") != release.name:
        notes.append(
            f"the engine's version ({engine.version or 'none'}) is unknown; all patched symbols "
            f"match SGLang {release.name}"
        )
    if release.preview:
        notes.append(f"SGLang {release.name} is a preview: {release.preview}")
    return notes


def _nearest_match(engine: Engine, journal: Journal | None) -> ReleaseMatch:
    """Returns the release with the smallest share of differing symbols, of several the newest."""
    read, matches = originals(engine.root, journal), []
    for release in map(load_release, reversed(supported_releases())):
        is_patched = not journal and is_applied(release, read)
        matches.append(ReleaseMatch(release, [] if is_patched else plan(release, read)[1]))
    return min(matches, key=lambda match: match.differing / match.symbols)


def _unsupported_refusal(engine: Engine, nearest: ReleaseMatch) -> Refusal:
    name = f"SGLang {engine.version}" if engine.version else "an SGLang without a version"
    lines = [f"  {drift}" for drift in nearest.drifts[:MAX_SHOWN]]
    if len(nearest.drifts) > MAX_SHOWN:
        lines.append(f"  and {len(nearest.drifts) - MAX_SHOWN} more")
    shown = "\n".join(lines)
    return unsupported(
        f"{engine.root}: {name}",
        f". The nearest is {nearest.release.name}: {nearest.differing} of {nearest.symbols} "
        f"symbols that it patches differ:\n{shown}\n"
        "Nothing was written. Install a supported release, or a newer sglang-pd.",
    )
