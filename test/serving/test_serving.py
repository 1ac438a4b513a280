"""Real prefill and decode servers behind the real router, against one server's answers.

Each scenario runs on the stock engine, where it must do what the table says, and on the patched
one, where token ids and logprobs must be right.
"""

import pytest
from serving_scenarios import MIXED, NEW_TOKENS, SCENARIOS, Scenario, model_folder, prompts

from sglang_pd import cluster

# Starting servers may take START_SECONDS, for the reference once more.
pytestmark = [pytest.mark.serving, pytest.mark.timeout(900)]

LOGPROB_TOLERANCE = 2e-3  # float32, other TP size, other order of summation
PATIENCE = 180  # seconds; a right answer takes a few, on a busy machine half a minute
STOCK_PATIENCE = 45  # the same prompts take the patched engine a tenth of this


def outcome_of(answers: list[cluster.Answer], expected: list[cluster.Answer]) -> tuple[str, str]:
    """What became of the prompts: "right", "wrong", or how the first failed; and the details."""
    failures = [answer.failure for answer in answers if answer.failure]
    if not failures:
        return _compare(answers, expected)
    detail = f"{len(failures)} of {len(answers)} prompts: {failures[0]}"
    return failures[0].partition(":")[0], detail


def _compare(answers, expected) -> tuple[str, str]:
    other_ids = sum(got.ids != want.ids for got, want in zip(answers, expected, strict=True))
    if other_ids:
        return "wrong", f"{other_ids} of {len(answers)} prompts have other tokens"
    apart = max(
        abs(got - want)
        for answer, reference in zip(answers, expected, strict=True)
        for got, want in zip(answer.logprobs, reference.logprobs, strict=True)
    )
    if apart > LOGPROB_TOLERANCE:
        return "wrong", f"same tokens, but logprobs differ by up to {apart:.4f}"
    slowest = max(answer.seconds for answer in answers)
    return "right", f"logprobs within {apart:.1e}, {slowest:.1f} s"


def serve(
    scenario: Scenario, prefill_engine: str, decode_engine: str, seconds: float
) -> list[cluster.Answer]:
    """The answers of a fleet made for the scenario and stopped again."""
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
        return cluster.ask(router.url, prompts(), NEW_TOKENS, seconds)


def on(engine: str, scenarios: list[Scenario]) -> list:
    """Parameters for the scenarios, those that do not always run on ``engine`` marked nightly."""
    return [
        pytest.param(
            scenario,
            id=scenario.name,
            marks=[] if engine in scenario.always else [pytest.mark.nightly],
        )
        for scenario in scenarios
    ]


@pytest.mark.parametrize("scenario", on("patched", SCENARIOS))
def test_patched(scenario, reference, record):
    expected = reference(scenario.model)
    outcome, detail = outcome_of(serve(scenario, "patched", "patched", PATIENCE), expected)
    record(scenario.name, "patched", outcome, detail)
    assert outcome == "right", detail


@pytest.mark.parametrize("scenario", on("stock", SCENARIOS))
def test_stock(scenario, reference, record):
    """Keeps the table honest: were the stock engine right, the patch would not be needed."""
    expected = reference(scenario.model)
    outcome, detail = outcome_of(serve(scenario, "stock", "stock", STOCK_PATIENCE), expected)
    record(scenario.name, "stock", outcome, detail)
    assert outcome == scenario.stock, detail


@pytest.mark.parametrize("engines", [("stock", "patched"), ("patched", "stock")], ids="-to-".join)
@pytest.mark.parametrize("scenario", on("mixed", MIXED))
def test_mixed(scenario, engines, reference, record):
    """A rollout goes server by server: each half may be patched before the other."""
    expected = reference(scenario.model)
    outcome, detail = outcome_of(serve(scenario, *engines, PATIENCE), expected)
    record(scenario.name, "-to-".join(engines), outcome, detail)
    assert outcome == "right", detail
