"""Pairs of a prefill and a decode server, and requests to them, through a router or without one."""

import random
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import MappingProxyType

import httpx
import pytest
from serving_checks import holds_nothing, outcome
from serving_scenarios import NEW_TOKENS, model_folder, prompts

from pd_harness import cluster
from pd_harness.cluster import Server, Topology
from pd_harness.cpu_host.memfabric import memfabric_for
from pd_harness.cpu_host.models import TinyModel
from pd_harness.device import device, wait_for_memfabric_peers
from pd_harness.polling import wait_until

LOGS = cluster.PD_ENV / "logs" / "serving"


def make_pair(
    label: str,
    topology: Topology,
    model: TinyModel,
    engine: str = "patched",
    decode_engine: str = "",
    environment: Mapping[str, str] = MappingProxyType({}),
    **both,
) -> tuple[Server, Server, Server]:
    """Returns a prefill server, a decode server and their router; see `cluster.pd_servers`.

    Args:
        label: Name of the folder with their logs.
        decode_engine: Prefill's engine by default.
    """
    engines = (engine, decode_engine or engine)
    folder, logs = model_folder(model), LOGS / label
    return cluster.pd_servers(topology, folder, logs, *engines, environment, **both)


def skip_if_unsupported(topology: Topology, *engines: str) -> None:
    """Skips the test if this device cannot run servers of these sizes and engines."""
    if device() == "cuda":
        pytest.skip("on GPUs the harness runs ranks without a model: test/transport")
    if reason := cluster.skip_reason(topology.backend, sum(topology.ranks), engines):
        pytest.skip(reason)


def wait_for_peers(topology: Topology, decode_engine: str = "patched") -> None:
    """Waits until the servers' MemFabric, if they use it, has discovered its peers."""
    if topology.backend == "ascend":
        wait_for_memfabric_peers(memfabric_for(decode_engine))


def ended(servers: Sequence[Server]) -> list[str]:
    """Returns the names of the servers that have exited."""
    return [server.name for server in servers if server.has_ended()]


def ask_router(
    servers: Sequence[Server], expected, asked=None, patience: float = 120, **more
) -> tuple[str, str]:
    """Asks the prompts, or `asked`, of the last server, a router; returns `outcome`'s result."""
    answers = cluster.ask(servers[-1].url, asked or prompts(), NEW_TOKENS, patience, **more)
    return outcome(answers, ended(servers), expected)


def assert_right_answers(servers: Sequence[Server], expected, patience: float = 120) -> None:
    """Asserts that the router, the last server, answers all prompts with the expected tokens."""
    result, detail = ask_router(servers, expected, patience=patience)
    assert result == "right", detail


def assert_freed(*servers: Server, patience: float = 60) -> float:
    """Waits until these servers hold no token and no request; returns the seconds."""
    start = time.monotonic()
    for server in servers:
        assert wait_until(partial(holds_nothing, server), patience, 0.05), server.name
    return time.monotonic() - start


def restart(server: Server) -> None:
    """Restarts a server at the same address, as a supervisor would."""
    server.log = server.log.with_stem(f"{server.name}-again")
    server.start()
    cluster.wait_ready([server], time.monotonic() + cluster.START_TIMEOUT_S, lambda _: None)


def bootstrap_fields(prefill: Server, room: int, port: int | None = None) -> dict:
    """Returns what a router adds to a request; `port` is prefill's own by default."""
    port = port or prefill.bootstrap_port
    return {"bootstrap_host": cluster.HOST, "bootstrap_port": port, "bootstrap_room": room}


def ask_both(
    prefill: Server,
    decode: Server,
    body: dict,
    patience: float,
    *,
    prefill_first: float = 0.0,
    to_prefill: bool = True,
    bootstrap_port: int | None = None,
) -> tuple[httpx.Response, float]:
    """Sends a request to both servers, without a router; returns decode's answer and its seconds.

    Args:
        patience: Limit in seconds for each answer.
        prefill_first: Seconds between the request to prefill and that to decode; negative if
            decode is asked first.
        to_prefill: Whether prefill gets the request; False for a stopped server.
        bootstrap_port: The port in the request; prefill's own by default.
    """
    body = {**body, **bootstrap_fields(prefill, random.getrandbits(60), bootstrap_port)}

    def post(server: Server, after: float) -> tuple[httpx.Response, float]:
        time.sleep(max(0.0, after))
        begun = time.monotonic()
        answer = httpx.post(
            f"{server.url}/generate", json=body, timeout=patience, **cluster.LOCAL_HTTP
        )
        return answer, time.monotonic() - begun

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(post, prefill, -prefill_first) if to_prefill else None
        answered = post(decode, prefill_first)
        if first is not None:
            first.result()
    return answered
