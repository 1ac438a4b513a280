"""Shows an engine's status, whole or of one patch, as text or as JSON."""

from itertools import groupby

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sglang_pd import __version__
from sglang_pd.install.operations import Status
from sglang_pd.patchset.patches import Patch, PatchRecord

COLOURS = {
    "applied": "green",
    "absent": "dim",
    "half-applied": "yellow",
    "outdated": "yellow",
    "drifted": "red",
    "carried": "blue",
    "missing": "yellow",
}
KINDS = {"mission": "main purpose", "layouts": "other layouts", "hardening": "hardening"}


def as_json(status: Status) -> dict:
    """Returns the status, with the states of every patch and of its symbols."""
    release = status.release
    return {
        "tool": __version__,
        "engine": _engine(status),
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


def show(status: Status, console: Console) -> None:
    """Prints a table in the records' order, then edited files, drifts and notes."""
    release = status.release
    console.print(_heading(status).append(status.state, COLOURS[status.state]))
    states = {patch.id: Text(state, COLOURS[state]) for patch, state in status.patches}
    for patch in release.carried:
        states[patch.id] = Text(f"carried by SGLang {release.name}", COLOURS["carried"])
    for patch in release.missing:
        states[patch.id] = Text(f"{patch.need}, no edit yet", COLOURS["missing"])
    table = Table("patch", "state", "upstream", "title", box=None, pad_edge=False)
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


def patch_state(record: PatchRecord, status: Status) -> str:
    """Returns a patch's state: one of Status, `carried`, `missing` (needed, no edit), `unknown`."""
    states = {patch.id: state for patch, state in status.patches}
    states |= {patch.id: "carried" for patch in status.release.carried}
    states |= {patch.id: "missing" for patch in status.release.missing}
    return states.get(record.id, "unknown")


def patch_as_json(record: PatchRecord, status: Status) -> dict:
    """Returns the whole record, and its state and symbols in this engine."""
    return {
        **msgspec.to_builtins(record),
        "engine": _engine(status),
        "state": patch_state(record, status),
        "symbols": _record_symbols(record, status),
    }


def show_patch(record: PatchRecord, status: Status, console: Console) -> None:
    """Prints the whole record: its purpose, this release's part of it, and the other releases'."""
    state, release = patch_state(record, status), status.release.name
    console.print(_heading(status).append(state, COLOURS.get(state, "")))
    console.print(Text(f"{record.id} ({KINDS[record.kind]}): {record.title}", "bold"))
    here = record.at(release)
    need = ": ".join(filter(None, (here.state, here.what))) if here else "not examined"
    others = (f"{name} {record.at(name).state}" for name in record.releases if name != release)
    fields = {
        "upstream": record.upstream,
        "symptom": record.symptom,
        "cause": record.cause,
        "drop when": record.drop_when,
        f"SGLang {release}": need,
        "change": here.change if here else "",
        "names": "; ".join(here.names) if here else "",
        "other releases": ", ".join(others),
    }
    for label, text in fields.items():
        if text:
            console.print(Text(f"{label}: ", "bold").append(text, "not bold"))
    for symbol, at in _record_symbols(record, status).items():
        console.print(Text("  ").append(f"{at:<12}", COLOURS[at]).append(f" {symbol}"))


def _heading(status: Status) -> Text:
    version = status.engine.version or status.release.name
    return Text(f"SGLang {version} at {status.engine.root}: ")


def _engine(status: Status) -> dict:
    engine, release = status.engine, status.release.name
    return {"path": str(engine.root), "version": engine.version, "release": release}


def _patch(patch: Patch) -> dict:
    said = {"id": patch.id, "title": patch.title, "kind": patch.kind, "upstream": patch.upstream}
    return {**said, "need": patch.need, "what": patch.what}


def _symbols(patch: Patch, status: Status) -> dict[str, str]:
    return {symbol: at for symbol, at in status.symbols.items() if patch.owns(symbol)}


def _record_symbols(record: PatchRecord, status: Status) -> dict[str, str]:
    ours = (patch for patch, _ in status.patches if patch.id == record.id)
    return next((_symbols(patch, status) for patch in ours), {})
