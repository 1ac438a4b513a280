"""What was measured, on this machine (.pd-env/) or on another (docs/evidence/RELEASE/), the last.

All steps together take longer than a machine may be had for: the report takes what is new, and
keeps it beside itself, as the next one finds it.
"""

import json
from pathlib import Path

from pd_harness.cluster import RELEASE_ENV
from pd_harness.releases import release

ROOT = Path(__file__).resolve().parents[1]
RELEASE = release()
NEW = RELEASE_ENV / "evidence"
SAVED = ROOT / "docs" / "evidence" / RELEASE
# Of each file of rows, which tests append to, what a row is known by.
KEYS = {
    "accuracy": ("fleet",),
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
    """The last row of each key of `KEYS`, by that key."""
    found = {}
    for folder in (SAVED, NEW):
        file = folder / f"{kind}.jsonl"
        for line in file.read_text().splitlines() if file.exists() else ():
            row = json.loads(line)
            found[tuple(row[name] for name in KEYS[kind])] = row
    return found


def bench_file(name: str) -> Path:
    """Where one of `BENCHES` is to write its figures."""
    return NEW / f"bench-{name}.json"


def bench(name: str) -> dict | list | None:
    """The last figures of one of `BENCHES`, None where it never ran."""
    return _last(bench_file(name).name)


def measures() -> dict:
    """Times of set-up, demo and tests, and the day on which each step was taken."""
    return _last("measures.json") or {}


def save_measures(**more) -> None:
    """Add to `measures`."""
    NEW.mkdir(parents=True, exist_ok=True)
    (NEW / "measures.json").write_text(json.dumps({**measures(), **more}, indent=1))


def _last(name: str):
    for folder in (NEW, SAVED):
        if (folder / name).exists():
            return json.loads((folder / name).read_text())
    return None


def save_rows() -> None:
    """Write all of it to docs/evidence/RELEASE/; delete a file there to have its rows forgotten."""
    SAVED.mkdir(parents=True, exist_ok=True)
    for kind in KEYS:
        if rows := latest_rows(kind):
            lines = "".join(json.dumps(row) + "\n" for row in rows.values())
            (SAVED / f"{kind}.jsonl").write_text(lines)
    for name in ("measures.json", *(bench_file(name).name for name in BENCHES)):
        if (found := _last(name)) is not None:
            (SAVED / name).write_text(json.dumps(found, indent=1) + "\n")
