"""The steps of `scripts/evidence.sh`, which describes what each measures."""

import datetime
import enum
import functools
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer
from evidence_rows import RELEASE, ROOT, bench, bench_file, measures, save_measures, save_rows
from evidence_tables import tables
from scale_plot import draw

REPORT = ROOT / "docs" / "evidence" / f"{RELEASE}.md"


def run_timed(command: list[str], folder: Path) -> tuple[int, float, str]:
    """Run a command and show its output as it comes; returns status, seconds and output."""
    start = time.monotonic()
    process = subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    lines = []
    for line in process.stdout:
        sys.stdout.write(line)
        lines.append(line)
    return process.wait(), round(time.monotonic() - start, 1), "".join(lines)


def measure_setup() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        check=True,
        text=True,
    )
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "checkout"
        for name in filter(None, listed.stdout.split("\0")):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)
        cold_status, cold, _ = run_timed(["scripts/setup.sh"], copy)
        warm_status, warm, _ = run_timed(["scripts/setup.sh"], copy)
        if cold_status or warm_status:
            sys.exit("evidence: scripts/setup.sh failed in a fresh copy")
        size = sum(path.lstat().st_size for path in (copy / ".pd-env").rglob("*") if path.is_file())
    save_measures(setup_cold=cold, setup_warm=warm, setup_gib=round(size / 2**30, 2))


def measure_demo() -> None:
    status, seconds, output = run_timed(["scripts/demo.sh"], ROOT)
    stock_status, stock_seconds, stock_output = run_timed(["scripts/demo.sh", "--stock"], ROOT)
    save_measures(
        demo={"status": status, "seconds": seconds, "verdict": verdict(output)},
        demo_stock={
            "status": stock_status,
            "seconds": stock_seconds,
            "verdict": verdict(stock_output),
        },
    )


def verdict(output: str) -> str:
    """The demo's summary line."""
    found = re.findall(r"^\d+ of \d+ prompts have equal tokens.*$", output, re.MULTILINE)
    return found[-1] if found else "the servers did not start"


def measure_tests() -> None:
    save_measures(tests=run_tests(["scripts/test.sh"]))


def measure_nightly() -> None:
    save_measures(nightly=run_tests(["scripts/test.sh", "--nightly", "--durations=25"]))


def run_bench(name: str) -> None:
    """Run a benchmark; its figures record missed targets, so only missing figures are an error."""
    file = bench_file(name)
    file.unlink(missing_ok=True)
    run_timed(["scripts/bench.sh", name, "--json", str(file)], ROOT)
    if not file.exists():
        sys.exit(f"evidence: scripts/bench.sh {name} failed")


def run_tests(command: list[str]) -> dict:
    status, seconds, output = run_timed(command, ROOT)
    found = re.findall(r"^=*\s*((?:\d+ \w+,? ?)+) in ", output, re.MULTILINE)
    summary = "; ".join(found) if found else "pytest did not finish"
    return {"status": status, "seconds": seconds, "summary": summary}


def report() -> None:
    """Write the report atomically, the plot, and copies of all measurements."""
    lines = tables()
    text = "\n".join(lines).rstrip("\n") + "\n"
    REPORT.parent.mkdir(exist_ok=True)
    draft = REPORT.with_suffix(".draft")
    draft.write_text(text)
    draft.replace(REPORT)
    if (found := bench("scale")) is not None:
        draw(found["rows"], REPORT.with_name(f"scale-{RELEASE}.svg"))
    save_rows()
    print(f"evidence: wrote {REPORT.relative_to(ROOT)}")


STEPS = {
    "setup": measure_setup,
    "demo": measure_demo,
    "tests": measure_tests,
    "nightly": measure_nightly,
    "planning": functools.partial(run_bench, "plan"),
    "cpu-copy": functools.partial(run_bench, "cpu-copy"),
    "serve": functools.partial(run_bench, "serve"),
    "verify": functools.partial(run_bench, "verify"),
    "scale": functools.partial(run_bench, "scale"),
    "report": report,
}


Step = enum.StrEnum("Step", {name: name for name in STEPS})


def main(
    steps: Annotated[
        list[Step] | None, typer.Argument(show_default=False, help="Default: all steps.")
    ] = None,
) -> None:
    """Run these steps, one after the other."""
    for step in steps or Step:
        STEPS[step]()
        if step != Step.report:
            save_measures(days={**measures().get("days", {}), step: str(datetime.date.today())})


if __name__ == "__main__":
    typer.run(main)
