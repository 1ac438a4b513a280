"""Splits the patch set's edits into a series of patches, one for each record.

Each changed line belongs to the symbol that it is in, and so to the first record that owns the
symbol; other lines (imports, the header of a class) to the first record that changes the file. The
text after each patch is the original with the lines of all records so far. Only the text after the
last one is what `apply` writes, and only that is meant to run.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import SequenceMatcher

from sglang_pd.patchset.edits import Edit
from sglang_pd.patchset.patches import Patch, Release


@dataclass(frozen=True)
class SeriesPatch:
    """One record's edits; each `old` is the text that the patches before leave."""

    patch: Patch
    edits: list[Edit]


@dataclass(frozen=True)
class _Piece:
    """Lines that are the same on both sides (`at` is None), or change with patch number `at`."""

    at: int | None
    old: list[str]
    new: list[str]


def split_by_record(edits: list[Edit], release: Release) -> list[SeriesPatch]:
    """Returns the patches in the records' order, without those that change nothing.

    edits: those of `plan`, without RECORD's.
    """
    pieces = {edit.path: _pieces(edit, release.patches) for edit in edits}
    texts = {edit.path: edit.old for edit in edits}
    series = []
    for number, patch in enumerate(release.patches):
        found = []
        for edit in edits:
            text = _text_after(number, pieces[edit.path])
            if text != texts[edit.path] and text is not None:
                found.append(Edit(edit.path, texts[edit.path], text))
                texts[edit.path] = text
        if found:
            series.append(SeriesPatch(patch, sorted(found, key=lambda edit: edit.path)))
    return series


def lines_of(content: bytes) -> list[str]:
    """Returns the lines of a file with their ends."""
    # Not `splitlines`, which also splits at a form feed.
    return re.findall(r"[^\n]*\n|[^\n]+", content.decode())


def _text_after(number: int, pieces: list[_Piece]) -> bytes | None:
    """Returns a file's text after a patch; None for a file that does not exist yet."""
    is_made = any(piece.at is None or piece.at <= number or piece.old for piece in pieces)
    if not is_made:
        return None
    lines: list[str] = []
    for piece in pieces:
        is_changed = piece.at is not None and piece.at <= number
        lines += piece.new if is_changed else piece.old
    return "".join(lines).encode()


def _pieces(edit: Edit, patches: list[Patch]) -> list[_Piece]:
    if edit.old is None:
        at = next(n for n, patch in enumerate(patches) if patch.owns(edit.path))
        return [_Piece(at, [], lines_of(edit.new))]
    old, new = lines_of(edit.old), lines_of(edit.new)
    owners = _owners(edit, patches)
    pieces = []
    matcher = SequenceMatcher(None, old, new, autojunk=False)
    for tag, old_start, old_end, new_start, new_end in matcher.get_opcodes():
        before, after = old[old_start:old_end], new[new_start:new_end]
        if tag == "equal":
            pieces.append(_Piece(None, before, before))
            continue
        parts = list(_runs(owners.new[new_start:new_end]))
        if not parts:
            parts = [(min(owners.old[old_start:old_end]), 0)]
        for at, count in parts:  # the lines that they replace go with the first of them
            pieces.append(_Piece(at, before, after[:count]))
            before, after = [], after[count:]
    return pieces


@dataclass(frozen=True)
class _Owners:
    """For each line of the old and of the new text, the number of the patch that owns it."""

    old: list[int]
    new: list[int]


def _owners(edit: Edit, patches: list[Patch]) -> _Owners:
    owned = [_symbol_owners(edit.path, text, patches) for text in (edit.old, edit.new)]
    known = [at for lines in owned for at in lines if at is not None]
    first = min(known, default=0)
    return _Owners(*([first if at is None else at for at in lines] for lines in owned))


def _symbol_owners(path: str, text: bytes, patches: list[Patch]) -> list[int | None]:
    lines = lines_of(text)
    owners: list[int | None] = [None] * len(lines)
    for symbol, start, end in _symbols(ast.parse(text).body, "", lines):
        at = next((n for n, one in enumerate(patches) if one.owns(f"{path}::{symbol}")), None)
        if at is not None:
            owners[start:end] = [at] * (end - start)
    return owners


def _symbols(body: list[ast.stmt], scope: str, lines: list[str]) -> Iterator[tuple[str, int, int]]:
    """Yields dotted name, first line and end of each symbol; a class before its members."""
    for node in body:
        name = _name(node)
        if name is None:
            continue
        decorators = getattr(node, "decorator_list", [])
        start = min([node.lineno, *(one.lineno for one in decorators)]) - 1
        while start and (not (line := lines[start - 1].strip()) or line.startswith("#")):
            start -= 1
        yield scope + name, start, node.end_lineno
        if isinstance(node, ast.ClassDef):
            yield from _symbols(node.body, f"{scope}{name}.", lines)


def _name(node: ast.stmt) -> str | None:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return node.name
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    only = targets[0] if len(targets) == 1 else None
    return only.id if isinstance(only, ast.Name) else None


def _runs(numbers: list[int]) -> Iterator[tuple[int, int]]:
    """Yields each run of equal numbers, and its length."""
    start = 0
    for at in range(1, len(numbers) + 1):
        if at == len(numbers) or numbers[at] != numbers[start]:
            yield numbers[start], at - start
            start = at
