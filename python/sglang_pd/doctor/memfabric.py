"""MemFabric: what each release does, and which engines have served requests over it."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Literal

import msgspec

from sglang_pd.doctor.findings import Finding, ok, warning, wrong
from sglang_pd.doctor.host import Host, LaunchOptions
from sglang_pd.doctor.packages import GROUP, version
from sglang_pd.patchset.patches import public_version, read_data, version_key

TRAITS_FILE = Path(__file__).with_name("memfabric.toml")
RUNS_FILE = Path(__file__).with_name("memfabric_runs.json")

Outcome = Literal["right", "fails", "hangs"]
OUTCOME_TEXTS = {"right": "serves", "fails": "fails every request", "hangs": "lets requests hang"}
SEVERITY = list(OUTCOME_TEXTS)


class ReleaseTraits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What some releases do; memfabric.toml explains the fields."""

    releases: list[str]
    session_id: Literal["HOST:PORT", "HOST:PORT_PID"]
    port: Literal["at once", "after `initialize`"]
    store: bool
    again: Literal["accepted", "refused", "not run"]
    start: str

    def has_same_session_ids_as(self, other: "ReleaseTraits") -> bool:
        return (self.session_id, self.port) == (other.session_id, other.port)


class Run(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The outcome of requests to one fleet, whose layouts a stock engine can serve."""

    memfabric: str
    engine: str
    patched: bool  # on both sides
    fleet: str  # its name in the tests
    outcome: Outcome  # `right` if every byte arrived


class CompatibilityTable(msgspec.Struct, frozen=True):
    kinds: list[ReleaseTraits]
    runs: list[Run]

    def kind(self, release: str) -> ReleaseTraits | None:
        """Returns the traits of a release, or of the next older listed one; None without either."""
        older = [
            kind for kind in self.kinds if version_key(kind.releases[0]) <= version_key(release)
        ]
        return older[-1] if release and older else None

    def outcome(self, release: str, engine: str, patched: bool) -> Outcome | None:
        """Returns the worst outcome of the runs; None without a run."""
        return self.tried(engine, patched).get(release)

    def tried(self, engine: str, patched: bool) -> dict[str, Outcome]:
        """Returns {MemFabric release: worst outcome of its runs}, oldest release first."""
        runs = [one for one in self.runs if (one.engine, one.patched) == (engine, patched)]
        runs.sort(key=lambda one: (version_key(one.memfabric), SEVERITY.index(one.outcome)))
        return {one.memfabric: one.outcome for one in runs}

    def expected(self, release: str, engine: str, patched: bool) -> tuple[str, Outcome] | None:
        """Returns a release that was run, and its outcome: this one, or one with like session ids.

        Of several such releases, takes the one with the worst outcome. None if none was run.
        """
        tried, kind = self.tried(engine, patched), self.kind(release)
        if release in tried:
            return release, tried[release]
        alike = [one for one in tried if kind and kind.has_same_session_ids_as(self.kind(one))]
        worst = max(alike, key=lambda one: SEVERITY.index(tried[one]), default=None)
        return (worst, tried[worst]) if worst else None


@cache
def table() -> CompatibilityTable:
    kinds = read_data(TRAITS_FILE, dict[str, list[ReleaseTraits]])["kinds"]
    return CompatibilityTable(kinds, read_data(RUNS_FILE, dict[str, list[Run]])["runs"])


def installed(host: Host) -> str:
    """Returns MemFabric's public release; empty if it is not installed."""
    return public_version(version(host, "memfabric"))


def uses_store(host: Host) -> bool:
    """Whether transfers need the store; True if the release is unknown."""
    kind = table().kind(installed(host))
    return kind is None or kind.store


def check_memfabric(
    host: Host, launch: LaunchOptions, engine: str, patched: bool
) -> Iterator[Finding]:
    """Checks whether the engine serves over the installed MemFabric. engine: its release."""
    found = version(host, "memfabric")
    if launch.backend != "ascend" or not found:
        return
    yield release_finding(table(), found, engine, patched)


def release_finding(table: CompatibilityTable, found: str, engine: str, patched: bool) -> Finding:
    name, engine_name = "memfabric", f"{'patched' if patched else 'stock'} {engine}"
    release = public_version(found)
    expected = table.expected(release, engine, patched)
    if expected is None or (expected[1] == "right" and expected[0] != release):
        tried = ", ".join(table.tried(engine, patched)) or "none"
        advice = (
            f"run `sglang-pd verify` before you rely on it; {engine_name} was tested with: {tried}"
        )
        return warning(GROUP, name, f"{found}, not tested with {engine_name}", advice)
    run, outcome = expected
    if outcome == "right":
        return ok(GROUP, name, f"{found}: {engine_name} serves with it")
    with_what = "with it" if run == release else f"with {run}, whose session ids are similar,"
    text = f"{found}: {with_what} {engine_name} {OUTCOME_TEXTS[outcome]}"
    return wrong(GROUP, name, text, _remedies(table, release, engine, patched))


def _remedies(table: CompatibilityTable, release: str, engine: str, patched: bool) -> str:
    ways = []
    if not patched:
        expected = table.expected(release, engine, True)
        if expected is None or expected[1] == "right":
            ways.append("run `sglang-pd apply`")
    serve = [one for one, got in table.tried(engine, patched).items() if got == "right"]
    if serve:
        ways.append(f"install memfabric-hybrid=={serve[-1]} on all hosts")
    other = "install another release of MemFabric: docs/memfabric.md lists the tested ones"
    return ", or ".join(ways) or other
