"""Shows findings, as a table or as JSON."""

from itertools import groupby

import msgspec
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from sglang_pd import __version__
from sglang_pd.doctor.findings import Finding
from sglang_pd.doctor.host import LaunchOptions

COLOURS = {"ok": "green", "warning": "yellow", "wrong": "bold red"}


def as_json(findings: list[Finding], launch: LaunchOptions) -> dict:
    return {
        "tool": __version__,
        "launch": {"role": launch.role or None, "backend": launch.backend},
        "wrong": sum(one.level == "wrong" for one in findings),
        "warnings": sum(one.level == "warning" for one in findings),
        "findings": [msgspec.to_builtins(one) for one in findings],
    }


def show(findings: list[Finding], launch: LaunchOptions, console: Console) -> None:
    """Prints a table by group, then advice, on `wrong` findings first."""
    texts = (Column(heading, overflow="fold") for heading in ("check", "found"))
    table = Table(Column(no_wrap=True, overflow="fold"), *texts, box=None, pad_edge=False)
    for group, some in groupby(findings, key=lambda one: one.group):
        table.add_row("", Text(group, "bold"))
        for one in some:
            level = Text(one.level, COLOURS[one.level])
            table.add_row(level, Text(f"  {one.name}"), Text(one.found))
    console.print(table)
    wrong = [one for one in findings if one.level == "wrong"]
    warnings = [one for one in findings if one.level == "warning"]
    for one in (*wrong, *warnings):
        line = Text(f"{one.level}: ", COLOURS[one.level])
        console.print(line.append(f"{one.name}: {one.found}: {one.advice}", "not bold"))
    meant = f"{launch.role or 'prefill or decode'} over {launch.backend}"
    counts = f"{len(findings)} checks, {len(wrong)} wrong, {len(warnings)} warnings"
    console.print(Text(f"{meant}: {counts}", "red" if wrong else "green"))
