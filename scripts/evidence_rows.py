"""The latest measurements, of this machine (.pd-env/) or of others (docs/evidence/RELEASE/).

All steps together take longer than one machine may be available: the report combines new
measurements with those in docs/evidence, and saves all of them there for the next report. Rows and
figures have the `date`, `cores` and `memory_gib` of their machine, older ones do not.
"""

import json
from pathlib import Path

from pd_harness.cluster import RELEASE_ENV
from pd_harness.device import machine
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
BENCHES = ("plan", "cpu-copy", "serve", "verify", "metrics", "wire", "wire-cuda", "heads", "scale")


def latest_rows(kind: str) -> list[dict]:
    """The last row for each key; `KEYS` names a key's fields."""
    found = {}
    for folder in (SAVED, NEW):
        file = folder / f"{kind}.jsonl"
        for line in file.read_text().splitlines() if file.exists() else ():
            row = json.loads(line)
            found[tuple(row[name] for name in KEYS[kind])] = row
    return list(found.values())


def bench_file(name: str) -> Path:
    """The file to which one of `BENCHES` writes its figures."""
    return NEW / f"bench-{name}.json"


def bench(name: str) -> dict:
    """The last figures of one of `BENCHES`; empty if it never ran."""
    found = _last(bench_file(name).name)
    return {"rows": found} if isinstance(found, list) else found  # older files of `cpu-copy`


def measures() -> dict:
    """Times of set-up, demo and tests; `machines` has the machine on which each step last ran."""
    return _last("measures.json")


def step_machine(step: str) -> dict:
    """The date, cores and memory of a step's last run, as far as they are known."""
    known = measures()
    days = known.get("days", {})  # all that older files have
    return known.get("machines", {}).get(step) or ({"date": days[step]} if step in days else {})


def save_measures(step: str, **more) -> None:
    """Add or replace entries of `measures`, which this step has just measured."""
    NEW.mkdir(parents=True, exist_ok=True)
    known = measures()
    machines = {**known.get("machines", {}), step: machine()}
    text = json.dumps({**known, **more, "machines": machines}, indent=1)
    (NEW / "measures.json").write_text(text)


def _last(name: str):
    for folder in (NEW, SAVED):
        if (folder / name).exists():
            return json.loads((folder / name).read_text())
    return {}


def save_rows() -> None:
    """Write all measurements to docs/evidence/RELEASE/; deleting a file there drops its rows."""
    SAVED.mkdir(parents=True, exist_ok=True)
    for kind in KEYS:
        if rows := latest_rows(kind):
            lines = "".join(json.dumps(row) + "\n" for row in rows)
            (SAVED / f"{kind}.jsonl").write_text(lines)
    for name in ("measures.json", *(bench_file(name).name for name in BENCHES)):
        if found := _last(name):
            (SAVED / name).write_text(json.dumps(found, indent=1) + "\n")
