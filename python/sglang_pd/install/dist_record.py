"""Edits a distribution's RECORD, so that uninstalling the engine removes added files, too."""

import base64
import csv
import hashlib
import io


def record_entry(name: str, content: bytes | None) -> str:
    """Formats a row of RECORD; without hash and size if the content is None."""
    row = io.StringIO()
    rest = ["", ""] if content is None else [_record_hash(content), len(content)]
    csv.writer(row, lineterminator="").writerow([name, *rest])
    return row.getvalue()


def _record_hash(content: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest())
    return f"sha256={digest.rstrip(b'=').decode()}"


def read(record: bytes) -> dict[str, tuple[str, str]]:
    """Parses a RECORD into {path: (hash, size)}."""
    return {row[0]: (row[1], row[2]) for row in csv.reader(record.decode().splitlines()) if row}


def with_entries(record: bytes, files: dict[str, bytes | None]) -> bytes:
    """Replaces the rows of `files`, or appends them; keeps the other rows byte for byte."""
    lines = record.decode().splitlines(keepends=True)
    newline = "\r\n" if lines and lines[0].endswith("\r\n") else "\n"
    left = {name: record_entry(name, content) for name, content in files.items()}
    for k, line in enumerate(lines):
        row = next(csv.reader([line]), None)
        if row and row[0] in left:
            lines[k] = left.pop(row[0]) + newline
    if lines and not lines[-1].endswith("\n"):
        lines[-1] += newline
    return "".join([*lines, *(row + newline for row in left.values())]).encode()


def has_other_hash(record: bytes, name: str, content: bytes) -> bool:
    """Whether RECORD lists the file with another hash."""
    return read(record).get(name, ("", ""))[0] not in ("", _record_hash(content))
