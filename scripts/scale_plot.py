"""The plot of `scripts/bench.sh scale`: four figures by ranks, for both engines and backends."""

import re
import statistics
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

PANELS = {
    "meet_s": "seconds until all ranks are connected",
    "kib_a_peer": "memory of a prefill rank per peer, KiB",
    "messages": "messages per request",
    "cpu_ms": "processor time per request, ms",
}
COLOURS = {"stock": "#999999", "patched": "#1f6fb4"}
STYLES = {"mooncake": "-", "nixl": "--"}


def draw(rows: list[dict], path: Path) -> None:
    """Write an SVG of the bench's rows, with medians over rounds."""
    sizes = sorted({row["ranks"] for row in rows})
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "scale", "font.size": 8}):
        figure = Figure(figsize=(7, 5), layout="constrained")
        panels = figure.subplots(2, 2).flat
        for panel, (name, title) in zip(panels, PANELS.items()):
            for (engine, backend), values in lines(rows, name, sizes).items():
                style = {"color": COLOURS[engine], "linestyle": STYLES[backend]}
                panel.plot(sizes, values, label=f"{engine}, {backend}", **style)
            panel.set_xscale("log", base=2)
            panel.set_xticks(sizes, sizes)
            panel.xaxis.set_minor_locator(NullLocator())
            panel.set_ylim(bottom=0)
            panel.locator_params(axis="y", nbins=4)
            panel.set_title(f"{title}; by ranks per side", fontsize=8)
        panel.legend()
        figure.savefig(path, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    # Join lines: two of three only separate a line's points or attributes, or delimit groups.
    path.write_text(re.sub(r"\s*\n\s*(?=</g>|<use|[^<\s])", " ", path.read_text()))


def lines(rows: list[dict], name: str, sizes: list[int]) -> dict[tuple, list[float]]:
    """The medians of figure `name` by size, for each engine and backend."""
    found = {}
    for row in rows:
        found.setdefault((row["engine"], row["backend"]), {}).setdefault(row["ranks"], []).append(
            row[name]
        )
    return {
        key: [statistics.median(by_size[size]) for size in sizes] for key, by_size in found.items()
    }
