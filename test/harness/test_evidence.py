"""The rows of `scripts/evidence.sh`: this machine's measurements replace saved ones."""

import importlib
import json
from pathlib import Path

import pytest
from engine_release import SINCE_0_5_20

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture
def rows(tmp_path, monkeypatch):
    """The module `evidence_rows` with temporary folders."""
    monkeypatch.syspath_prepend(SCRIPTS)
    module = importlib.import_module("evidence_rows")
    monkeypatch.setattr(module, "NEW", tmp_path / "new")
    monkeypatch.setattr(module, "SAVED", tmp_path / "kept")
    return module


def append(folder: Path, kind: str, **row) -> None:
    folder.mkdir(exist_ok=True)
    with (folder / f"{kind}.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")


def test_last_row_of_a_key_wins(rows):
    append(rows.SAVED, "soak", fleet="a", wrong=1)
    append(rows.SAVED, "soak", fleet="b", wrong=2)
    append(rows.NEW, "soak", fleet="a", wrong=3)
    append(rows.NEW, "soak", fleet="a", wrong=4)
    found = {key: row["wrong"] for key, row in rows.latest_rows("soak").items()}
    assert found == {("a",): 4, ("b",): 2}
    rows.save_rows()
    (rows.NEW / "soak.jsonl").unlink()  # the next machine has no new rows
    assert {key: row["wrong"] for key, row in rows.latest_rows("soak").items()} == found


def test_newer_bench_replaces_all_rows(rows):
    assert rows.bench("serve") is None
    append(rows.SAVED, "soak", fleet="a")
    (rows.SAVED / "bench-serve.json").write_text('{"rows": [1, 2]}')
    assert rows.bench("serve") == {"rows": [1, 2]}
    rows.NEW.mkdir()
    rows.bench_file("serve").write_text('{"rows": [3]}')
    assert rows.bench("serve") == {"rows": [3]}
    rows.save_rows()
    assert json.loads((rows.SAVED / "bench-serve.json").read_text()) == {"rows": [3]}


def test_new_measure_preserves_other_measures(rows):
    rows.SAVED.mkdir()
    (rows.SAVED / "measures.json").write_text('{"setup_cold": 100, "setup_warm": 2}')
    rows.save_measures(setup_cold=90)
    assert rows.measures() == {"setup_cold": 90, "setup_warm": 2}


def test_empty_report_says_not_measured(rows):
    said = "\n".join(importlib.import_module("evidence_tables").tables())
    assert "| demo, patched | not measured |" in said
    kinds = {*rows.KEYS, *rows.BENCHES} - {"verify"}  # in both, so it counts twice
    if SINCE_0_5_20:
        kinds.remove("back_off")  # measured with 0.5.9's queues only
    assert said.count(": not measured.") == len(kinds) + 2
