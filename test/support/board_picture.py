"""Draws the Grafana board with what Prometheus returned for its queries."""

import math
import re
from collections.abc import Callable
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from sglang_pd.dev.grafana_board import COLUMNS, PANELS

UNITS = {"reqps": "1/s", "Bps": "B/s", "bytes": "B", "s": "s", "short": "", "cps": "1/s"}


def draw(series_of: Callable[[str], list[dict]], path: Path) -> None:
    """Writes an SVG of all panels.

    Args:
        series_of: Returns what a query has: `metric` and `values`, as `prometheus.query_range`.
    """
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "board", "font.size": 7}):
        rows = math.ceil(len(PANELS) / COLUMNS)
        figure = Figure(figsize=(4 * COLUMNS, 2.4 * rows), layout="constrained")
        for axes, panel in zip(figure.subplots(rows, COLUMNS).flat, PANELS):
            unit = UNITS[panel.unit]
            axes.set_title(f"{panel.title}{f', {unit}' if unit else ''}", fontsize=8)
            for legend, query in panel.queries.items():
                for one in series_of(query):
                    axes.plot(*_points(one), label=_named(legend, one["metric"]), linewidth=1)
            axes.set_ylim(bottom=0)
            axes.set_xlabel("s")
            if axes.lines:
                axes.legend(fontsize=5.5, framealpha=0.6)
        figure.savefig(path, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))


def _points(series: dict) -> tuple[list[float], list[float]]:
    times, values = zip(*((float(at), float(value)) for at, value in series["values"]))
    return [at - times[0] for at in times], list(values)


def _named(legend: str, labels: dict[str, str]) -> str:
    return re.sub(r"{{(\w+)}}", lambda found: labels.get(found[1], ""), legend)
