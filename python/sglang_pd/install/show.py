"""Shows an engine's status, whole or of one patch, as text or as JSON."""

from itertools import groupby

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sglang_pd import __version__
from sglang_pd.install.engine import Engine
from sglang_pd.install.operations import Status
from sglang_pd.patchset.patches import Patch, PatchRecord, Release

COLOURS = {
    "applied": "green",
    "absent": "dim",
    "half-applied": "yellow",
    "outdated": "yellow",
    "drifted": "red",
    "carried": "blue",
    "missing": "yellow",
}
KINDS = {
    "mission": "mission",
    "layouts": "other layouts",
    "hardening": "hardening",
}


def as_json(engine: Engine, release: Release, status: Status) -> dict:
    """Returns the status, with the states of every patch and of its symbols."""
    return {
        "tool": __version__,
        "engine": _engine(engine, release),
        "state": status.state,
        "patches": [
            {**_patch(patch), "state": state, "symbols": _symbols(patch, status)}
            for patch, state in status.patches
        ],
        "carried": [_patch(patch) for patch in release.carried],
        "missing": [_patch(patch) for patch in release.missing],
        "preview": release.preview or None,
        "edited": status.edited,
        "drifts": [str(drift) for drift in status.drifts],
        "notes": status.notes,
    }


def show(engine: Engine, release: Release, status: Status, console: Console) -> None:
    """Prints a table in the records' order, then edited files, drifts and notes."""
    console.print(_heading(engine, release).append(status.state, COLOURS[status.state]))
    states = {patch.id: Text(state, COLOURS[state]) for patch, state in status.patches}
    for patch in release.carried:
        states[patch.id] = Text(f"carried by SGLang {release.name}", COLOURS["carried"])
    for patch in release.missing:
        states[patch.id] = Text(f"{patch.need}, no edit yet", COLOURS["missing"])
    table = Table(box=None, pad_edge=False)
    for heading in ("patch", "state", "upstream", "title"):
        table.add_column(heading)
    for kind, patches in groupby(release.all_patches, key=lambda patch: patch.kind):
        table.add_row(Text(f"{KINDS[kind]}:", "bold"))
        for patch in patches:
            upstream = "#" + patch.upstream.rsplit("/")[-1] if "/" in patch.upstream else ""
            table.add_row(f"  {patch.id}", states[patch.id], upstream, Text(patch.title))
    console.print(table)
    for path in status.edited:
        console.print(Text(f"edited since the patch set was applied: {path}", "red"))
    for drift in status.drifts:
        console.print(Text(f"drifted: {drift}", "red"))
    for note in status.notes:
        console.print(Text(note))


def patch_state(record: PatchRecord, release: Release, status: Status) -> str:
    """Returns a patch's state: one of Status, `carried`, `missing` (needed, no edit), `unknown`."""
    states = {patch.id: state for patch, state in status.patches}
    states |= {patch.id: "carried" for patch in release.carried}
    states |= {patch.id: "missing" for patch in release.missing}
    return states.get(record.id, "unknown")


def patch_as_json(record: PatchRecord, engine: Engine, release: Release, status: Status) -> dict:
    """Returns the whole record, and its state and symbols in this engine."""
    ours = [patch for patch, _ in status.patches if patch.id == record.id]
    return {
        **msgspec.to_builtins(record),
        "engine": _engine(engine, release),
        "state": patch_state(record, release, status),
        "symbols": {at: state for patch in ours for at, state in _symbols(patch, status).items()},
    }


def show_patch(
    record: PatchRecord, engine: Engine, release: Release, status: Status, console: Console
) -> None:
    """Prints the whole record: its purpose, this release's part of it, and the other releases'."""
    state = patch_state(record, release, status)
    console.print(_heading(engine, release).append(state, COLOURS.get(state, "")))
    console.print(Text(f"{record.id} ({KINDS[record.kind]}): {record.title}", "bold"))
    stand = record.at(release.name)
    _print_field(console, "upstream", record.upstream)
    _print_field(console, "symptom", record.symptom)
    _print_field(console, "cause", record.cause)
    _print_field(console, "drop when", record.drop_when)
    needs = (stand.state if stand else "not examined", stand.what if stand else "")
    _print_field(console, f"SGLang {release.name}", ": ".join(filter(None, needs)))
    _print_field(console, "change", stand.change if stand else "")
    _print_field(console, "names", "; ".join(stand.names) if stand else "")
    others = (f"{name} {record.at(name).state}" for name in record.releases if name != release.name)
    _print_field(console, "other releases", ", ".join(others))
    for patch, _ in status.patches:
        if patch.id == record.id:
            for symbol, at in _symbols(patch, status).items():
                console.print(Text("  ").append(f"{at:<12}", COLOURS[at]).append(f" {symbol}"))


def _print_field(console: Console, label: str, text: str) -> None:
    if text:
        console.print(Text(f"{label}: ", "bold").append(text, "not bold"))


def _heading(engine: Engine, release: Release) -> Text:
    return Text(f"SGLang {engine.version or release.name} at {engine.root}: ")


def _engine(engine: Engine, release: Release) -> dict:
    return {"path": str(engine.root), "version": engine.version, "release": release.name}


def _patch(patch: Patch) -> dict:
    said = {"id": patch.id, "title": patch.title, "kind": patch.kind, "upstream": patch.upstream}
    return {**said, "need": patch.need, "what": patch.what}


def _symbols(patch: Patch, status: Status) -> dict[str, str]:
    return {symbol: at for symbol, at in status.symbols.items() if patch.owns(symbol)}
