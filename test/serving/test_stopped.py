"""A prefill server of two is stopped, or killed: decode serves the other one's requests."""

import contextlib
import random
import time
from concurrent.futures import Future, ThreadPoolExecutor

import httpx
import pytest
from of_release import IS_LATER
from probed import look, probed
from serving_checks import holds_nothing, record, stopped
from serving_scenarios import SEVEN_LAYERS, model_folder

from pd_harness import cluster
from pd_harness.cluster import Topology
from pd_harness.device import device
from pd_harness.ports import free_ports
from pd_harness.waiting import awaited, in_time

pytestmark = [
    pytest.mark.serving,
    pytest.mark.alone,
    pytest.mark.nightly,
    pytest.mark.timeout(600),
    pytest.mark.skipif(device() != "cpu", reason="three servers of NIXL or Mooncake"),
]

AT_ONCE = 3  # seconds, for an answer of the server that lives
ASKED = 5  # for which stock's scheduler waits for a bootstrap server
# Seconds, for requests to the one that is stopped. On 0.5.9 they fail after 40: 5 until ZeroMQ
# tells, 5 of silence, and 30 in which their pages may be written to.
FAILED = 40 if IS_LATER else 50
PATIENCE = 60  # for any answer
ROUNDS = 12  # of one request to each server, a second apart
# Stock's decode knows where the ranks of a lost server were, and does not ask, until heartbeats say
# that it is lost.
HEARTBEATS = {
    "SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL": "2",
    "SGLANG_DISAGGREGATION_HEARTBEAT_MAX_FAILURE": "2",
}


@contextlib.contextmanager
def killed(server: cluster.Server):
    server.stop()
    yield


@contextlib.contextmanager
def three_servers(backend: str, engine: str):
    """Two prefill servers and a decode server, in which a stopped one is silent after 5 s."""
    topology, model = Topology(backend=backend), model_folder(SEVEN_LAYERS)
    logs = cluster.PD_ENV / "logs" / "serving" / f"stopped-{backend}-{engine}"
    (store_port,) = free_ports(1)
    given = (engine, model, logs, store_port)
    environment = {"SGLANG_PD_SILENT_SECONDS": "5", **probed(logs / "probe")}
    environment |= HEARTBEATS if engine == "stock" else {}
    first, second = (
        cluster.prefill_server(topology, *given, name=name, environment=environment)
        for name in ("first", "second")
    )
    decode = cluster.decode_server(topology, *given, environment=environment)
    with cluster.running([first, second, decode]):
        for server in (first, second):
            answer, _ = ask(server, decode)
            assert answer.status_code == 200, answer.text
        yield first, second, decode


def ask(prefill, decode, to_prefill: bool = True) -> tuple[httpx.Response, float]:
    """Decode's answer to a request that it shares with this prefill server, and its seconds."""
    body = {
        "input_ids": [random.randrange(1, 200) for _ in range(6)],
        "sampling_params": {"max_new_tokens": 4, "temperature": 0},
        "bootstrap_host": cluster.HOST,
        "bootstrap_port": prefill.bootstrap_port,
        "bootstrap_room": random.getrandbits(60),
    }

    def post(server) -> httpx.Response:
        return httpx.post(f"{server.url}/generate", json=body, timeout=PATIENCE, trust_env=False)

    begun = time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(post, prefill) if to_prefill else None
        answer = post(decode)
        seconds = time.monotonic() - begun
        if first is not None:
            first.result()
    return answer, seconds


@pytest.mark.parametrize("backend", ["nixl", "mooncake"])
@pytest.mark.parametrize("attack", [stopped, killed], ids=["stopped", "killed"])
def test_the_other_ones_requests_are_answered(backend, attack):
    with three_servers(backend, "patched") as servers:
        first, second, decode = servers
        with ThreadPoolExecutor(ROUNDS) as pool:
            with attack(first):
                lost, seconds = other_ones_answers(pool, servers, ROUNDS)
                pause = longest_pause(decode)
                for one in lost:
                    answer, waited = one.result()
                    assert answer.status_code >= 500, answer.text
                    assert in_time(waited, FAILED), waited
            alive = [second, decode]
            if attack is stopped:
                assert awaited(lambda: ask(first, decode)[0].status_code == 200, 60, 1)
                alive.append(first)
        for server in alive:
            assert awaited(lambda server=server: holds_nothing(server), 60), server.name
    keep(attack, backend, "patched", pause, seconds, {})
    assert in_time(max(seconds), AT_ONCE), seconds


@pytest.mark.parametrize("backend", ["nixl", "mooncake"])
def test_stocks_decode_waits_for_each_request_to_it(backend):
    with three_servers(backend, "stock") as servers, ThreadPoolExecutor(ROUNDS) as pool:
        first, _, decode = servers
        with stopped(first):
            _, seconds = other_ones_answers(pool, servers, ROUNDS)
            pause = longest_pause(decode)
            decode.stop()  # of the others it would answer none for minutes
    keep(stopped, backend, "stock", pause, seconds, None)
    assert pause > 1000 * (ASKED - 1), (pause, seconds)


def other_ones_answers(pool, servers, rounds: int) -> tuple[list[Future], list[float]]:
    """Requests to the first server, which are not waited for, and seconds of the second's."""
    first, second, decode = servers
    look(decode)
    lost, answered = [], []
    for _ in range(rounds):
        lost.append(pool.submit(ask, first, decode, False))
        try:
            answer, seconds = ask(second, decode)
        except httpx.ReadTimeout:
            answered.append(PATIENCE)
            break
        assert answer.status_code == 200, answer.text
        answered.append(round(seconds, 2))
        time.sleep(1)
    return lost, answered


def longest_pause(decode: cluster.Server) -> float:
    """Milliseconds in which decode's loop did not turn, since it was last looked at."""
    return round(1000 * max(seen["pause"] for seen in look(decode)))


def keep(attack, backend, engine, pause, seconds, held) -> None:
    case = f"prefill server {attack.__name__}"
    row = {"case": case, "backend": backend, "engine": engine, "pause_ms": pause}
    served = max(seconds) if max(seconds) < PATIENCE else None
    record("attacks", **row, served=served, waited=max(seconds), held=held)
