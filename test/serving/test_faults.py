"""A server is killed in mid-transfer: the client's error, and the recovery of other servers."""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from engine_release import NIGHTLY_IF_NOT_DEFAULT
from scheduler_dumps import dump_environment, paused_in_mid_prompt
from serving_checks import holds_nothing, open_files, outcome, record, seconds_until
from serving_scenarios import (
    FOUR_HEADS,
    NEW_TOKENS,
    SIX_HEADS,
    long_prompt,
    model_folder,
    prompts,
)

from pd_harness import cluster
from pd_harness.polling import busy

pytestmark = [pytest.mark.serving, pytest.mark.timeout(900)]

CHUNK = 64
# By default the CPU host waits half a minute for a silent prefill server, for busy machines.
HEARTBEAT = {
    "SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL": "2",
    "SGLANG_DISAGGREGATION_HEARTBEAT_MAX_FAILURE": "2",
}
PATIENCE = 180  # seconds, for an answer
ERROR_PATIENCE = 60  # for an error
REFUSED_SECONDS = 3  # for a refusal
# NIXL's eight workers close their sockets to a dead peer when they next have work, which these
# small requests do not give them, and some sockets are the router's. A leak in each of 14 requests
# would exceed this.
MORE_FILES = 20


@pytest.mark.parametrize(
    "backend, victim",
    [
        pytest.param("nixl", "prefill", marks=pytest.mark.nightly),
        pytest.param("nixl", "decode", marks=NIGHTLY_IF_NOT_DEFAULT),
        pytest.param("mooncake", "prefill", marks=pytest.mark.nightly),
        pytest.param("mooncake", "decode", marks=pytest.mark.nightly),
    ],
)
def test_server_killed_in_mid_transfer(backend, victim, reference):
    if reason := cluster.skip_reason(backend, 2, ("patched", "patched")):
        pytest.skip(reason)
    expected = reference(FOUR_HEADS, NEW_TOKENS)
    prefill, decode, router = servers = _fleet(backend, f"{backend}-{victim}-killed")
    dying, survivor = (prefill, decode) if victim == "prefill" else (decode, prefill)
    row = {"case": f"{victim} server killed in mid-transfer", "backend": backend}
    with cluster.running(servers):
        _check_answers(router, servers, expected)
        seconds_until(lambda: holds_nothing(survivor), ERROR_PATIENCE)
        files = open_files(survivor)
        _disconnect_client(backend, servers, expected)

        failure, row["seconds"] = _kill_in_mid_transfer(dying, prefill, router)
        row["client"] = failure or "an answer"
        survivor.check_running()
        row["freed"] = round(seconds_until(lambda: holds_nothing(survivor), ERROR_PATIENCE), 1)
        _restart(dying)
        row["after"] = _check_answers(router, servers, expected)
        seconds_until(lambda: holds_nothing(survivor), ERROR_PATIENCE)
        row["more_files"] = open_files(survivor) - files
    record("faults", **row)
    assert failure is not None and failure.startswith("http 5"), row
    assert row["seconds"] < ERROR_PATIENCE, row
    assert row["more_files"] <= MORE_FILES, row


@pytest.mark.parametrize(
    "backend",
    [
        pytest.param("nixl", marks=NIGHTLY_IF_NOT_DEFAULT),
        pytest.param("mooncake", marks=pytest.mark.nightly),
    ],
)
def test_incompatible_pair_is_refused_at_once(backend):
    """Prefill has three ranks and decode two, so six KV heads do not map to whole ranks."""
    if reason := cluster.skip_reason(backend, 5, ("patched", "patched")):
        pytest.skip(reason)
    servers = cluster.pd_servers(
        cluster.Topology(backend, prefill_tp=3, decode_tp=2, page_size=16),
        model_folder(SIX_HEADS),
        cluster.PD_ENV / "logs" / "serving" / f"{backend}-unfit",
        "patched",
        "patched",
    )
    prefill, decode, router = servers
    row = {"case": "TP 3 asked by TP 2, six KV heads", "backend": backend}
    with cluster.running(servers):
        answers = []
        for prompt in prompts()[:3]:  # the first one connects the two sides
            answers += cluster.ask(router.url, [prompt], NEW_TOKENS, ERROR_PATIENCE)
        row["pace"] = busy()
        row["freed"] = round(seconds_until(lambda: holds_nothing(decode), ERROR_PATIENCE), 1)
        row["client"] = answers[0].failure or "an answer"
        row["seconds"] = round(max(answer.seconds for answer in answers), 1)
        for server in servers:
            server.check_running()
        row["after"] = "none: they can never be served"
    record("faults", **row)
    assert all((answer.failure or "").startswith("http 5") for answer in answers), answers
    assert row["seconds"] <= REFUSED_SECONDS * row["pace"], row


def _fleet(backend: str, label: str) -> tuple[cluster.Server, cluster.Server, cluster.Server]:
    """Returns a prefill server, a decode server and a router; small chunks, fast heartbeats."""
    servers = cluster.pd_servers(
        cluster.Topology(backend, page_size=16),
        model_folder(FOUR_HEADS),
        cluster.PD_ENV / "logs" / "serving" / label,
        "patched",
        "patched",
        environment=dump_environment(cluster.PD_ENV / "logs" / "serving" / label / "probe"),
        chunk=CHUNK,
    )
    _, decode, _ = servers
    decode.environment = {**decode.environment, **HEARTBEAT}
    return servers


def _check_answers(router, servers, expected) -> str:
    """Sends the prompts, asserts that the answers are right, and returns the outcome."""
    answers = cluster.ask(router.url, prompts(), NEW_TOKENS, PATIENCE)
    ended = [server.name for server in servers if server.has_ended()]
    result, detail = outcome(answers, ended, expected)
    assert result == "right", detail
    return result


def _disconnect_client(backend, servers, expected) -> None:
    """Disconnects a client in mid-transfer; asserts that both servers free it and serve others."""
    prefill, decode, router = servers

    async def ask_and_hang_up() -> None:
        with paused_in_mid_prompt(prefill, 3 * CHUNK) as reached:
            asking = asyncio.create_task(
                cluster.ask_all(router.url, [long_prompt(1)], NEW_TOKENS, PATIENCE, 1)
            )
            await asyncio.to_thread(reached)
            asking.cancel()
            await asyncio.wait([asking])

    asyncio.run(ask_and_hang_up())
    free = seconds_until(lambda: holds_nothing(decode), ERROR_PATIENCE)
    seconds_until(lambda: holds_nothing(prefill), ERROR_PATIENCE)
    record(
        "faults",
        case="client hangs up in mid-transfer",
        backend=backend,
        seconds="",
        client="",
        freed=round(free, 1),
        after=_check_answers(router, servers, expected),
    )


def _kill_in_mid_transfer(dying, prefill, router) -> tuple[str | None, float]:
    """Kills a server in mid-transfer; returns the client's failure and its seconds after that."""
    with ThreadPoolExecutor() as pool:
        # Prefill sends a chunk's KV while it computes the next chunk.
        with paused_in_mid_prompt(prefill, 3 * CHUNK) as reached:
            asking = pool.submit(cluster.ask, router.url, [long_prompt(2)], NEW_TOKENS, PATIENCE)
            reached()
            start = time.monotonic()
            dying.stop()  # kills all its processes
        (answer,) = asking.result()
        return answer.failure, round(time.monotonic() - start, 1)


def _restart(server: cluster.Server) -> None:
    """Restarts a server at the same address, as a supervisor would."""
    server.log = server.log.with_stem(f"{server.name}-again")
    server.start()
    cluster.wait_ready([server], time.monotonic() + cluster.START_TIMEOUT_S, lambda _: None)
