"""Real prefill and decode servers behind the real router, against one server's answers.

Each scenario runs on the stock engine, where it must do what the table says, and on the patched
one, where token ids and logprobs must be right.
"""

import time

import pytest
from serving_checks import Lost, outcome, record, retractions
from serving_scenarios import MIXED, SCENARIOS, Scenario, model_folder, prompts

from pd_harness import cluster
from pd_harness.device import await_peers

# Starting servers may take START_SECONDS, for the reference once more.
pytestmark = [pytest.mark.serving, pytest.mark.timeout(900)]

PATIENCE = 180  # seconds; a right answer takes a few, on a busy machine half a minute
STOCK_PATIENCE = 60  # the same prompts take the patched engine a tenth of this


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
        answers = cluster.ask(
            router.url, prompts(), scenario.new_tokens, seconds, is_lost=Lost(*servers[:2])
        )
        if scenario.topology.retracts and not any(answer.failure for answer in answers):
            assert retractions(servers[1].log.read_text(errors="replace")), "decode retracted none"
        return answers, [server.name for server in servers if server.has_ended()]


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
        record(
            "serving",
            scenario=scenario.name,
            engine="-to-".join(dict.fromkeys(engines)),
            outcome=result,
            seconds=round(time.monotonic() - start, 1),
            detail=detail,
        )
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
