"""Real prefill and decode servers behind the real router, against one server's answers.

Each scenario runs on the stock engine and on the patched one, and both must do what the table
says: on the patched one token ids and logprobs are right, or what cannot be is refused.
"""

import time

import pytest
from of_release import IS_DEFAULT
from serving_checks import (
    LOST_SECONDS,
    SLOW_SECONDS,
    Lost,
    outcome,
    record,
    retractions,
    retry_memfabric_faults,
    running,
)
from serving_scenarios import EVERY_RUN, MIXED, TABLE, Scenario, marks, model_folder
from stray import send_stray

from pd_harness import cluster
from pd_harness.cpu_host.memfabric import memfabric_for
from pd_harness.cpu_host.newer import STAGED
from pd_harness.device import await_peers
from pd_harness.releases import release

# Starting servers may take START_SECONDS, for the reference once more.
pytestmark = [pytest.mark.serving, pytest.mark.timeout(900)]

PATIENCE = 180  # seconds; a right answer takes a few, on a busy machine half a minute
RETRACTING = 4  # times more that prompts are sent until decode has retracted any
STOCK_PATIENCE = 60  # the same prompts take the patched engine a tenth of this


def serve(
    scenario: Scenario, prefill_engine: str, decode_engine: str, seconds: float, lost_after: float
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
    with running(servers):
        lost = Lost(*servers[:-1], lost_after)
        if scenario.topology.backend == "ascend":
            await_peers(memfabric_for(decode_engine))
        if scenario.stray is not None:
            send_stray(servers[0], scenario.topology, scenario.stray)
        answers = ask_until_done(scenario, servers, seconds, lost)
        return answers, [server.name for server in servers if server.has_ended()]


def ask_until_done(scenario: Scenario, servers, seconds: float, lost: Lost) -> list[cluster.Answer]:
    """The answers of the last time, or of the first that failed."""
    *engines, router = servers
    topology = scenario.topology
    # Decode takes KV from all requests but one, and on a busy machine they may come one by one.
    more = RETRACTING if topology.retracts else 0
    for turn in range(1, scenario.times + more + 1):
        lost.begin()
        answers = cluster.ask(
            router.url, scenario.asked(), scenario.new_tokens, seconds, is_lost=lost
        )
        if any(answer.failure for answer in answers):
            return answers
        missing = what_is_missing(topology, engines[1], answers)
        if turn >= scenario.times and not missing:
            return answers
    raise AssertionError(missing)


def what_is_missing(topology: cluster.Topology, decode: cluster.Server, answers) -> str:
    """What the scenario is about, and decode has not done."""
    log = decode.log.read_text(errors="replace")
    if topology.retracts and not retractions(log):
        return "decode retracted none"
    if topology.staging and STAGED not in log:
        return "nothing was staged"
    if topology.decode_prefixes and not all(answer.cached for answer in answers):
        return "decode had no prefix"
    return ""


def on(test: str, scenarios: list[Scenario]) -> list:
    """Parameters for the scenarios; what not every run has in ``test`` is marked nightly."""
    always = EVERY_RUN[release()][test]
    return [pytest.param(one, id=one.name, marks=marks(one, always)) for one in scenarios]


@pytest.fixture
def serves(reference):
    """Function: serve a scenario, record its outcome, and return it.

    It skips the test where this device cannot serve it.
    """

    def served(
        scenario, prefill_engine, decode_engine, seconds, lost_after=SLOW_SECONDS
    ) -> tuple[str, str]:
        topology, engines = scenario.topology, (prefill_engine, decode_engine)
        if reason := cluster.why_not_here(topology.backend, sum(topology.ranks), engines):
            pytest.skip(reason)
        expected = reference(scenario.model, scenario.new_tokens, scenario.asked())
        start = time.monotonic()
        answers, ended = retry_memfabric_faults(
            lambda: serve(scenario, *engines, seconds, lost_after)
        )
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


@pytest.mark.parametrize("scenario", on("patched", TABLE))
def test_patched(scenario, serves):
    result, detail = serves(scenario, "patched", "patched", PATIENCE)
    assert result == scenario.patched, detail
    assert "server ended" not in detail


@pytest.mark.parametrize("scenario", on("stock", TABLE))
def test_stock(scenario, serves):
    """Keeps the table honest: were the stock engine right, the patch would not be needed."""
    lost_after = LOST_SECONDS if "hang" in scenario.stock else SLOW_SECONDS
    result, detail = serves(scenario, "stock", "stock", STOCK_PATIENCE, lost_after)
    assert result == scenario.stock, detail


def both_ways() -> list:
    """Scenarios, with either side patched; at night by turns in releases other than the default."""
    ways, found = [("stock", "patched"), ("patched", "stock")], []
    always = EVERY_RUN[release()]["mixed"]
    for at, one in enumerate(MIXED):
        in_turn = not IS_DEFAULT and one.name not in always
        for way in [ways[at % 2]] if in_turn else ways:
            name = f"{one.name}-{'-to-'.join(way)}"
            found.append(pytest.param(one, way, id=name, marks=marks(one, always)))
    return found


@pytest.mark.parametrize("scenario, engines", both_ways())
def test_mixed(scenario, engines, serves):
    """A rollout goes server by server: each half may be patched before the other."""
    result, detail = serves(scenario, *engines, PATIENCE)
    assert result == "right", detail
