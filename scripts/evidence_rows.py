"""The latest measurements, of this machine (.pd-env/) or of others (docs/evidence/RELEASE/).

All steps together take longer than one machine may be available: the report combines new
measurements with those in docs/evidence, and saves all of them there for the next report.
"""

import json
from pathlib import Path

from pd_harness.cluster import RELEASE_ENV
from pd_harness.releases import release

ROOT = Path(__file__).resolve().parents[1]
RELEASE = release()
NEW = RELEASE_ENV / "evidence"
SAVED = ROOT / "docs" / "evidence" / RELEASE
# The fields that identify a row in each file of rows; tests append to these files.
KEYS = {
    "attacks": ("case", "backend", "engine"),
    "back_off": ("timeout",),
    "draft": ("scenario", "engine"),
    "event_loop": ("backend", "engine"),
    "faults": ("case", "backend"),
    "hang_ups": ("fleet", "engine"),
    "serving": ("scenario", "engine"),
    "soak": ("fleet",),
    "verify": ("scenario",),
}
BENCHES = ("plan", "cpu-copy", "serve", "verify", "scale")


def latest_rows(kind: str) -> dict[tuple, dict]:
    """The last row for each key, by key; `KEYS` names a key's fields."""
    found = {}
    for folder in (SAVED, NEW):
        file = folder / f"{kind}.jsonl"
        for line in file.read_text().splitlines() if file.exists() else ():
            row = json.loads(line)
            found[tuple(row[name] for name in KEYS[kind])] = row
    return found


def bench_file(name: str) -> Path:
    """The file to which one of `BENCHES` writes its figures."""
    return NEW / f"bench-{name}.json"


def bench(name: str) -> dict | list | None:
    """The last figures of one of `BENCHES`; None if it never ran."""
    return _last(bench_file(name).name)


def measures() -> dict:
    """Times of set-up, demo and tests, and the day on which each step last ran."""
    return _last("measures.json") or {}


def save_measures(**more) -> None:
    """Add or replace entries of `measures`."""
    NEW.mkdir(parents=True, exist_ok=True)
    (NEW / "measures.json").write_text(json.dumps({**measures(), **more}, indent=1))


def _last(name: str):
    for folder in (NEW, SAVED):
        if (folder / name).exists():
            return json.loads((folder / name).read_text())
    return None


def save_rows() -> None:
    """Write all measurements to docs/evidence/RELEASE/; deleting a file there drops its rows."""
    SAVED.mkdir(parents=True, exist_ok=True)
    for kind in KEYS:
        if rows := latest_rows(kind):
            lines = "".join(json.dumps(row) + "\n" for row in rows.values())
            (SAVED / f"{kind}.jsonl").write_text(lines)
    for name in ("measures.json", *(bench_file(name).name for name in BENCHES)):
        if (found := _last(name)) is not None:
            (SAVED / name).write_text(json.dumps(found, indent=1) + "\n")
