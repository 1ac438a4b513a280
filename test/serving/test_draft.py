"""Servers that decode speculatively: a draft model on both sides, or on one.

Whatever a draft proposes, token ids are those of one server without it; how many of its tokens are
accepted says whether what it needs has come with the KV.
"""

import pytest
from serving_checks import (
    LOST_SECONDS,
    SLOW_SECONDS,
    Lost,
    outcome,
    record,
    retry_memfabric_faults,
    running,
    tool,
)
from serving_scenarios import (
    DECODE,
    DRAFTED,
    DRAFTED_EVERY_RUN,
    SIDES,
    Drafted,
    marks,
    model_folder,
    prompts,
)

from pd_harness import cluster
from pd_harness.cluster import OF_RELEASE, PD_ENV
from pd_harness.cpu_host.drafts import make_draft
from pd_harness.cpu_host.memfabric import memfabric_for
from pd_harness.cpu_host.models import TinyModel
from pd_harness.device import await_peers, device
from pd_harness.ports import free_ports

pytestmark = [
    pytest.mark.serving,
    pytest.mark.timeout(900),  # servers may take START_SECONDS, three times
    pytest.mark.skipif(device() == "npu", reason="its drafts are made for the CPU host"),
]

PATIENCE = 120  # seconds
NEW_TOKENS = 40


@pytest.fixture(scope="module")
def drafted_alone():
    """Function: rounds, for each prompt, of one stock server with a model's draft."""
    known: dict[tuple, list[int]] = {}

    def rounds(drafted: Drafted) -> list[int]:
        key = (drafted.model, drafted.topology.page_size, drafted.topology.attention)
        if key not in known:
            server = alone(drafted)
            with cluster.running([server]):
                answers = ask(server)
            known[key] = [answer.rounds for answer in answers]
        return known[key]

    return rounds


def alone(drafted: Drafted) -> cluster.Server:
    """One stock server with the scenario's model and draft."""
    return cluster.engine_server(
        "single",
        "stock",
        model_folder(drafted.model),
        PD_ENV / "logs" / "serving" / "drafted",
        page_size=drafted.topology.page_size,
        attention=drafted.topology.attention,
        draft=draft_folder(drafted.model),
    )


def draft_folder(model: TinyModel):
    return make_draft(model, OF_RELEASE / "models")


def ask(server: cluster.Server, at_once: int | None = 1, **more) -> list[cluster.Answer]:
    """Ask one by one, so that a prompt has the same chunks in every fleet.

    At the end of a chunk that is not the last the engine's draft reads a token that the target
    would have said there, and not the one that is.
    """
    return cluster.ask(server.url, prompts(), NEW_TOKENS, PATIENCE, at_once, **more)


def fleet(drafted: Drafted, engine: str, **environment: str) -> tuple[cluster.Server, ...]:
    (store_port,) = free_ports(1)
    logs = PD_ENV / "logs" / "serving" / f"draft-{drafted.name}-{engine}"
    servers = [
        start(
            drafted.topology,
            engine,
            model_folder(drafted.model),
            logs,
            store_port,
            environment={**drafted.topology.memfabric(engine), **environment},
            draft=draft_folder(drafted.model) if side in drafted.sides else None,
        )
        for side, start in zip(SIDES, (cluster.prefill_server, cluster.decode_server))
    ]
    return (*servers, cluster.router(servers[:1], servers[1:], logs))


@pytest.fixture
def serves(reference, drafted_alone):
    """Function: answers of a scenario's fleet, one by one; what became of those and of all at once.

    The outcome is recorded.
    """

    def served(drafted: Drafted, engine: str) -> tuple[list[cluster.Answer], str, str]:
        expected, by_one = reference(drafted.model, NEW_TOKENS), drafted_alone(drafted)

        def answered() -> tuple[list[cluster.Answer], str, str]:
            servers = fleet(drafted, engine)
            with running(servers):
                if drafted.topology.backend == "ascend":
                    await_peers(memfabric_for(engine))
                may_hang = engine == "stock" and drafted.stock == "hang"
                lost_after = LOST_SECONDS if may_hang else SLOW_SECONDS
                answers = ask(servers[-1], is_lost=Lost(*servers[:2], lost_after))
                result, detail = outcome(answers, ended(servers), expected)
                if result == "right":
                    lost = Lost(*servers[:2], lost_after)
                    together = ask(servers[-1], at_once=None, is_lost=lost)
                    result, detail = outcome(together, ended(servers), expected)
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


def ended(servers) -> list[str]:
    return [server.name for server in servers if server.has_ended()]


def tokens_a_round(rounds: list[int]) -> float:
    """Of those after a request's first one; 1 without any accepted draft."""
    return round(len(rounds) * (NEW_TOKENS - 1) / sum(rounds), 2) if any(rounds) else 1.0


def parameters() -> list:
    return [pytest.param(one, id=one.name, marks=marks(one, DRAFTED_EVERY_RUN)) for one in DRAFTED]


@pytest.mark.parametrize("drafted", parameters())
def test_patched(drafted, serves, drafted_alone):
    answers, result, detail = serves(drafted, "patched")
    assert result == "right", detail
    rounds, by_one = [answer.rounds for answer in answers], drafted_alone(drafted)
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
    """Keeps the table honest."""
    _, result, detail = serves(drafted, "stock")
    assert result == drafted.stock, detail


@pytest.mark.nightly
def test_what_the_tool_says_of_drafts():
    """Beside one server with that draft."""
    (drafted,) = (one for one in DRAFTED if one.name == "nixl-both_tp2_to_1")
    servers, single = fleet(drafted, "patched", SGLANG_PD_VERIFY="1"), alone(drafted)
    with cluster.running([*servers, single]):
        asked = ("--router", servers[-1].url, "--reference", single.url, "--lengths", "40")
        status, found = tool("verify", *asked, "--requests", "2", "--new-tokens", str(NEW_TOKENS))
    assert status == 0, found
    steps = found["tokens_a_verify_step"]
    assert steps["fleet"] == steps["reference"] > 1.1, steps
