"""Which release's patch set is for an engine: by its version, else by the symbols that it has."""

from dataclasses import dataclass

from sglang_pd.errors import Code, Refusal
from sglang_pd.install.engine import Engine
from sglang_pd.install.transaction import Journal, originals, read_journal
from sglang_pd.patchset.patches import Release, load, public, supported, symbol_ids
from sglang_pd.patchset.plan import Drift, plan, stands

SHOWN = 10  # of the drifts that a refusal names


@dataclass(frozen=True)
class Match:
    """A release beside an engine. drifts: where the engine has another text than the release."""

    release: Release
    drifts: list[Drift]

    @property
    def differ(self) -> int:
        return sum(drift.count for drift in self.drifts)

    @property
    def symbols(self) -> int:
        return len(symbol_ids(self.release.fingerprints))


def release_of(engine: Engine) -> Release:
    """The release that the engine says it is, else the one applied to it, else the one it matches.

    A version that no release of ours has is matched by fingerprints: of the symbols that the
    patch set touches none may differ. Raises Refusal UNSUPPORTED with the nearest release.
    """
    journal = read_journal(engine.root)
    names = [public(engine.version or ""), journal.release if journal else ""]
    if known := [name for name in names if name in supported()]:
        return load(known[0])
    nearest = _nearest(engine, journal)
    if nearest.drifts:
        raise _refuse(engine, nearest)
    return nearest.release


def remarks(engine: Engine, release: Release) -> list[str]:
    """What a person should know of this release for this engine."""
    said = []
    if public(engine.version or "") != release.name:
        said.append(
            f"this engine says {engine.version or 'nothing'} of its release; it is taken for "
            f"SGLang {release.name}, of which it has every symbol that the patch set touches"
        )
    if release.preview:
        said.append(f"SGLang {release.name} is a preview: {release.preview}")
    return said


def _nearest(engine: Engine, journal: Journal | None) -> Match:
    """The release of which the smallest part differs, of several the newest."""
    matches = [_match(engine, journal, load(name)) for name in reversed(supported())]
    return min(matches, key=lambda match: match.differ / match.symbols)


def _match(engine: Engine, journal: Journal | None, release: Release) -> Match:
    read = originals(engine.root, journal)
    drifts = [] if not journal and stands(release, read) else plan(release, read)[1]
    return Match(release, drifts)


def _refuse(engine: Engine, nearest: Match) -> Refusal:
    name = f"SGLang {engine.version}" if engine.version else "an SGLang that does not say which"
    lines = [f"  {drift}" for drift in nearest.drifts[:SHOWN]]
    if len(nearest.drifts) > SHOWN:
        lines.append(f"  and {len(nearest.drifts) - SHOWN} more")
    shown = "\n".join(lines)
    return Refusal(
        Code.UNSUPPORTED,
        f"{engine.root}: {name} is not supported; this patch set knows {', '.join(supported())}. "
        f"The nearest is {nearest.release.name}: {nearest.differ} of {nearest.symbols} symbols "
        f"that it touches differ:\n{shown}\n"
        "Nothing was written. Install a release that it knows, or a newer sglang-pd.",
    )
