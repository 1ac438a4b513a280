"""The Grafana board and the alerts in `docs`: their queries name series and labels that exist."""

import json
import re
import shutil
import subprocess

import pytest
from toy import ROOT

from sglang_pd.dev.grafana_board import board
from sglang_pd.engine_free import load

METRICS = load("transfer_log").METRICS
BOARD, ALERTS = ROOT / "docs" / "grafana.json", ROOT / "docs" / "alerts.yml"
SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
SERIES = {
    f"{metric.name}{suffix}": {*metric.labels, *(["le"] if suffix == "_bucket" else [])}
    for metric in METRICS
    for suffix in SUFFIXES[metric.kind]
}
SCRAPED = {"job", "instance"}  # labels that Prometheus adds


def queries(file) -> list[str]:
    if file == BOARD:
        panels = json.loads(file.read_text())["panels"]
        return [target["expr"] for panel in panels for target in panel["targets"]]
    found = re.findall(r"expr: (?:\|\n((?: {10}.*\n)+)|(.*)\n)", file.read_text())
    return ["".join(one) for one in found]


def test_board_is_up_to_date():
    """`python -m sglang_pd.dev.grafana_board > docs/grafana.json`"""
    assert json.loads(BOARD.read_text()) == board()


@pytest.mark.parametrize("file", [BOARD, ALERTS], ids=lambda file: file.name)
def test_queries_name_series_and_labels_that_exist(file):
    found = queries(file)
    assert len(found) >= 8
    for query in found:
        names = re.findall(r"\bsglang_pd_\w+", query)
        assert names and set(names) <= SERIES.keys(), query
        labels = set().union(*(SERIES[name] for name in names)) | SCRAPED
        used = [one for by in re.findall(r"by \(([^)]*)\)", query) for one in by.split(", ")]
        used += re.findall(r"(\w+)=~?\"", query)
        assert set(used) <= labels, query


def test_all_metrics_but_histograms_parts_are_on_the_board():
    shown = set(re.findall(r"\bsglang_pd_\w+", BOARD.read_text()))
    missing = [one.name for one in METRICS if not any(name.startswith(one.name) for name in shown)]
    # Beside their like; the board's range is the reader's choice.
    beside = ["failures_last_hour", "verified_requests", "stalls"]
    assert missing == [f"sglang_pd_{name}" for name in beside]


def test_every_alert_is_explained():
    text = (ROOT / "docs" / "operate.md").read_text()
    for name in re.findall(r"alert: (\w+)", ALERTS.read_text()):
        assert f"`{name}`" in text


def test_every_series_and_reason_is_explained():
    text = (ROOT / "docs" / "operate.md").read_text()
    for metric in METRICS:
        suffix = "_total" if metric.kind == "counter" else ""
        assert f"`{metric.name.removeprefix('sglang_pd_')}{suffix}`" in text, metric.name
    for kind in load("transfer_log").KINDS:
        assert kind == "another_rank" or f"| `{kind}` |" in text, kind


@pytest.mark.skipif(
    shutil.which("promtool") is None, reason="no promtool: apt-get install prometheus"
)
def test_promtool_accepts_the_alerts():
    subprocess.run(["promtool", "check", "rules", str(ALERTS)], check=True)
