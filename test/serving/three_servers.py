"""Three servers without a router: two prefill and one decode server, or one and two."""

import contextlib
import random
from collections.abc import Iterator, Sequence

import httpx
import pytest
from engine_release import SINCE_0_5_23
from scheduler_dumps import dump_environment, raise_priority
from server_pairs import LOGS, ask_both
from serving_checks import record
from serving_scenarios import NEW_TOKENS, SEVEN_LAYERS, model_folder, prompts

from pd_harness import cluster
from pd_harness.cluster import Server, Topology
from pd_harness.device import device
from pd_harness.ports import free_ports

MARKS = [
    pytest.mark.serving,
    pytest.mark.nightly,
    pytest.mark.timeout(600),
    pytest.mark.skipif(device() != "cpu", reason="three servers, on one machine's cores"),
]
PATIENCE = 60 if SINCE_0_5_23 else 90  # seconds, for any answer
CHUNK = 64  # tokens of a prompt that are prefilled and sent at once
SILENT = {"SGLANG_PD_SILENT_SECONDS": "5"}
# Stock's decode uses the known rank addresses of a lost server, without a query, until heartbeats
# fail.
HEARTBEATS = {
    "SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL": "2",
    "SGLANG_DISAGGREGATION_HEARTBEAT_MAX_FAILURE": "2",
}


@contextlib.contextmanager
def two_prefill_servers(
    case: str, backend: str, engine: str, **more: str
) -> Iterator[tuple[Server, Server, Server]]:
    """Runs two prefill servers and a decode server; each pair has served a request.

    A stopped prefill server is silent for decode after 5 s.

    Args:
        case: The first word of the folder of logs, which no other test may use at the same time.
        more: Variables of all three servers.
    """
    logs = LOGS / f"{case}-{backend}-{engine}"
    given = (Topology(backend), engine, model_folder(SEVEN_LAYERS), logs, *free_ports(1))
    environment = {**SILENT, **more, **dump_environment(logs / "probe")}
    environment |= HEARTBEATS if engine == "stock" else {}
    first, second = (
        cluster.prefill_server(*given, name=name, environment=environment)
        for name in ("first", "second")
    )
    # An idle loop that sleeps on purpose would count as a pause.
    decode = cluster.decode_server(*given, environment=environment, idle_sleep=False)
    with cluster.running([first, second, decode]):
        for server in (first, second):
            answer, _ = ask(server, decode)
            assert answer.status_code == 200, answer.text
        raise_priority(decode)
        yield first, second, decode


@contextlib.contextmanager
def two_decode_servers(backend: str) -> Iterator[tuple[Server, Server, Server]]:
    """Runs a prefill server with two stages and two decode servers.

    A stopped decode server is silent for prefill after 5 s.
    """
    topology = Topology(backend, prefill_pp=2, page_size=16)
    logs = LOGS / f"stopped-decode-{backend}"
    given = (topology, "patched", model_folder(SEVEN_LAYERS), logs, *free_ports(1))
    dumps = dump_environment(logs / "probe")
    both = {"environment": {**SILENT, **topology.memfabric("patched"), **dumps}, "chunk": CHUNK}
    prefill = cluster.prefill_server(*given, **both, idle_sleep=False)
    first, second = (
        cluster.decode_server(*given, name=name, **both) for name in ("first", "second")
    )
    with cluster.running([prefill, first, second]):
        raise_priority(prefill)
        yield prefill, first, second


def ask(
    prefill: Server, decode: Server, prompt: Sequence[int] = (), **options
) -> tuple[httpx.Response, float]:
    """Asks a prompt, by default six random tokens, of both servers; see `ask_both`."""
    prompt = prompt or [random.randrange(1, 200) for _ in range(6)]
    body = {**cluster.greedy_body(prompt, NEW_TOKENS), "return_logprob": True}
    return ask_both(prefill, decode, body, PATIENCE, **options)


def tokens_of(prefill: Server, decode: Server) -> tuple[list[list[int]], float]:
    """Asks the prompts one by one; returns the answers' tokens and the slowest's seconds."""
    answers, seconds = zip(*(ask(prefill, decode, prompt) for prompt in prompts()))
    return [tokens(answer) for answer in answers], max(seconds)


def tokens(answer: httpx.Response) -> list[int]:
    """Returns the answer's token ids; none for a failure."""
    if answer.status_code != 200:
        return []
    return [row[1] for row in answer.json()["meta_info"]["output_token_logprobs"]]


def record_attack(
    case: str, backend: str, engine: str, pause_ms, seconds, held, is_served=True, **more
) -> None:
    """Records an attack for `scripts/evidence.sh`; `seconds` are of the surviving servers."""
    row = {"case": case, "backend": backend, "engine": engine, "pause_ms": round(pause_ms)}
    served = max(seconds) if is_served and max(seconds) < PATIENCE else None
    record("attacks", **row, served=served, waited=max(seconds), held=held, **more)
