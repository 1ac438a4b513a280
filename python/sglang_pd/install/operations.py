"""Implements apply, revert, status and diff of a release's patch set on an engine."""

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from difflib import unified_diff

from sglang_pd import __version__
from sglang_pd.errors import ExitCode, Refusal
from sglang_pd.install import dist_record, transaction
from sglang_pd.install.engine import Engine
from sglang_pd.install.release_detection import release_notes
from sglang_pd.install.transaction import Journal, originals, read_file, read_journal
from sglang_pd.patchset.edits import Drift, Edit, is_applied, plan, symbol_states
from sglang_pd.patchset.patches import Patch, Release
from sglang_pd.patchset.series import lines_of


@dataclass(frozen=True)
class Status:
    """The state of an engine with a release's patch set, of its patches and of its symbols.

    A state is `applied`, `absent`, `half-applied`, `drifted` or `outdated`.
    """

    engine: Engine
    release: Release
    state: str
    patches: list[tuple[Patch, str]]
    symbols: dict[str, str]
    edited: list[str]  # files changed by someone since `apply`
    drifts: list[Drift]  # why `apply` would refuse
    notes: list[str]  # what else a user should know


def apply(
    engine: Engine, release: Release, dry_run: bool = False, preview: bool = False
) -> list[Edit]:
    """Applies the patch set; returns the edits, none if it was applied already.

    First restores the originals of a half-applied or outdated engine. With `dry_run`, writes
    nothing. Raises Refusal; PREVIEW for a preview release, unless `preview` is set.
    """
    if release.preview and not preview:
        raise Refusal(
            ExitCode.PREVIEW,
            f"SGLang {release.name} is a preview: {release.preview}\nNothing was written. "
            "Pass --preview to apply it anyway.",
        )
    root = engine.root
    with transaction.locked(root):
        journal = read_journal(root)
        if journal:
            transaction.check_undoable(root, journal)
        edits = _plan_edits(engine, release, journal)
        is_complete = journal is not None and transaction.is_complete(root, journal)
        if not edits or (is_complete and _is_current(journal, edits)):
            if not dry_run:
                transaction.remove_leftovers(root)
            return []
        if dry_run:
            transaction.check_writable(root, [edit.path for edit in edits])
        else:
            transaction.commit(root, edits, release.name, __version__)
        return edits


def revert(engine: Engine) -> str:
    """Restores every byte of the engine, see `transaction.undo`. Raises Refusal."""
    with transaction.locked(engine.root):
        return transaction.undo(engine.root)


def status(engine: Engine, release: Release) -> Status:
    """Determines the status from the engine's own files, symbol by symbol."""
    root, journal = engine.root, read_journal(engine.root)
    is_replaced = journal is not None and transaction.is_replaced(root, journal)
    before = originals(root, journal)
    edits, drifts = plan(release, before)
    symbols = symbol_states(release, before if is_replaced else lambda path: read_file(root / path))
    entries = journal.entries if journal and not is_replaced else []
    files = {entry.path: transaction.file_state(root, entry) for entry in entries}
    if not journal and set(symbols.values()) == {"applied"}:
        drifts = []  # the patch set cannot be applied twice
    is_complete = journal is not None and set(files.values()) == {"new"}
    for symbol, at in symbols.items():
        # Nobody else has changed a file that is exactly as some patch set wrote it.
        if at != "applied" and (is_complete or files.get(symbol.split("::")[0]) == "new"):
            symbols[symbol] = "outdated"
    state = _combined_state(list(symbols.values()))
    if state != "drifted" and "old" in files.values():
        state = "half-applied"
    elif is_complete and not drifts and not _is_current(journal, edits):
        state = "outdated"
    elif state == "absent" and drifts:
        state = "drifted"
    patches = [
        (patch, _combined_state([at for symbol, at in symbols.items() if patch.owns(symbol)]))
        for patch in release.patches
    ]
    notes = [*release_notes(engine, release), *_notes(engine, journal, state)]
    if is_replaced:
        notes.append(
            "the last apply is not in effect: SGLang was reinstalled, upgraded or moved to another "
            "revision since, or an apply or revert was interrupted; apply patches SGLang again, "
            "revert removes what is left of the last one"
        )
    edited = [path for path, at in files.items() if at == "edited"]
    return Status(engine, release, state, patches, symbols, edited, drifts, notes)


def diff(engine: Engine, release: Release) -> Iterator[bytes]:
    """Yields lines of a unified diff from the engine's originals to their patched text.

    The diff applies with `patch -p1` in the folder that holds `sglang/`, or at a checkout's top.
    """
    root, journal = engine.root, read_journal(engine.root)
    if journal and transaction.is_complete(root, journal):
        read = originals(root, journal)
        edits = [Edit(e.path, read(e.path), read_file(root / e.path)) for e in journal.entries]
    else:
        edits = _plan_edits(engine, release, journal)
    for edit in sorted(edits, key=lambda edit: edit.path):
        if not _is_outside(edit):
            yield from file_diff(engine.prefix() + edit.path, edit)


def original_edits(engine: Engine, release: Release) -> list[Edit]:
    """Returns this patch set's edits to the engine's originals, without RECORD's.

    Raises Refusal as `apply`; EDITED if the patch set was applied in another way, and the originals
    are lost.
    """
    edits = _plan_edits(engine, release, read_journal(engine.root))
    if not edits:
        raise Refusal(
            ExitCode.EDITED,
            f"{engine.root} has the patch set already, but not by `sglang-pd apply`, so that its "
            "original files are not known; give --engine an unmodified SGLang",
        )
    return [edit for edit in edits if not _is_outside(edit)]


def _is_outside(edit: Edit) -> bool:
    """Whether the file is not the engine's, but RECORD."""
    return edit.path.startswith("..")


def _plan_edits(engine: Engine, release: Release, journal: Journal | None) -> list[Edit]:
    """Returns all edits, RECORD's last; none if applied without a journal. Refuses a drift."""
    read = originals(engine.root, journal)
    edits, drifts = plan(release, read)
    if drifts and not journal and is_applied(release, read):
        return []
    if drifts:
        raise _drift_refusal(engine, release, drifts)
    edits = [edit for edit in edits if edit.old != edit.new]
    if engine.dist_record is None:
        return edits
    name = os.path.relpath(engine.dist_record, engine.root)
    old = read(name)
    folder = engine.root.name
    listed: dict[str, bytes | None] = {f"{folder}/{edit.path}": edit.new for edit in edits}
    with_record = [*edits, Edit(name, old, b"")]
    # Without the journal: left by an upgrade, it tells that the patches are gone.
    kept = [path for path in transaction.state_files(with_record) if path != transaction.JOURNAL]
    listed |= {f"{folder}/{path}": None for path in kept}
    return [*edits, Edit(name, old, dist_record.with_entries(old, listed))]


def changed_since_installation(engine: Engine, paths: Iterable[str]) -> list[str]:
    """Returns those of the engine's files that RECORD lists with another hash."""
    if engine.dist_record is None:
        return []
    rows, found = engine.dist_record.read_bytes(), []
    for path in paths:
        name, content = f"{engine.root.name}/{path}", read_file(engine.root / path)
        if content is not None and dist_record.has_other_hash(rows, name, content):
            found.append(path)
    return found


def _drift_refusal(engine: Engine, release: Release, drifts: list[Drift]) -> Refusal:
    """Returns EDITED if by RECORD a drifted file was changed since installation, else DRIFTED."""
    changed = changed_since_installation(engine, sorted({drift.path for drift in drifts}))
    lines = "\n".join(f"  {drift}" for drift in drifts)
    if changed:
        return Refusal(
            ExitCode.EDITED,
            f"edited since the engine was installed: {', '.join(changed)} (in "
            f"{engine.root}):\n{lines}\n"
            "Nothing was written. Reinstall the engine, or undo these edits.",
        )
    return Refusal(
        ExitCode.DRIFTED,
        f"{engine.root} differs from SGLang {release.name} as this patch set expects it:\n{lines}\n"
        "Nothing was written. Install the published release, or pass the right one as --release.",
    )


def _is_current(journal: Journal, edits: list[Edit]) -> bool:
    """Whether the journal's changes to the engine's files are the current patch set's edits."""
    wanted = {edit.path: transaction.sha256(edit.new) for edit in edits if edit.old != edit.new}
    made = {entry.path: entry.new for entry in journal.entries}
    return all(wanted.get(path) == made.get(path) for path in {*wanted, *made} if path[0] != ".")


def _combined_state(states: list[str]) -> str:
    """Combines the states of several symbols into one."""
    for state in ("drifted", "outdated"):
        if state in states:
            return state
    return states[0] if len(set(states)) == 1 else "half-applied"


def _notes(engine: Engine, journal: Journal | None, state: str) -> list[str]:
    notes = []
    if transaction.has_leftovers(engine.root):
        notes.append(
            "an apply or revert was interrupted, or is still running; revert removes its leftovers"
        )
    if journal is None and state == "applied":
        notes.append("not applied by sglang-pd (by git apply?): undo it the same way")
    if state == "half-applied":
        notes.append("apply completes it, revert undoes it")
    if state == "outdated":
        notes.append(
            f"applied by another version (sglang-pd {journal.tool}); apply brings it up to date"
        )
    return notes


def file_diff(name: str, edit: Edit) -> Iterator[bytes]:
    """Yields the lines of one file's unified diff, as git writes it."""
    before = "/dev/null" if edit.old is None else f"a/{name}"
    yield f"diff --git a/{name} b/{name}\n".encode()
    if edit.old is None:
        yield b"new file mode 100644\n"
    for line in unified_diff(lines_of(edit.old or b""), lines_of(edit.new), before, f"b/{name}"):
        ending = "" if line.endswith("\n") else "\n\\ No newline at end of file\n"
        yield f"{line}{ending}".encode()
