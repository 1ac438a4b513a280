"""The rows and the report of `scripts/evidence.sh`: new measurements replace saved ones."""

import json
from pathlib import Path

import evidence_rows
import evidence_tables
import pytest

from pd_harness.device import machine

TODAY = machine()
ELSEWHERE = {"date": "2026-01-02", "cores": 8, "memory_gib": 64}


@pytest.fixture
def rows(tmp_path, monkeypatch):
    """The module `evidence_rows` with temporary folders."""
    monkeypatch.setattr(evidence_rows, "NEW", tmp_path / "new")
    monkeypatch.setattr(evidence_rows, "SAVED", tmp_path / "kept")
    return evidence_rows


def append(folder: Path, kind: str, **row) -> None:
    folder.mkdir(exist_ok=True)
    with (folder / f"{kind}.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")


def test_last_row_of_a_key_wins(rows):
    append(rows.SAVED, "soak", fleet="a", wrong=1)
    append(rows.SAVED, "soak", fleet="b", wrong=2)
    append(rows.NEW, "soak", fleet="a", wrong=3)
    append(rows.NEW, "soak", fleet="a", wrong=4)
    found = rows.latest_rows("soak")
    assert found == [{"fleet": "a", "wrong": 4}, {"fleet": "b", "wrong": 2}]
    rows.save_rows()
    (rows.NEW / "soak.jsonl").unlink()  # the next machine has no new rows
    assert rows.latest_rows("soak") == found


def test_newer_bench_replaces_all_rows(rows):
    assert rows.bench("serve") == {}
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
    saved = {
        "setup_cold": 100,
        "setup_warm": 2,
        "days": {"setup": "2026-01-01", "demo": "2026-01-03"},
    }
    (rows.SAVED / "measures.json").write_text(json.dumps(saved))
    rows.save_measures("setup", setup_cold=90)
    assert rows.measures() == {**saved, "setup_cold": 90, "machines": {"setup": TODAY}}
    assert rows.step_machine("setup") == TODAY
    assert rows.step_machine("demo") == {"date": "2026-01-03"}  # all that older files have
    assert rows.step_machine("tests") == {}


def test_report_contains_only_what_was_measured(rows):
    assert evidence_tables.report_lines()[4:] == []
    rows.save_measures("setup", setup_warm=2)
    lines = evidence_tables.report_lines()[4:]
    assert lines[0] == "| what | seconds | measured on | cores | memory, GiB |"
    assert [line.split(" | ")[:2] for line in lines[2:]] == [["| set-up, warm", "2"], [""]]


def test_report_says_where_each_table_was_measured(rows):
    row = {"timeout": 5.0, "rooms": 80, "median": 0.001, "worst": 0.3}
    for timeout, where in ((1.0, ELSEWHERE), (2.0, TODAY), (3.0, {})):
        append(rows.NEW, "back_off", **{**row, "timeout": timeout, **where})
    measured = (
        f"{one['date']} ({one['cores']} cores, {one['memory_gib']} GiB)"
        for one in (ELSEWHERE, TODAY)
    )
    said = f"Measured on {'; '.join(measured)}; 1 of 3 rows do not say when."
    assert said in evidence_tables.back_off()


def test_bench_figures_have_their_machine_in_each_row(rows):
    rows.NEW.mkdir()
    figures = {"rows": [{"pool": "MLA"}]}
    rows.bench_file("cpu-copy").write_text(json.dumps({**ELSEWHERE, **figures}))
    assert evidence_tables.bench_rows("cpu-copy") == [{**ELSEWHERE, "pool": "MLA"}]
    rows.bench_file("cpu-copy").write_text(json.dumps(figures["rows"]))  # an older file
    assert evidence_tables.bench_rows("cpu-copy") == figures["rows"]
