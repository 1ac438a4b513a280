"""Checks of GitHub's workflows, whose errors would otherwise show only on GitHub."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import npu_runs
import pytest
import tomllib
import yaml

from pd_harness import cluster, device
from sglang_pd.patchset.patches import supported_releases

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = {path.stem: path for path in (ROOT / ".github" / "workflows").glob("*.yml")}
OPTIONS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
MARKERS = {line.partition(":")[0] for line in OPTIONS["markers"]}
EXPRESSION = re.compile(r"\$\{\{(.*?)\}\}")
STRINGS = re.compile(r"'[^']*'")
CONTEXTS = {"github", "vars", "matrix", "needs", "inputs", "steps"}
FUNCTIONS = {"toJSON", "fromJSON", "always", "cancelled", "failure"}


def read(name: str) -> dict:
    found = yaml.safe_load(WORKFLOWS[name].read_text())
    found["on"] = found.pop(True, found.get("on"))  # YAML 1.1 reads `on` as a boolean
    return found


JOBS = [(name, job) for name in WORKFLOWS for job in read(name)["jobs"]]


def expressions(job: dict) -> list[str]:
    conditions = [one["if"] for one in (job, *job["steps"]) if "if" in one]
    return EXPRESSION.findall(json.dumps(job)) + [str(condition) for condition in conditions]


def variables_of(generations=("A3", "A2"), releases=None, npus=(2, 4)) -> dict[str, str]:
    found = {}
    for generation in generations:
        for release in releases or supported_releases():
            image = npu_runs.variable_name(generation, "IMAGE", release)
            found[image] = f"registry/sglang:v{release}-{generation.lower()}"
        for count in npus:
            runner = npu_runs.variable_name(generation, "RUNNER", count)
            found[runner] = f"self-hosted, {generation.lower()}-{count}"
    return found


def matrix_keys(workflow: str, job: dict) -> set[str]:
    matrix = job.get("strategy", {}).get("matrix", {})
    if isinstance(matrix, str):  # made by a script
        assert workflow == "npu"
        return set(npu_runs.jobs("schedule", variables_of(), {})[0])
    return set(matrix)


@pytest.mark.parametrize("workflow, name", JOBS)
def test_each_job_has_a_timeout(workflow, name):
    assert read(workflow)["jobs"][name]["timeout-minutes"]


@pytest.mark.parametrize("workflow, name", JOBS)
def test_expressions_refer_to_defined_names(workflow, name):
    whole = read(workflow)
    job = whole["jobs"][name]
    known = {
        "matrix": matrix_keys(workflow, job),
        "inputs": set((whole["on"].get("workflow_dispatch") or {}).get("inputs", {})),
        "steps": {step["id"] for step in job["steps"] if "id" in step},
        "needs": {job["needs"]} if "needs" in job else set(),
    }
    for expression in expressions(job):
        rest = STRINGS.sub("''", expression)
        for called in re.findall(r"(\w+)\(", rest):
            assert called in FUNCTIONS, expression
        for path in re.findall(r"[A-Za-z_][\w.*-]*(?!\w|\()", rest):
            context, *more = path.split(".")
            if context in {"true", "false", *FUNCTIONS}:
                continue
            assert context in CONTEXTS, expression
            assert not more or more[0] in known.get(context, more), expression
            if context == "needs":
                assert more[2] in whole["jobs"][more[0]]["outputs"], expression


@pytest.mark.parametrize("workflow, name", JOBS)
def test_commands_are_valid_bash_and_name_existing_files(workflow, name):
    for step in read(workflow)["jobs"][name]["steps"]:
        assert ("run" in step) != ("uses" in step), step
        if "uses" in step:
            assert re.fullmatch(r"actions/[\w-]+@v\d+", step["uses"]), step
            continue
        command = EXPRESSION.sub("x", step["run"])
        checked = subprocess.run(["bash", "-n"], input=command, text=True, capture_output=True)
        assert checked.returncode == 0, checked.stderr
        for path in re.findall(r"(?:scripts|test)/[\w./-]+", command):
            assert (ROOT / path).exists(), path
        for script in re.findall(r"scripts/\w+\.sh", command):
            assert os.access(ROOT / script, os.X_OK), script


# Runs on NPUs


def test_every_release_runs_on_two_and_on_four_npus():
    found = npu_runs.jobs("schedule", variables_of(), {})
    jobs = {(row["release"], row["protocol"], row["npus"]) for row in found}
    assert jobs == {
        (release, protocol, npus)
        for release in supported_releases()
        for protocol in ("sdma", "device_rdma")
        for npus in (2, 4)
    }
    assert len({row["name"] for row in found}) == len(found)
    for row in found:
        assert row["release"] in row["image"]
        generation = row["name"].split()[1][:2].lower()
        assert row["runner"] == ["self-hosted", f"{generation}-{row['npus']}"]


@pytest.mark.parametrize("event, marked", [("pull_request", "few"), ("schedule", "all")])
def test_tests_and_markers_exist(event, marked):
    for row in npu_runs.jobs(event, variables_of(), {}):
        for folder in row["tests"].split():
            assert (ROOT / folder).is_dir(), folder
        words = set(re.findall(r"\w+", row["marked"])) - {"not", "or", "and"}
        assert words <= MARKERS
        assert ("nightly or" in row["marked"]) == (marked == "all")
        assert row["minutes"] == npu_runs.MINUTES[marked]


def test_each_fleet_runs_on_exactly_one_machine(monkeypatch):
    monkeypatch.setenv(device.DEVICE_VARIABLE, "npu")
    by_ranks = {ranks: [] for ranks in range(2, 5)}
    for npus, tests in npu_runs.TESTS.items():
        monkeypatch.setenv(cluster.RANKS_FROM, str(tests["from_ranks"]))
        monkeypatch.setattr(device, "npus", lambda npus=npus: npus)
        monkeypatch.setattr(cluster, "npus", lambda npus=npus: npus)
        for ranks, where in by_ranks.items():
            if cluster.skip_reason("ascend", ranks, ("patched",)) is None:
                where.append(npus)
    assert by_ranks == {2: [2], 3: [4], 4: [4]}


def test_pull_request_runs_few_tests_on_a3():
    found = npu_runs.jobs("pull_request", variables_of(), {})
    assert {row["protocol"] for row in found} == {"sdma"}
    assert {row["marked"] for row in found} == {"not nightly"}
    assert len(found) == 2 * len(supported_releases())


def test_manual_run_uses_given_inputs():
    asked = {"release": "0.5.9", "protocol": "device_rdma", "tests": "few"}
    found = npu_runs.jobs("workflow_dispatch", variables_of(), asked)
    assert {row["name"] for row in found} == {"0.5.9, A2, 2 NPUs", "0.5.9, A2, 4 NPUs"}
    assert {row["marked"] for row in found} == {"not nightly"}
    inputs = read("npu")["on"]["workflow_dispatch"]["inputs"]
    assert inputs["release"]["options"] == [npu_runs.ALL, *supported_releases()]
    assert set(inputs["protocol"]["options"]) == {npu_runs.ALL, *npu_runs.PROTOCOLS.values()}


def run_script(event: str, variables: dict, labels=(), is_fork=False, asked=None) -> dict[str, str]:
    """Runs the script with the variables of the step `runs`, and returns its outputs.

    GitHub passes null for a missing value.
    """
    environment = {
        "EVENT": event,
        "VARIABLES": json.dumps(variables),
        "ASKED": json.dumps(asked),
        "LABELS": json.dumps(list(labels) or None),
        "IS_FORK": json.dumps(is_fork),
    }
    steps = read("npu")["jobs"]["decide"]["steps"]
    (step,) = [step for step in steps if step.get("id") == "runs"]
    assert set(step["env"]) == set(environment)
    command = [sys.executable, "-I", npu_runs.__file__]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return dict(line.split("=", 1) for line in ran.stdout.splitlines())


@pytest.mark.parametrize(
    "event, variables, labels, is_fork, says",
    [
        ("pull_request", {}, ["run-ci"], True, "refs/pull/NUMBER/head"),
        ("pull_request", variables_of(), ["docs"], False, "no label `run-ci`"),
        ("pull_request", variables_of(("A2",)), ["run-ci"], False, "NPU_A3_IMAGE_0_5_"),
        ("schedule", {}, [], False, "No release has both an image and a runner"),
        ("schedule", variables_of(npus=()), [], False, "docs/npu.md"),
    ],
)
def test_reason_is_given_if_nothing_runs(event, variables, labels, is_fork, says):
    found = run_script(event, variables, labels, is_fork)
    assert found["matrix"] == ""
    assert says in found["why"]


def test_no_reason_is_given_if_something_runs():
    only = variables_of(("A3",), ["0.5.23"], npus=(4,))
    found = run_script("pull_request", only, ["run-ci", "docs"])
    assert found["why"] == ""
    (row,) = json.loads(found["matrix"])["include"]
    assert (row["name"], row["from_ranks"]) == ("0.5.23, A3, 4 NPUs", 3)


def test_npu_page_documents_each_variable():
    page = (ROOT / "docs" / "npu.md").read_text()
    known = {name for name in variables_of() if "_A3_" in name}
    workflow = WORKFLOWS["npu"].read_text()
    known |= set(re.findall(r"vars\.(\w+)", workflow))
    assert not {name for name in known if f"`{name}`" not in page}
    assert npu_runs.LABEL in page
