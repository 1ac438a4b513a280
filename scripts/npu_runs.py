#!/usr/bin/env python3
"""Print what .github/workflows/npu.yml runs, or why it runs nothing, for $GITHUB_OUTPUT.

Reads the event and the repository's variables from the environment, needs only Python 3.10, and
prints `matrix=JSON` and `why=TEXT`, one of which is empty. docs/npu.md describes the variables.
"""

import itertools
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

ENGINES = Path(__file__).resolve().parents[1] / "python" / "engines"
LABEL = "run-ci"  # marks a pull request that may use NPUs
PROTOCOLS = {"A3": "sdma", "A2": "device_rdma"}  # MemFabric's protocol on each generation
# Fleets that fit on two NPUs run there, larger ones on four, so that nothing runs twice.
TESTS = {
    2: {"tests": "test/engine test/npu test/transport test/serving", "from_ranks": 1},
    4: {"tests": "test/transport test/serving", "from_ranks": 3},
}
MINUTES = {"few": 45, "all": 300}
ALL = "all"


def releases() -> list[str]:
    """All releases that the patch set supports."""
    return sorted(file.parent.name for file in ENGINES.glob("*/release.toml"))


def variable_name(generation: str, what: str, which: object) -> str:
    """The name of a repository's variable, such as NPU_A3_IMAGE_0_5_9."""
    return f"NPU_{generation}_{what}_{str(which).replace('.', '_')}"


def skip_reason(event: str, labels: list[str], is_fork: bool) -> str:
    """Why this event runs nothing on NPUs; empty if it does."""
    if event != "pull_request":
        return ""
    if is_fork:
        return (
            "GitHub gives no variables to pull requests from forks, so no image and no runner is "
            "known here. A maintainer can run it by hand: Actions, npu, Run workflow, with "
            "`refs/pull/NUMBER/head` as its ref."
        )
    if LABEL not in labels:
        return (
            f"The pull request has no label `{LABEL}`: a maintainer sets it when it is worth NPUs."
        )
    return ""


def jobs(event: str, variables: Mapping[str, str], asked: Mapping[str, str]) -> list[dict]:
    """A job for each release, generation and number of NPUs that has an image and a runner.

    Pull requests run the tests that are not nightly, on A3; nightly and manual runs run all tests.
    ``asked`` are a manual run's inputs, which may select few tests, one release or one protocol.
    """
    few = event == "pull_request" or asked.get("tests") == "few"
    protocols = {"A3": PROTOCOLS["A3"]} if event == "pull_request" else PROTOCOLS
    found = []
    for generation, release, npus in itertools.product(protocols, releases(), TESTS):
        protocol = protocols[generation]
        is_asked = asked.get("protocol", ALL) in (ALL, protocol)
        is_asked = is_asked and asked.get("release", ALL) in (ALL, release)
        image = variables.get(variable_name(generation, "IMAGE", release))
        runner = variables.get(variable_name(generation, "RUNNER", npus))
        if is_asked and image and runner:
            found.append(
                {
                    "name": f"{release}, {generation}, {npus} NPUs",
                    "release": release,
                    "protocol": protocol,
                    "npus": npus,
                    "image": image,
                    "runner": runner.replace(",", " ").split(),
                    "marked": "not nightly" if few else "nightly or not nightly",
                    "minutes": MINUTES["few" if few else "all"],
                    **TESTS[npus],
                }
            )
    return found


def plan_jobs(
    event: str,
    variables: Mapping[str, str],
    asked: Mapping[str, str],
    labels: list[str],
    is_fork: bool,
) -> tuple[list[dict], str]:
    """The jobs, or the reason why there are none."""
    if why := skip_reason(event, labels, is_fork):
        return [], why
    if found := jobs(event, variables, asked):
        return found, ""
    image, runner = variable_name("A3", "IMAGE", releases()[0]), variable_name("A3", "RUNNER", 2)
    return [], (
        "No release has both an image and a runner for this request. Set the repository's "
        f"variables, such as {image} and {runner}: docs/npu.md."
    )


def main() -> int:
    """Read the environment and print the jobs."""
    given = (
        json.loads(os.environ.get(name) or "null") for name in ("VARIABLES", "ASKED", "LABELS")
    )
    variables, asked, labels = given
    is_fork = os.environ.get("IS_FORK") == "true"
    found, why = plan_jobs(os.environ["EVENT"], variables or {}, asked or {}, labels or [], is_fork)
    print(f"matrix={json.dumps({'include': found}) if found else ''}")
    print(f"why={why}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
