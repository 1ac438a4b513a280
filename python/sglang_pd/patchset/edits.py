"""Computes the patch set's edits to an engine, or why it cannot be applied."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import libcst as cst

from sglang_pd.grafting.graft import graft
from sglang_pd.grafting.symbols import GraftError, fingerprint, lookup, parse
from sglang_pd.patchset.patches import Fingerprints, Release, outdated_fingerprints

ReadFile = Callable[[str], bytes | None]


@dataclass(frozen=True)
class Edit:
    """One file's change. path: relative to `sglang/`; old: None for a new file."""

    path: str
    old: bytes | None
    new: bytes


@dataclass(frozen=True)
class Drift:
    """A difference between the engine and the known release. count: symbols that it affects."""

    path: str
    symbol: str
    reason: str
    count: int = 1

    def __str__(self) -> str:
        return f"{self.path}{f'::{self.symbol}' if self.symbol else ''}: {self.reason}"


def plan(release: Release, read: ReadFile) -> tuple[list[Edit], list[Drift]]:
    """Returns the edits that apply a release's patch set, and the drifts that forbid applying it.

    read: returns an original file of the engine, or None. New files come first, so that no grafted
    file lacks its imports at any time. Raises Refusal PATCH_SET if fingerprints and tree differ.
    """
    edits: list[Edit] = []
    drifts: list[Drift] = []
    for path, ours in release.tree.items():
        engine, known = read(path), release.fingerprints[path]
        if known is None:
            if engine is not None:
                drifts.append(Drift(path, "", "the engine has this file, which the patch set adds"))
            edits.append(Edit(path, None, ours))
        elif engine is None:
            drifts.append(Drift(path, "", "the engine has no such file", len(known)))
        elif found := _find_drifts(path, known, engine):
            drifts += found
        else:
            try:
                new, before = graft(engine, ours, path)
            except GraftError as error:
                drifts.append(Drift(path, "", str(error)))
                continue
            if differ := set(before) ^ set(known):
                raise outdated_fingerprints(
                    f"{path} do not match the patch set", differ, release.name
                )
            edits.append(Edit(path, engine, new))
    edits.sort(key=lambda edit: edit.old is not None)
    return edits, drifts


def _find_drifts(path: str, known: dict[str, str | None], engine: bytes) -> list[Drift]:
    where = f"the engine's {path}"
    try:
        parse(engine, where)
    except GraftError as error:
        return [Drift(path, "", str(error), len(known))]
    drifts = []
    for (symbol, want), got in zip(known.items(), _fingerprints(where, known, engine)):
        if isinstance(got, GraftError):
            drifts.append(Drift(path, symbol, str(got)))
        elif got != want:
            reason = f"expected {_short(want)}, the engine has {_short(got)}"
            drifts.append(Drift(path, symbol, reason))
    return drifts


def _short(digest: str | None) -> str:
    return f"sha256 {digest[:16]}" if digest else "no such symbol"


def repeated_symbols(ours: bytes, path: str, known: dict[str, str | None]) -> list[str]:
    """Returns the symbols that our file repeats unchanged from the engine (`logger = ...`)."""
    our_digests = _fingerprints(f"our {path}", known, ours)
    return [symbol for symbol, own in zip(known, our_digests) if own == known[symbol]]


def changed(tree: dict[str, bytes], fingerprints: Fingerprints) -> Fingerprints:
    """Returns the fingerprints of what the patch set adds or replaces."""
    found: Fingerprints = {}
    for path, known in fingerprints.items():
        repeated = () if known is None else repeated_symbols(tree[path], path, known)
        found[path] = known and {one: want for one, want in known.items() if one not in repeated}
    return found


def symbol_states(release: Release, read: ReadFile) -> dict[str, str]:
    """Returns `applied`, `absent` or `drifted` for each changed symbol in the engine's files."""
    states: dict[str, str] = {}
    for path, known in changed(release.tree, release.fingerprints).items():
        engine, ours = read(path), release.tree[path]
        if known is None:
            states[path] = _state(engine, ours, None)
            continue
        here = _fingerprints(f"the engine's {path}", known, engine)
        our_digests = _fingerprints(f"our {path}", known, ours)
        for (symbol, original), got, own in zip(known.items(), here, our_digests):
            states[f"{path}::{symbol}"] = _state(got, own, original)
    return states


def _state(now: Any, ours: Any, original: Any) -> str:
    return "applied" if now == ours else "absent" if now == original else "drifted"


def is_applied(release: Release, read: ReadFile) -> bool:
    """Whether the engine's files contain the whole patch set."""
    return set(symbol_states(release, read).values()) == {"applied"}


def _fingerprints(
    where: str, symbols: Iterable[str], text: bytes | None
) -> list[str | GraftError | None]:
    """Returns the symbols' fingerprints in a file, or why there is none."""
    if text is None:
        return [GraftError(f"{where} is missing") for _ in symbols]
    try:
        module = parse(text, where)
    except GraftError as error:
        return [error for _ in symbols]
    return [_fingerprint(module, symbol, where) for symbol in symbols]


def _fingerprint(module: cst.Module, symbol: str, where: str) -> str | GraftError | None:
    try:
        return fingerprint(lookup(module, symbol, where))
    except GraftError as error:
        return error
