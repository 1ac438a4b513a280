"""Real prefill and decode servers behind the real router, compared with one server's answers.

Each scenario runs on the stock and on the patched engine, with the outcomes that the table says.
On the patched engine, token ids and logprobs are right, or an unservable request is refused.
"""

import time

import httpx
import pytest
import zmq
from server_pairs import ended, make_pair, skip_if_unsupported, wait_for_peers
from serving_checks import (
    LOST_SECONDS,
    SLOW_SECONDS,
    HangDetector,
    heads_moved_by,
    outcome,
    record,
    retractions,
    retry_memfabric_faults,
    running,
)
from serving_scenarios import MIXED, PUSH_CASES, SLICED, TABLE, Scenario, marks

from pd_harness import cluster
from pd_harness.cpu_host.adaptations_0_5_23 import STAGING_LOG_LINE
from pd_harness.device import device
from pd_harness.releases import release

# Starting servers may take START_TIMEOUT_S, and again for the reference.
pytestmark = [pytest.mark.serving, pytest.mark.timeout(900)]

PATIENCE = 180  # seconds; a right answer takes a few, or half a minute on a busy machine
RETRACTION_ROUNDS = 4  # how often prompts may be sent again until decode retracts a request
STOCK_PATIENCE = 60  # seconds; the patched engine needs a tenth for the same prompts
# The releases' query parameters for a rank; engine_rank and target_dp_group are 0.5.9's.
TENSOR_RANK = ("engine_rank", "target_tp_rank")
DATA_RANK = ("target_dp_group", "prefill_dp_rank", "prefill_cp_rank")
STAGE = "target_pp_rank"
LINGER_MS = 5000  # limit for sending a stray message


def serve(
    scenario: Scenario, prefill_engine: str, decode_engine: str, seconds: float, lost_after: float
) -> tuple[list[cluster.Answer], list[str]]:
    """Runs the scenario's fleet; returns its answers, and names of servers that exited.

    Args:
        seconds: Limit for each answer.
        lost_after: Seconds without work until the answers count as lost.
    """
    engines = (prefill_engine, decode_engine)
    label = f"{scenario.name}-{'-'.join(engines)}"
    environment = scenario.environment
    servers = make_pair(label, scenario.topology, scenario.model, *engines, environment=environment)
    with running(servers):
        lost = HangDetector(*servers[:-1], lost_after)
        wait_for_peers(scenario.topology, decode_engine)
        if scenario.stray_message is not None:
            send_stray_message(servers[0], scenario.topology, scenario.stray_message)
        answers = ask_until_done(scenario, engines, servers, seconds, lost)
        return answers, ended(servers)


def send_stray_message(prefill: cluster.Server, topology: cluster.Topology, message: bytes) -> None:
    """Sends each prefill rank a message of no peer, as a scanner or a health check may."""
    for stage in range(topology.prefill_pp):
        for rank in range(topology.prefill_tp):
            with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
                socket.setsockopt(zmq.LINGER, LINGER_MS)
                socket.connect(rank_address(prefill, stage, rank))
                socket.send(message)


def rank_address(prefill: cluster.Server, stage: int, rank: int) -> str:
    """Returns the address of the socket on which decode ranks register with a prefill rank."""
    place = {STAGE: stage, **dict.fromkeys(TENSOR_RANK, rank), **dict.fromkeys(DATA_RANK, 0)}
    url = f"http://{cluster.HOST}:{prefill.bootstrap_port}/route"
    found = httpx.get(url, params=place, trust_env=False).raise_for_status().json()
    return f"tcp://{found['rank_ip']}:{found['rank_port']}"


def ask_until_done(
    scenario: Scenario, engines, servers, seconds: float, lost: HangDetector
) -> list[cluster.Answer]:
    """Sends the prompts as often as needed; returns the last answers, or the first failed ones."""
    *pair, router = servers
    topology = scenario.topology
    # Decode retracts all requests but one; on a busy machine, requests may arrive one by one.
    more = RETRACTION_ROUNDS if topology.expects_retractions else 0
    for turn in range(1, scenario.times + more + 1):
        lost.begin()
        answers = cluster.ask(
            router.url, scenario.make_prompts(), scenario.new_tokens, seconds, is_lost=lost
        )
        if any(answer.failure for answer in answers):
            return answers
        missing = missing_behaviour(scenario, engines, pair, answers)
        if turn >= scenario.times and not missing:
            return answers
    raise AssertionError(missing)


def missing_behaviour(scenario: Scenario, engines, pair, answers) -> str:
    """Returns what the scenario is meant to test but the pair has not done; empty if nothing."""
    topology, (prefill, decode) = scenario.topology, pair
    log = decode.log.read_text(errors="replace")
    if topology.expects_retractions and not retractions(log):
        return "decode retracted none"
    if topology.staging and STAGING_LOG_LINE not in log:
        return "nothing was staged"
    if topology.decode_prefixes and not all(answer.cached for answer in answers):
        return "decode had no prefix"
    wanted, found = scenario.moves_heads(*engines), heads_moved_by(prefill, decode)
    if device() == "cpu" and wanted != found:
        return (
            f"KV heads were packed or interleaved by {found or 'no side'}, not {wanted or 'none'}"
        )
    return ""


def scenario_params(test: str, scenarios: list[Scenario]) -> list:
    """Returns the scenarios as parameters, nightly unless they are ``test``'s push cases."""
    always = PUSH_CASES[release()][test]
    return [pytest.param(one, id=one.name, marks=marks(one, always)) for one in scenarios]


@pytest.fixture
def serves(reference):
    """A function that serves a scenario, records its outcome, and returns (outcome, detail).

    The function skips the test if this device cannot serve the scenario.
    """

    def served(
        scenario, prefill_engine, decode_engine, seconds, lost_after=SLOW_SECONDS
    ) -> tuple[str, str]:
        engines = (prefill_engine, decode_engine)
        skip_if_unsupported(scenario.topology, *engines)
        expected = reference(scenario.model, scenario.new_tokens, scenario.make_prompts())
        start = time.monotonic()
        answers, exited = retry_memfabric_faults(
            lambda: serve(scenario, *engines, seconds, lost_after)
        )
        result, detail = outcome(answers, exited, expected)
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


@pytest.mark.parametrize("scenario", scenario_params("patched", TABLE))
def test_patched(scenario, serves):
    result, detail = serves(scenario, "patched", "patched", PATIENCE)
    assert result == scenario.patched, detail
    assert "server ended" not in detail


@pytest.mark.nightly
@pytest.mark.parametrize("scenario", SLICED, ids=lambda one: one.name)
def test_sliced(scenario, serves):
    """With `SGLANG_PD_PACKED=0` KV heads are sent token by token."""
    result, detail = serves(scenario, "patched", "patched", PATIENCE)
    assert result == "right", detail


@pytest.mark.parametrize("scenario", scenario_params("stock", TABLE))
def test_stock(scenario, serves):
    """Checks the table's stock outcomes, which show where the patches are needed."""
    lost_after = LOST_SECONDS if "hang" in scenario.stock else SLOW_SECONDS
    result, detail = serves(scenario, "stock", "stock", STOCK_PATIENCE, lost_after)
    assert result == scenario.stock, detail


def mixed_params() -> list:
    """Returns scenarios with either side patched; the nightly ones alternate."""
    ways, found = [("stock", "patched"), ("patched", "stock")], []
    always = PUSH_CASES[release()]["mixed"]
    for at, one in enumerate(MIXED):
        for way in ways if one.name in always else [ways[at % 2]]:
            name = f"{one.name}-{'-to-'.join(way)}"
            found.append(pytest.param(one, way, id=name, marks=marks(one, always)))
    return found


@pytest.mark.parametrize("scenario, engines", mixed_params())
def test_mixed(scenario, engines, serves):
    """A rollout goes server by server, so each side may be patched before the other."""
    result, detail = serves(scenario, *engines, PATIENCE)
    assert result == "right", detail
