"""Which MemFabric works with which engine: doctor's findings, and the page."""

import json

import pytest
from toy import ROOT

from sglang_pd.dev import memfabric_page
from sglang_pd.doctor import memfabric
from sglang_pd.doctor.memfabric import CompatibilityTable, ReleaseTraits, Run, release_finding
from sglang_pd.patchset.patches import supported_releases, version_key

KINDS = [
    ReleaseTraits(["1.0.5", "1.0.8"], "HOST:PORT_PID", "at once", True, "accepted", "slow"),
    ReleaseTraits(["1.1.3", "1.1.6"], "HOST:PORT", "after `initialize`", False, "refused", "quick"),
    ReleaseTraits(["1.3.0"], "HOST:PORT", "after `initialize`", False, "accepted", "quick"),
]


def run(release, outcome, patched=False, engine="0.5.9", fleet="mla") -> Run:
    return Run(release, engine, patched, fleet, outcome)


TABLE = CompatibilityTable(
    KINDS, [run("1.0.8", "right"), run("1.1.6", "fails"), run("1.3.0", "right", True)]
)


@pytest.mark.parametrize(
    ("release", "first"),
    [("1.0.5", 0), ("1.0.9", 0), ("1.1.3", 1), ("1.2.1", 1), ("1.3.0", 2), ("2.0", 2)],
)
def test_unlisted_release_behaves_like_next_older(release, first):
    assert TABLE.kind(release) is KINDS[first]


def test_kind_of_too_old_or_missing_release_is_unknown():
    assert TABLE.kind("1.0.4") is None and TABLE.kind("") is None


def test_worst_outcome_of_fleets_counts():
    runs = [run("1.0.8", "right"), run("1.0.8", "hangs", fleet="tp2_to_1"), run("1.0.5", "fails")]
    table = CompatibilityTable(KINDS, runs)
    assert table.outcome("1.0.8", "0.5.9", False) == "hangs"
    assert table.outcome("1.0.8", "0.5.9", True) is None
    assert table.expected("1.0.6", "0.5.9", False) == ("1.0.8", "hangs")


def test_serving_release_is_ok():
    found = release_finding(TABLE, "1.0.8+vendor", "0.5.9", False)
    assert (found.level, found.found) == ("ok", "1.0.8+vendor: stock 0.5.9 serves with it")


@pytest.mark.parametrize(("release", "named"), [("1.1.6", "with it"), ("1.3.0", "with 1.1.6")])
def test_failing_releases_and_those_with_equal_session_ids_are_wrong(release, named):
    found = release_finding(TABLE, release, "0.5.9", False)
    assert found.level == "wrong" and named in found.found
    assert "fails every request" in found.found
    assert found.advice == "run `sglang-pd apply`, or install memfabric-hybrid==1.0.8 on all hosts"


@pytest.mark.parametrize(
    ("release", "engine", "patched"),
    [
        ("1.0.5", "0.5.9", False),
        ("1.1.6", "0.5.9", True),
        ("1.0.8", "0.5.23", False),
        ("0.1", "", 0),
    ],
)
def test_untested_release_is_a_warning(release, engine, patched):
    found = release_finding(TABLE, release, engine, patched)
    assert (found.level, "sglang-pd verify" in found.advice) == ("warning", True)


def test_apply_is_not_advised_where_it_does_not_help():
    table = CompatibilityTable(KINDS, [run("1.0.8", "right"), run("1.1.6", "hangs", True)])
    found = release_finding(table, "1.1.6", "0.5.9", True)
    assert (found.level, "lets requests hang" in found.found) == ("wrong", True)
    assert found.advice.startswith("install another release")
    # Nor on a stock engine, if patches do not help there.
    table = CompatibilityTable(KINDS, [*table.runs, run("1.1.6", "hangs")])
    assert "apply" not in release_finding(table, "1.1.6", "0.5.9", False).advice


# The shipped table


def test_listed_releases_are_unique_and_sorted():
    listed = [release for kind in memfabric.table().kinds for release in kind.releases]
    assert listed == sorted(set(listed), key=version_key)


def test_runs_are_of_known_releases():
    listed = {release for kind in memfabric.table().kinds for release in kind.releases}
    for one in memfabric.table().runs:
        assert one.memfabric in listed and one.engine in supported_releases(), one


def test_no_patched_engine_does_worse_than_stock():
    table = memfabric.table()
    for engine in supported_releases():
        stock, patched = (table.tried(engine, applied) for applied in (False, True))
        for release in stock.keys() & patched.keys():
            better = stock[release] == "right" != patched[release]
            assert not better, (release, engine, stock[release], patched[release])


@pytest.mark.parametrize("release", ["1.1.3", "1.1.4", "1.1.6", "1.2.1", "1.3.0"])
def test_stock_0_5_9_does_not_work_with_later_memfabric(release):
    found = release_finding(memfabric.table(), release, "0.5.9", False)
    assert found.level == "wrong" and "sglang-pd apply" in found.advice
    assert "memfabric-hybrid==1.0.8" in found.advice
    assert release_finding(memfabric.table(), "1.0.8", "0.5.9", False).level == "ok"


# The page


def test_memfabric_page_is_generated_from_runs():
    assert (ROOT / "docs/memfabric.md").read_text() == memfabric_page.page(), (
        "python -m sglang_pd.dev.memfabric_page > docs/memfabric.md"
    )


def test_table_cells_show_outcomes_of_runs():
    runs = [
        run("1.1.6", "fails"),
        run("1.1.3", "right"),
        run("1.0.8", "right"),
        run("1.0.5", "right"),
    ]
    rows = memfabric_page.markdown(CompatibilityTable(KINDS, runs), ["0.5.9"]).splitlines()
    at = rows.index("| MemFabric | stock 0.5.9 | patched 0.5.9 |")
    assert rows[at + 2 : at + 5] == [
        "| 1.0.5, 1.0.8 | right (1.0.5, 1.0.8) | not run |",
        "| 1.1.3, 1.1.6 | fails (1.1.6), right (1.1.3) | not run |",
        "| 1.3.0 | not run | not run |",
    ]


def test_new_runs_replace_old_ones(tmp_path, monkeypatch, capsys):
    shipped, newer = tmp_path / "shipped.json", tmp_path / "newer.json"
    shipped.write_text(memfabric_page.as_json([run("1.1.6", "fails", True), run("1.0.8", "right")]))
    newer.write_text(memfabric_page.as_json([run("1.1.6", "right", True)]))
    monkeypatch.setattr(memfabric, "RUNS_FILE", shipped)
    monkeypatch.setattr(memfabric_page, "RUNS_FILE", shipped)
    memfabric.table.cache_clear()
    try:
        memfabric_page.main([str(newer)])
    finally:
        memfabric.table.cache_clear()
    kept = [(one["memfabric"], one["outcome"]) for one in json.loads(shipped.read_text())["runs"]]
    assert kept == [("1.0.8", "right"), ("1.1.6", "right")]
    assert "| right (1.1.6) |" in capsys.readouterr().out
