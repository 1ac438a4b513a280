"""Real prefill and decode servers behind the real router, against one server's answers.

Each scenario runs on the stock engine, where it must do what the table says, and on the patched
one, where token ids and logprobs must be right.
"""

import json
import re
import time

import pytest
from serving_scenarios import MIXED, SCENARIOS, Scenario, model_folder, prompts

from sglang_pd import cluster
from sglang_pd.device import DTYPES, await_peers, device

# Starting servers may take START_SECONDS, for the reference once more.
pytestmark = [pytest.mark.serving, pytest.mark.timeout(900)]

# Another TP size or kernel sums in another order. In half precision that may also decide between
# two tokens of nearly one logprob: there and after it, a prompt's answer says nothing.
LOGPROB_TOLERANCE = {"float32": 2e-3, "float16": 0.05}
TOKENS_MUST_AGREE = {"float32": True, "float16": False}
PATIENCE = 180  # seconds; a right answer takes a few, on a busy machine half a minute
STOCK_PATIENCE = 60  # the same prompts take the patched engine a tenth of this


def outcome(
    answers: list[cluster.Answer], ended: list[str], expected: list[cluster.Answer]
) -> tuple[str, str]:
    """What became of the prompts: "right", "wrong", or how the first failed; and the details."""
    failures = [answer.failure for answer in answers if answer.failure]
    if failures:
        of_servers = "".join(f"; the {name} server ended" for name in ended)
        detail = f"{len(failures)} of {len(answers)} prompts: {failures[0]}{of_servers}"
        return failures[0].partition(":")[0], detail
    return _compare(answers, expected)


def _compare(answers, expected) -> tuple[str, str]:
    dtype = DTYPES[device()]
    pairs = list(zip(answers, expected, strict=True))
    other_ids = sum(got.ids != want.ids for got, want in pairs)
    apart = max(_apart(got, want) for got, want in pairs)
    if other_ids and (TOKENS_MUST_AGREE[dtype] or apart > LOGPROB_TOLERANCE[dtype]):
        return "wrong", f"{other_ids} of {len(answers)} prompts have other tokens"
    if apart > LOGPROB_TOLERANCE[dtype]:
        return "wrong", f"same tokens, but logprobs differ by up to {apart:.4f}"
    slowest = max(answer.seconds for answer in answers)
    ties = f"{other_ids} prompts part at a tie, " if other_ids else ""
    return "right", f"{ties}logprobs within {apart:.1e}, {slowest:.1f} s"


def _apart(got: cluster.Answer, want: cluster.Answer) -> float:
    """How far logprobs are apart, up to and with the first token that differs."""
    others = (at for at, (a, b) in enumerate(zip(got.ids, want.ids, strict=True)) if a != b)
    end = next(others, len(want.ids)) + 1
    logprobs = zip(got.logprobs[:end], want.logprobs[:end], strict=True)
    return max(abs(a - b) for a, b in logprobs)


def serve(
    scenario: Scenario, prefill_engine: str, decode_engine: str, seconds: float
) -> tuple[list[cluster.Answer], list[str]]:
    """Answers of a fleet made for the scenario and stopped again; names of servers that ended."""
    label = f"{scenario.name}-{prefill_engine}-{decode_engine}"
    servers = cluster.pd_servers(
        scenario.topology,
        model_folder(scenario.model),
        cluster.PD_ENV / "logs" / "serving" / label,
        prefill_engine,
        decode_engine,
    )
    router = servers[-1]
    with cluster.running(servers):
        if scenario.topology.backend == "ascend":
            await_peers()
        answers = cluster.ask(router.url, prompts(), scenario.new_tokens, seconds)
        if scenario.topology.retracts and not any(answer.failure for answer in answers):
            assert retractions(servers[1].log.read_text(errors="replace")), "decode retracted none"
        return answers, [server.name for server in servers if server.has_ended()]


def retractions(log: str) -> int:
    """Requests that a decode server has retracted by its log."""
    return sum(map(int, re.findall(r"#retracted_reqs: (\d+)", log)))


def on(test: str, scenarios: list[Scenario]) -> list:
    """Parameters for the scenarios, those that are not always in ``test`` marked nightly."""
    return [
        pytest.param(
            scenario,
            id=scenario.name,
            marks=[] if test in scenario.always else [pytest.mark.nightly],
        )
        for scenario in scenarios
    ]


def record(scenario: str, engine: str, outcome: str, detail: str, seconds: float) -> None:
    """Append what a scenario did to .pd-env/evidence/serving.jsonl, for `scripts/evidence.sh`."""
    file = cluster.PD_ENV / "evidence" / "serving.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    line = {
        "scenario": scenario,
        "engine": engine,
        "outcome": outcome,
        "seconds": round(seconds, 1),
        "detail": detail,
    }
    with file.open("a") as out:
        out.write(json.dumps(line) + "\n")


@pytest.fixture
def serves(reference):
    """Function: serve a scenario, record its outcome, and return it.

    It skips the test where this device cannot serve it.
    """

    def served(scenario, prefill_engine, decode_engine, seconds) -> tuple[str, str]:
        topology, engines = scenario.topology, (prefill_engine, decode_engine)
        if reason := cluster.why_not_here(topology.backend, sum(topology.ranks), engines):
            pytest.skip(reason)
        expected = reference(scenario.model, scenario.new_tokens)
        start = time.monotonic()
        answers, ended = serve(scenario, prefill_engine, decode_engine, seconds)
        result, detail = outcome(answers, ended, expected)
        pair = dict.fromkeys((prefill_engine, decode_engine))
        record(scenario.name, "-to-".join(pair), result, detail, time.monotonic() - start)
        return result, detail

    return served


@pytest.mark.parametrize("scenario", on("patched", SCENARIOS))
def test_patched(scenario, serves):
    result, detail = serves(scenario, "patched", "patched", PATIENCE)
    assert result == "right", detail


@pytest.mark.parametrize("scenario", on("stock", SCENARIOS))
def test_stock(scenario, serves):
    """Keeps the table honest: were the stock engine right, the patch would not be needed."""
    result, detail = serves(scenario, "stock", "stock", STOCK_PATIENCE)
    assert result == scenario.stock, detail


@pytest.mark.parametrize("engines", [("stock", "patched"), ("patched", "stock")], ids="-to-".join)
@pytest.mark.parametrize("scenario", on("mixed", MIXED))
def test_mixed(scenario, engines, serves):
    """A rollout goes server by server: each half may be patched before the other."""
    result, detail = serves(scenario, *engines, PATIENCE)
    assert result == "right", detail
