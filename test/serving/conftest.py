"""Reference answers, and a record of what each scenario did."""

import hashlib
import json
import time

import pytest
from serving_scenarios import NEW_TOKENS, model_folder, prompts

from sglang_pd import cluster
from sglang_pd.cpu_host.models import TinyModel


@pytest.fixture(scope="session")
def reference():
    """Function: what one stock server, TP 1, answers to the prompts on a model.

    Its answers are kept in .pd-env/, by all that decides them.
    """

    def answers(model: TinyModel) -> list[cluster.Answer]:
        asked = json.dumps([model.name, prompts(), NEW_TOKENS])
        key = hashlib.sha256(asked.encode()).hexdigest()[:16]
        kept = cluster.PD_ENV / "references" / f"{key}.json"
        if not kept.exists():
            made = _ask_single_server(model)
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.write_text(json.dumps([[answer.ids, answer.logprobs] for answer in made]))
        rows = json.loads(kept.read_text())
        return [cluster.Answer(tuple(ids), tuple(logprobs)) for ids, logprobs in rows]

    return answers


def _ask_single_server(model: TinyModel) -> list[cluster.Answer]:
    logs = cluster.PD_ENV / "logs" / "serving" / "reference"
    server = cluster.engine_server("single", "stock", model_folder(model), logs)
    with cluster.running([server]):
        made = cluster.ask(server.url, prompts(), NEW_TOKENS, seconds=180)
    failures = [answer.failure for answer in made if answer.failure]
    assert not failures, failures
    return made


@pytest.fixture
def record():
    """Function: append a scenario's outcome to .pd-env/evidence/serving.jsonl."""
    start = time.monotonic()

    def write(scenario: str, engine: str, outcome: str, detail: str) -> None:
        file = cluster.PD_ENV / "evidence" / "serving.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        line = {
            "scenario": scenario,
            "engine": engine,
            "outcome": outcome,
            "seconds": round(time.monotonic() - start, 1),
            "detail": detail,
        }
        with file.open("a") as out:
            out.write(json.dumps(line) + "\n")

    return write
