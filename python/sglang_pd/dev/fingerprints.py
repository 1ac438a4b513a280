"""Makes a release's fingerprints, and checks its patch records."""

import json
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated

import libcst as cst
import typer

from sglang_pd.errors import ExitCode, Refusal
from sglang_pd.grafting.graft import graft
from sglang_pd.grafting.symbols import Definition, GraftError, lookup, parse
from sglang_pd.install.engine import Engine, find_engine
from sglang_pd.install.operations import changed_since_installation
from sglang_pd.install.transaction import STATE_FOLDER, read_file
from sglang_pd.patchset.edits import changed, repeated_symbols
from sglang_pd.patchset.patches import Fingerprints, Patch, Release, load_release, symbol_ids


def make_fingerprints(engine: Engine, release: Release) -> Fingerprints:
    """Returns the engine's fingerprints of the symbols that the tree replaces; None for additions.

    Raises Refusal PATCH_SET if the tree does not fit the patch records or the engine.
    """
    fingerprints: Fingerprints = {}
    problems: list[str] = []
    for path, ours in sorted(release.tree.items()):
        text = read_file(engine.root / path)
        if text is None:
            fingerprints[path] = None
            continue
        try:
            fingerprints[path] = graft(text, ours, path)[1]
        except GraftError as error:
            problems.append(str(error))
            continue
        module = parse(ours, path)
        problems += lookup_errors(module, fingerprints[path], path)
        problems += [
            f"{path}::{symbol} is identical to the engine's; remove it from our file"
            for symbol in repeated_symbols(ours, path, fingerprints[path])
            if isinstance(lookup(module, symbol, path), Definition)
        ]
    if not problems:
        problems = record_problems(release.patches, symbol_ids(changed(release.tree, fingerprints)))
    if problems:
        raise Refusal(ExitCode.PATCH_SET, "\n".join(problems))
    return fingerprints


def lookup_errors(ours: cst.Module, symbols: Iterable[str], path: str) -> list[str]:
    """Returns why symbols of our file could not be compared with those of a patched engine."""
    found = []
    for symbol in symbols:
        try:
            lookup(ours, symbol, f"our {path}")
        except GraftError as error:
            found.append(str(error))
    return found


def record_problems(patches: list[Patch], symbols: list[str]) -> list[str]:
    """Returns messages on symbols that no patch record names, and on names without a symbol."""
    found = [
        f"{s} is not in any patch record" for s in symbols if not any(p.owns(s) for p in patches)
    ]
    found += [
        f"patch {patch.id} names {pattern}, which the tree lacks"
        for patch in patches
        for pattern in patch.symbols
        if not any(fnmatchcase(symbol, pattern) for symbol in symbols)
    ]
    return found


def check_unmodified(engine: Engine, paths: list[str]) -> None:
    """Raises Refusal EDITED unless every file is as its wheel installed it."""
    if (engine.root / STATE_FOLDER).exists():
        raise Refusal(
            ExitCode.EDITED,
            f"the patch set is applied to {engine.root}; make fingerprints on an unmodified engine",
        )
    for path in changed_since_installation(engine, paths):
        raise Refusal(ExitCode.EDITED, f"{engine.root / path} was edited since installation")


def main(
    engine: Annotated[Path, typer.Option(help="An unmodified engine.")],
    release: Annotated[str, typer.Option(help="The release to make fingerprints of.")],
) -> None:
    """Writes engines/RELEASE/fingerprints.json."""
    try:
        wanted = load_release(release, with_fingerprints=False)
        found = find_engine(engine, release)
        check_unmodified(found, list(wanted.tree))
        fingerprints = make_fingerprints(found, wanted)
    except Refusal as refusal:
        typer.echo(refusal, err=True)
        raise typer.Exit(refusal.code) from None
    target = wanted.folder / "fingerprints.json"
    target.write_text(json.dumps(fingerprints, indent=1, sort_keys=True) + "\n")
    typer.echo(f"{target}: {len(symbol_ids(fingerprints))} symbols of {len(fingerprints)} files")


if __name__ == "__main__":
    typer.run(main)
