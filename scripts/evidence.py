"""The steps of `scripts/evidence.sh`, which describes what each measures."""

import enum
import functools
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from evidence_rows import RELEASE, ROOT, bench, bench_file, save_measures, save_rows
from evidence_tables import report_lines
from scale_plot import draw

REPORT = ROOT / "docs" / "evidence" / f"{RELEASE}.md"


def run_timed(command: list[str], folder: Path = ROOT) -> tuple[int, float, str]:
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


def measure_setup() -> dict:
    list_files = ["git", "ls-files", "-co", "--exclude-standard", "-z"]
    listed = subprocess.run(list_files, cwd=ROOT, capture_output=True, check=True, text=True)
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
    return {"setup_cold": cold, "setup_warm": warm, "setup_gib": round(size / 2**30, 2)}


def measure_demo() -> dict:
    return {"demo": run_demo(), "demo_stock": run_demo("--stock")}


def run_demo(*options: str) -> dict:
    """Run the demo; `verdict` is its summary line."""
    status, seconds, output = run_timed(["scripts/demo.sh", *options])
    found = re.findall(r"^\d+ of \d+ prompts have equal tokens.*$", output, re.MULTILINE)
    verdict = found[-1] if found else "the servers did not start"
    return {"status": status, "seconds": seconds, "verdict": verdict}


def measure_tests() -> dict:
    return {"tests": run_tests()}


def measure_nightly() -> dict:
    return {"nightly": run_tests("--nightly", "--durations=0", "--durations-min=3")}


def run_tests(*options: str) -> dict:
    status, seconds, output = run_timed(["scripts/test.sh", *options])
    found = re.findall(r"^(?:=+ )?((?:\d+ \w+,? ?)+) in ", output, re.MULTILINE)
    summary = "; ".join(found) if found else "pytest did not finish"
    return {"status": status, "seconds": seconds, "summary": summary}


def run_bench(name: str) -> dict:
    """Run a benchmark; its figures record missed targets, so only missing figures are an error."""
    file = bench_file(name)
    file.unlink(missing_ok=True)
    run_timed(["scripts/bench.sh", name, "--json", str(file)])
    if not file.exists():
        sys.exit(f"evidence: scripts/bench.sh {name} failed")
    return {}


def report() -> None:
    """Write the report atomically, the plot, and copies of all measurements."""
    REPORT.parent.mkdir(exist_ok=True)
    draft = REPORT.with_suffix(".draft")
    draft.write_text("\n".join(report_lines()).rstrip("\n") + "\n")
    draft.replace(REPORT)
    if found := bench("scale"):
        draw(found["rows"], REPORT.with_name(f"scale-{RELEASE}.svg"))
    save_rows()
    print(f"evidence: wrote {REPORT.relative_to(ROOT)}")


# Each returns its entries of `measures.json`.
MEASURE: dict[str, Callable[[], dict]] = {
    "setup": measure_setup,
    "demo": measure_demo,
    "tests": measure_tests,
    "nightly": measure_nightly,
    "planning": functools.partial(run_bench, "plan"),
    "cpu-copy": functools.partial(run_bench, "cpu-copy"),
    "serve": functools.partial(run_bench, "serve"),
    "verify": functools.partial(run_bench, "verify"),
    "metrics": functools.partial(run_bench, "metrics"),
    "wire": functools.partial(run_bench, "wire"),
    "heads": functools.partial(run_bench, "heads"),
    "scale": functools.partial(run_bench, "scale"),
}
Step = enum.StrEnum("Step", {name: name for name in (*MEASURE, "report")})


def main(
    steps: Annotated[
        list[Step] | None, typer.Argument(show_default=False, help="Default: all steps.")
    ] = None,
) -> None:
    """Run these steps, one after the other."""
    for step in steps or Step:
        if step == Step.report:
            report()
        else:
            save_measures(step, **MEASURE[step]())


if __name__ == "__main__":
    typer.run(main)
