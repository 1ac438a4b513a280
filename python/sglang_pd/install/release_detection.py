"""Which release's patch set is for an engine: by its version, else by the symbols that it has."""

from dataclasses import dataclass

from sglang_pd.errors import ExitCode, Refusal
from sglang_pd.install.engine import Engine
from sglang_pd.install.transaction import Journal, originals, read_journal
from sglang_pd.patchset.edits import Drift, is_applied, plan
from sglang_pd.patchset.patches import (
    Release,
    load_release,
    public_version,
    supported_releases,
    symbol_ids,
)

MAX_SHOWN = 10  # of the drifts that a refusal names


@dataclass(frozen=True)
class ReleaseMatch:
    """A release beside an engine. drifts: where the engine has another text than the release."""

    release: Release
    drifts: list[Drift]

    @property
    def differing(self) -> int:
        return sum(drift.count for drift in self.drifts)

    @property
    def symbols(self) -> int:
        return len(symbol_ids(self.release.fingerprints))


def detect_release(engine: Engine) -> Release:
    """The release that the engine says it is, else the one applied to it, else the one it matches.

    A version that no release of ours has is matched by fingerprints: of the symbols that the
    patch set touches none may differ. Raises Refusal UNSUPPORTED with the nearest release.
    """
    journal = read_journal(engine.root)
    names = [public_version(engine.version or ""), journal.release if journal else ""]
    if known := [name for name in names if name in supported_releases()]:
        return load_release(known[0])
    nearest = _nearest_match(engine, journal)
    if nearest.drifts:
        raise _unsupported_refusal(engine, nearest)
    return nearest.release


def release_notes(engine: Engine, release: Release) -> list[str]:
    """What a person should know of this release for this engine."""
    notes = []
    if public_version(engine.version or "") != release.name:
        notes.append(
            f"this engine says {engine.version or 'nothing'} of its release; it is taken for "
            f"SGLang {release.name}, of which it has every symbol that the patch set touches"
        )
    if release.preview:
        notes.append(f"SGLang {release.name} is a preview: {release.preview}")
    return notes


def _nearest_match(engine: Engine, journal: Journal | None) -> ReleaseMatch:
    """The release of which the smallest part differs, of several the newest."""
    matches = [
        _match(engine, journal, load_release(name)) for name in reversed(supported_releases())
    ]
    return min(matches, key=lambda match: match.differing / match.symbols)


def _match(engine: Engine, journal: Journal | None, release: Release) -> ReleaseMatch:
    read = originals(engine.root, journal)
    drifts = [] if not journal and is_applied(release, read) else plan(release, read)[1]
    return ReleaseMatch(release, drifts)


def _unsupported_refusal(engine: Engine, nearest: ReleaseMatch) -> Refusal:
    name = f"SGLang {engine.version}" if engine.version else "an SGLang that does not say which"
    lines = [f"  {drift}" for drift in nearest.drifts[:MAX_SHOWN]]
    if len(nearest.drifts) > MAX_SHOWN:
        lines.append(f"  and {len(nearest.drifts) - MAX_SHOWN} more")
    shown = "\n".join(lines)
    return Refusal(
        ExitCode.UNSUPPORTED,
        f"{engine.root}: {name} is not supported; this patch set knows {', '.join(supported_releases())}. "
        f"The nearest is {nearest.release.name}: {nearest.differing} of {nearest.symbols} symbols "
        f"that it touches differ:\n{shown}\n"
        "Nothing was written. Install a release that it knows, or a newer sglang-pd.",
    )
