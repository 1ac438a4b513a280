"""Accuracy as upstream's pull requests report it: the engine's few-shot script, 200 questions.

The model is a tiny one that is trained on sums in the format of GSM8K's questions.
"""

import re
import subprocess

import pytest
from serving_checks import record
from serving_scenarios import model_folder

from pd_harness import cluster
from pd_harness.cluster import Topology
from pd_harness.cpu_host.arithmetic_models import (
    SHOTS,
    ArithmeticGQA,
    ArithmeticMLA,
    write_problems,
)
from pd_harness.device import device
from pd_harness.releases import release

pytestmark = [
    pytest.mark.serving,
    pytest.mark.nightly,
    pytest.mark.xdist_group("accuracy"),  # they share two trained models
    pytest.mark.timeout(2400),  # training takes minutes, once
    pytest.mark.skipif(device() != "cpu", reason="its models are made for the CPU host"),
    pytest.mark.skipif(release() != "0.5.9", reason="its fleets are those that 0.5.9 gets wrong"),
]

QUESTIONS = 200
NEAR_ONE = 0.95  # minimum score of a single server; with less, the figures prove nothing
SECONDS = 240
STOCK_SECONDS = 60  # several times the patched engine's time

FLEETS = {
    "nixl TP 2 to 1": (Topology("nixl", prefill_tp=2, page_size=16), ArithmeticGQA()),
    "nixl TP 4 to 1, replicated heads": (Topology("nixl", prefill_tp=4), ArithmeticGQA()),
    "ascend MLA, prefill PP 2": (Topology("ascend", prefill_pp=2, page_size=16), ArithmeticMLA()),
    "ascend FIA": (Topology("ascend", fia=True, page_size=16), ArithmeticGQA()),
}


@pytest.fixture(scope="module")
def questions(tmp_path_factory):
    file = tmp_path_factory.mktemp("gsm8k") / "sums.jsonl"
    write_problems(file, QUESTIONS + 1)
    return file


def accuracy(server: cluster.Server, questions, folder, seconds=SECONDS) -> float | None:
    """Returns the accuracy that the engine's script reports; None if it fails or times out."""
    command = [str(cluster.interpreter("stock")), "-m", "sglang.test.few_shot_gsm8k"]
    command += ["--data-path", str(questions), "--num-questions", str(QUESTIONS + 1)]
    command += ["--num-shots", str(SHOTS), "--max-new-tokens", "8", "--parallel", "16"]
    command += ["--host", f"http://{cluster.HOST}", "--port", str(server.port)]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return None
    found = re.search(r"^Accuracy: ([\d.]+)$", done.stdout, re.MULTILINE)
    assert found or done.returncode != 0, done.stderr[-2000:]
    return float(found[1]) if found else None


@pytest.mark.parametrize("name", FLEETS)
def test_accuracy(name, questions, tmp_path):
    topology, model = FLEETS[name]
    folder, logs = model_folder(model), cluster.PD_ENV / "logs" / "serving" / "accuracy"
    single = cluster.engine_server("single", "stock", folder, logs)
    scores = {}
    with cluster.running([single]):
        scores["one server"] = accuracy(single, questions, tmp_path)
    for engine, seconds in (("stock", STOCK_SECONDS), ("patched", SECONDS)):
        servers = cluster.pd_servers(topology, folder, logs / engine, engine, engine)
        with cluster.running(servers):
            scores[engine] = accuracy(servers[-1], questions, tmp_path, seconds)
    record("accuracy", fleet=name, questions=QUESTIONS, **scores)
    assert scores["one server"] >= NEAR_ONE, scores
    assert scores["patched"] == scores["one server"], scores
    assert scores["stock"] is None or scores["stock"] < NEAR_ONE, scores
