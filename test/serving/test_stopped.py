"""A prefill server of two is stopped: decode serves the other's requests all the while."""

import random
import time
from concurrent.futures import Future, ThreadPoolExecutor

import httpx
import pytest
from serving_checks import holds_nothing, stopped
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

AT_ONCE = 3  # seconds, for an answer of the server that lives; one wait of stock's takes 5
FAILED = 40  # seconds, for requests to the one that is stopped
ROUNDS = 12  # of one request to each server, a second apart


@pytest.fixture(params=["nixl", "mooncake"])
def servers(request):
    """Two prefill servers and a decode server, in which a stopped one is silent after 5 s."""
    topology, model = Topology(backend=request.param), model_folder(SEVEN_LAYERS)
    logs = cluster.PD_ENV / "logs" / "serving" / f"stopped-{request.param}"
    (store_port,) = free_ports(1)
    given = ("patched", model, logs, store_port)
    environment = {"SGLANG_PD_SILENT_SECONDS": "5"}
    first, second = (
        cluster.prefill_server(topology, *given, name=name, environment=environment)
        for name in ("first", "second")
    )
    decode = cluster.decode_server(topology, *given, environment=environment)
    with cluster.running([first, second, decode]):
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
        return httpx.post(f"{server.url}/generate", json=body, timeout=120, trust_env=False)

    begun = time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(post, prefill) if to_prefill else None
        answer = post(decode)
        seconds = time.monotonic() - begun
        if first is not None:
            first.result()
    return answer, seconds


def test_the_other_ones_requests_are_answered(servers):
    first, second, decode = servers
    for server in (first, second):
        answer, _ = ask(server, decode)
        assert answer.status_code == 200, answer.text
    lost: list[Future] = []
    with ThreadPoolExecutor(ROUNDS) as pool:
        with stopped(first):
            for _ in range(ROUNDS):
                lost.append(pool.submit(ask, first, decode, False))
                answer, seconds = ask(second, decode)
                assert answer.status_code == 200, answer.text
                assert in_time(seconds, AT_ONCE), seconds
                time.sleep(1)
            for one in lost:
                answer, seconds = one.result()
                assert answer.status_code >= 500, answer.text
                assert in_time(seconds, FAILED), seconds
        assert awaited(lambda: ask(first, decode)[0].status_code == 200, 60, 1)
    for server in servers:
        assert awaited(lambda server=server: holds_nothing(server), 60), server.name
