"""Shows findings, as a table or as JSON."""

import msgspec
from rich.console import Console
from rich.table import Table
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
    table = Table(box=None, pad_edge=False)
    for heading in ("", "check", "found"):
        table.add_column(heading, no_wrap=heading == "", overflow="fold")
    group = ""
    for one in findings:
        if one.group != group:
            group = one.group
            table.add_row("", Text(group, "bold"))
        level = Text(one.level, COLOURS[one.level])
        table.add_row(level, Text(f"  {one.name}"), Text(one.found))
    console.print(table)
    for level in ("wrong", "warning"):
        for one in findings:
            if one.level == level:
                line = Text(f"{level}: ", COLOURS[level])
                console.print(line.append(f"{one.name}: {one.found}: {one.advice}", "not bold"))
    console.print(_summary_line(findings, launch))


def _summary_line(findings: list[Finding], launch: LaunchOptions) -> Text:
    meant = f"{launch.role or 'prefill or decode'} over {launch.backend}"
    wrong = sum(one.level == "wrong" for one in findings)
    warnings = sum(one.level == "warning" for one in findings)
    counts = f"{len(findings)} checks, {wrong} wrong, {warnings} warnings"
    return Text(f"{meant}: {counts}", "red" if wrong else "green")
