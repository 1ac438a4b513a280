"""Reference answers."""

import hashlib
import json
import os

import pytest
from serving_scenarios import model_folder, prompts

from pd_harness import cluster
from pd_harness.cpu_host.models import TinyModel
from pd_harness.device import device


@pytest.fixture(scope="session")
def reference():
    """A function that returns one stock server's (TP 1) answers, to `prompts` or other prompts.

    The function saves answers in .pd-env/, by a hash of prompts, weights and answer length. On an
    NPU it uses the patched engine, the only one, which equals stock without disaggregation.
    """

    def answers(model: TinyModel, new_tokens: int, asked=None) -> list[cluster.Answer]:
        asked = asked or prompts()
        question = json.dumps([asked, new_tokens]).encode()
        weights = (model_folder(model) / "model.safetensors").read_bytes()
        key = hashlib.sha256(question + weights).hexdigest()[:16]
        kept = cluster.RELEASE_ENV / "references" / f"{device()}-{model.name}-{key}.json"
        if not kept.exists():
            made = _ask_single_server(model, new_tokens, asked)
            kept.parent.mkdir(parents=True, exist_ok=True)
            draft = kept.with_suffix(f".{os.getpid()}")
            draft.write_text(json.dumps([[answer.ids, answer.logprobs] for answer in made]))
            draft.replace(kept)
        rows = json.loads(kept.read_text())
        return [cluster.Answer(tuple(ids), tuple(logprobs)) for ids, logprobs in rows]

    return answers


def _ask_single_server(model: TinyModel, new_tokens: int, asked) -> list[cluster.Answer]:
    logs = cluster.PD_ENV / "logs" / "serving" / "reference"
    engine = "patched" if device() == "npu" else "stock"
    server = cluster.engine_server("single", engine, model_folder(model), logs)
    with cluster.running([server]):
        made = cluster.ask(server.url, asked, new_tokens, seconds=180)
    for answer in made:
        assert answer.failure is None, answer.failure
        assert len(answer.ids) == new_tokens, answer
    return made
