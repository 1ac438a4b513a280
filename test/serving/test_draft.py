"""Servers that decode speculatively, with a draft model on both sides or on one.

Token ids equal those of one server without a draft, whatever the draft proposes. The number of
accepted draft tokens shows whether the draft's KV and hidden states arrived.
"""

import pytest
from server_pairs import LOGS, ended, wait_for_peers
from serving_checks import (
    LOST_SECONDS,
    SLOW_SECONDS,
    HangDetector,
    heads_moved_by,
    outcome,
    record,
    retry_memfabric_faults,
    run_tool,
    running,
)
from serving_scenarios import (
    DECODE,
    DRAFT_SCENARIOS,
    SIDES,
    Scenario,
    marks,
    model_folder,
    prompts,
)

from pd_harness import cluster
from pd_harness.cluster import RELEASE_ENV
from pd_harness.cpu_host.drafts import make_draft
from pd_harness.cpu_host.models import TinyModel
from pd_harness.device import device
from pd_harness.ports import free_ports

pytestmark = [
    pytest.mark.serving,
    pytest.mark.timeout(900),  # starts may take START_TIMEOUT_S, three times
    pytest.mark.skipif(device() == "npu", reason="its drafts are made for the CPU host"),
]

PATIENCE = 120  # seconds
NEW_TOKENS = 40


@pytest.fixture(scope="module")
def single_server_rounds():
    """A function that returns the verify rounds per prompt of one stock server with the draft."""
    known: dict[tuple, list[int]] = {}

    def rounds(drafted: Scenario) -> list[int]:
        key = (drafted.model, drafted.topology.page_size, drafted.topology.attention)
        if key not in known:
            server = single_server(drafted)
            with cluster.running([server]):
                known[key] = [answer.rounds for answer in ask(server)]
        return known[key]

    return rounds


def single_server(drafted: Scenario) -> cluster.Server:
    """Returns one stock server with the scenario's model and draft."""
    topology, folder = drafted.topology, model_folder(drafted.model)
    options = {"page_size": topology.page_size, "attention": topology.attention}
    options["draft"] = draft_folder(drafted.model)
    return cluster.engine_server("single", "stock", folder, LOGS / "drafted", **options)


def draft_folder(model: TinyModel):
    return make_draft(model, RELEASE_ENV / "models")


def ask(server: cluster.Server, at_once: int | None = 1, **more) -> list[cluster.Answer]:
    """Asks one by one, so that a prompt has the same chunks in every fleet.

    At the end of each chunk but the last, the engine's draft reads the token that the target would
    generate there, not the prompt's token.
    """
    return cluster.ask(server.url, prompts(), NEW_TOKENS, PATIENCE, at_once, **more)


def fleet(drafted: Scenario, engine: str, **environment: str) -> tuple[cluster.Server, ...]:
    topology, logs = drafted.topology, LOGS / f"draft-{drafted.name}-{engine}"
    given = (topology, engine, model_folder(drafted.model), logs, *free_ports(1))
    environment = {**topology.memfabric(engine), **environment}
    prefill, decode = (
        make(
            *given,
            environment=environment,
            draft=draft_folder(drafted.model) if side in drafted.sides else None,
        )
        for side, make in zip(SIDES, (cluster.prefill_server, cluster.decode_server))
    )
    return prefill, decode, cluster.router([prefill], [decode], logs)


@pytest.fixture
def serves(reference, single_server_rounds):
    """A function that runs a scenario's fleet, and returns (answers, outcome, detail).

    It asks the prompts one by one, and if these answers are right, all at once. The answers are
    those of the first pass; the outcome, which is recorded, covers both.
    """

    def served(drafted: Scenario, engine: str) -> tuple[list[cluster.Answer], str, str]:
        expected, by_one = reference(drafted.model, NEW_TOKENS), single_server_rounds(drafted)

        def answered() -> tuple[list[cluster.Answer], str, str]:
            servers = fleet(drafted, engine)
            with running(servers):
                wait_for_peers(drafted.topology, engine)
                may_hang = engine == "stock" and drafted.stock == "hang"
                lost_after = LOST_SECONDS if may_hang else SLOW_SECONDS
                answers = ask(servers[-1], is_lost=HangDetector(*servers[:2], lost_after))
                result, detail = outcome(answers, ended(servers), expected)
                if result == "right":
                    lost = HangDetector(*servers[:2], lost_after)
                    together = ask(servers[-1], at_once=None, is_lost=lost)
                    result, detail = outcome(together, ended(servers), expected)
                if result == "right":
                    assert heads_moved_by(*servers[:2]) == drafted.moves_heads(engine, engine)
            return answers, result, detail

        answers, result, detail = retry_memfabric_faults(answered)
        rounds = [answer.rounds for answer in answers]
        record(
            "draft",
            scenario=drafted.name,
            engine=engine,
            outcome=result,
            rounds=rounds,
            tokens_a_round=tokens_a_round(rounds),
            tokens_alone=tokens_a_round(by_one),
            as_alone=rounds == by_one,
            detail=detail,
        )
        return answers, result, detail

    return served


def tokens_a_round(rounds: list[int]) -> float:
    """Returns tokens per verify round, without a request's first token; 1 if none is accepted."""
    return round(len(rounds) * (NEW_TOKENS - 1) / sum(rounds), 2) if any(rounds) else 1.0


def parameters() -> list:
    return [pytest.param(one, id=one.name, marks=marks(one, ())) for one in DRAFT_SCENARIOS]


@pytest.mark.parametrize("drafted", parameters())
def test_patched(drafted, serves, single_server_rounds):
    answers, result, detail = serves(drafted, "patched")
    assert result == "right", detail
    rounds, by_one = [answer.rounds for answer in answers], single_server_rounds(drafted)
    assert tokens_a_round(by_one) > 1.1, f"this draft foresees nothing: {by_one}"
    if drafted.sides == SIDES:
        assert rounds == by_one, "the draft lacks what it had in one server"
    elif drafted.sides == DECODE:
        assert sum(by_one) < sum(rounds), "the draft has what nobody gave it"
    else:
        assert not any(rounds), "decode has no draft"


@pytest.mark.nightly
@pytest.mark.parametrize("drafted", parameters())
def test_stock(drafted, serves):
    """Checks the table's outcomes on the stock engine."""
    _, result, detail = serves(drafted, "stock")
    assert result == drafted.stock, detail


@pytest.mark.nightly
def test_verify_reports_draft_acceptance():
    """`sglang-pd verify` compares the fleet's acceptance with one server's that has the draft."""
    (drafted,) = (one for one in DRAFT_SCENARIOS if one.name == "nixl-both_tp2_to_1")
    servers, single = fleet(drafted, "patched", SGLANG_PD_VERIFY="1"), single_server(drafted)
    with cluster.running([*servers, single]):
        asked = ("--router", servers[-1].url, "--reference", single.url, "--lengths", "40")
        status, found = run_tool(
            "verify", *asked, "--requests", "2", "--new-tokens", str(NEW_TOKENS)
        )
    assert status == 0, found
    steps = found["tokens_a_verify_step"]
    assert steps["fleet"] == steps["reference"] > 1.1, steps
