"""What the benchmarks share: medians in turns, tables, and files of figures."""

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from pd_harness.device import machine

JsonFile = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write the figures to FILE.")
]
# A heading, and the format of a row's cell: "{ms[stock]:.2f}".
Columns = dict[str, str]

PLAN = {"transfer": "{kind}", "pages": "{pages:,}", "fragmented": "{fragmented}"}
PLAN |= {"copies": "{copies:,}", "stock ms": "{ms[stock]:.3f}", "patched ms": "{ms[ours]:.3f}"}
PLAN |= {"faster": "{faster[ours]:.2f}x", "arrays ms": "{ms[arrays]:.3f}"}
PLAN |= {"arrays faster": "{faster[arrays]:.1f}x"}
PLAN |= {"stock MB": "{peak_mb[stock]:.1f}", "patched MB": "{peak_mb[ours]:.1f}"}

PLAN_PACKED = {"from, to": "{direction}", "pages": "{pages:,}", "tokens per page": "{page_size:d}"}
PLAN_PACKED |= {"lie": "{lie}", "packed copies": "{copies[packed]:,}"}
PLAN_PACKED |= {"sliced copies": "{copies[sliced]:,}", "whole pages": "{copies[whole pages]:,}"}
PLAN_PACKED |= {"packed ms": "{ms[packed]:.2f}", "sliced ms": "{ms[sliced]:.2f}"}
PLAN_PACKED |= {"whole pages ms": "{ms[whole pages]:.2f}"}

WIRE = {"over": "{transport}", "from, to": "{direction}", "tokens per page": "{page_size:d}"}
WIRE |= {"pages": "{lie}", "flat ms": "{ms[flat]:.0f}", "whole pages ms": "{ms[whole]:.0f}"}
WIRE |= {"packed ms": "{ms[packed]:.0f}"}
WIRE |= {"sliced ms": "{ms[sliced]:.0f}", "packed of flat": "{of_flat[packed]:.2f}"}
WIRE |= {"sliced of flat": "{of_flat[sliced]:.2f}", "packed copies": "{copies[packed]:,}"}
WIRE |= {"sliced copies": "{copies[sliced]:,}", "copy, GB/s": "{copy GB/s:.2f}"}
WIRE |= {"memcpy, GB/s": "{memcpy GB/s:.2f}"}

WIRE_CUDA = {name: text for name, text in WIRE.items() if name != "whole pages ms"}

SERVED_HEADS = {"fleet": "{fleet}", "figure": "{figure}", "packed": "{packed:.0f}"}
SERVED_HEADS |= {"sliced": "{sliced:.0f}", "equal TP": "{equal TP:.0f}"}
SERVED_HEADS |= {"sliced / packed": "{gain:.2f}", "noise": "{noise:.2f}"}

CPU_COPY = {"pool": "{pool}", "tokens": "{tokens:,}", "MB": "{mb:.0f}"}
CPU_COPY |= {"memcpy ms": "{ms[memcpy]:.1f}", "to host: pool ms": "{ms[to host, pool]:.1f}"}
CPU_COPY |= {"to host: loop ms": "{ms[to host, loop]:.1f}"}
CPU_COPY |= {"back: pool ms": "{ms[back, pool]:.1f}", "back: loop ms": "{ms[back, loop]:.1f}"}

SERVE = {"fleet": "{fleet}", "figure": "{figure}", "stock": "{stock:.2f}"}
SERVE |= {"patched": "{patched:.2f}", "ratio": "{ratio:.2f}", "noise": "{noise:.2f}"}

DIGESTS = {"pool": "{pool}", "tokens": "{tokens:,}", "MiB": "{MiB:.0f}"}
DIGESTS |= {"digests, GB/s": "{digest GB/s:.2f}", "memcpy, GB/s": "{memcpy GB/s:.2f}"}
DIGESTS |= {"digests, ms": "{digest ms:.0f}"}

FIRST_TOKEN = {"prompt, tokens": "{tokens:,}", "without, ms": "{off:.0f}", "with, ms": "{on:.0f}"}
FIRST_TOKEN |= {"ratio": "{ratio:.2f}", "noise": "{noise:.2f}"}

FIRST_TOKEN_BY_MODE = {"prompt, tokens": "{tokens:,}", "off, ms": "{ms[off]:.1f}"}
FIRST_TOKEN_BY_MODE |= {"off again": "{ratio[off again]:.3f}", "lines": "{ratio[lines]:.3f}"}
FIRST_TOKEN_BY_MODE |= {"engine's metrics, ms": "{ms[engine metrics]:.1f}"}
FIRST_TOKEN_BY_MODE |= {"ours beside them": "{ratio[metrics]:.3f}", "equal servers": "{spread:.3f}"}

NOTES = {"decode servers": "{peers:d}", "to note a request, us": "{note_us:.1f}"}
NOTES |= {"the log's thread, ms a second": "{thread_ms:.2f}", "share": "{share:.4f}"}

SCALE = {"backend": "{backend}", "ranks": "{ranks:d}", "engine": "{engine}"}
SCALE |= {"known s": "{meet_s:.3g}", "CPU s": "{meet_cpu_s:.3g}"}
SCALE |= {"ms per pair": "{meet_ms_a_pair:.3g}"}
SCALE |= {"KiB per peer": "{kib_a_peer:.3g}", "messages": "{messages:.3g}"}
SCALE |= {"scheduler ms": "{scheduler_ms:.3g}", "reader ms": "{reader_ms:.3g}"}
SCALE |= {"all ms": "{all_ms:.3g}", "at rest %": "{rest_percent:.3g}"}
SCALE |= {"gap s": "{gap_before_s:.3g}", "after s": "{gap_after_s:.3g}"}
SCALE |= {"new after s": "{new_rank_s:.3g}", "lost": "{lost:d}", "workers": "{workers_ended:d}"}

GROWTH = {"backend": "{backend}", "grows with ranks to the power": "{figure}"}
GROWTH |= {"the work": "{work:.2f}"}
GROWTH |= {"stock": "{stock:.2f}", "patched": "{patched:.2f}", "noise": "{noise:.2f}"}


def cells(columns: Columns, row: dict) -> list[str]:
    """A row's cells; a figure that the row lacks, or that is None, gives an empty one."""

    def cell(form: str) -> str:
        try:
            return form.format_map(row)
        except (KeyError, TypeError):
            return ""

    return [cell(form) for form in columns.values()]


def show(title: str, columns: Columns, rows: Iterable[dict]) -> None:
    """Print a table, with formatted numbers on the right."""
    table = Table(title=title)
    for heading, form in columns.items():
        table.add_column(heading, justify="right" if ":" in form else "left")
    for row in rows:
        table.add_row(*cells(columns, row))
    console().print(table)


def console() -> Console:
    """A console that is wide enough for all tables in a log."""
    return Console() if sys.stdout.isatty() else Console(width=200)


def finish(figures: dict, json_file: Path | None) -> None:
    """Print what missed its target (`missed`), write the figures, and exit; 1 if any missed."""
    missed = figures.get("missed", [])
    for line in missed:
        console().print(line, style="red", highlight=False, soft_wrap=True)
    if json_file:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps({**machine(), **figures}, indent=1))
    raise typer.Exit(1 if missed else 0)


def medians(
    sides: dict[str, Callable[[], object]],
    repeats: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Median seconds of each side, measured in turns."""
    times = {name: [] for name in sides}
    for _ in range(repeats):
        for name, side in sides.items():
            start = clock()
            side()
            times[name].append(clock() - start)
    return {name: statistics.median(of_side) for name, of_side in times.items()}
