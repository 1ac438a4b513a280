"""A server is killed in mid-transfer: the client's error, and the recovery of other servers."""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from engine_release import NIGHTLY_IF_NOT_DEFAULT
from scheduler_dumps import dump_environment, paused_in_mid_prompt
from server_pairs import (
    LOGS,
    assert_freed,
    assert_right_answers,
    make_pair,
    restart,
    skip_if_unsupported,
)
from serving_checks import open_files, record
from serving_scenarios import FOUR_HEADS, NEW_TOKENS, SIX_HEADS, long_prompt, prompts

from pd_harness import cluster
from pd_harness.cluster import Topology
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
    topology, label = Topology(backend, page_size=16), f"{backend}-{victim}-killed"
    skip_if_unsupported(topology, "patched")
    expected = reference(FOUR_HEADS, NEW_TOKENS)
    environment = dump_environment(LOGS / label / "probe")
    servers = make_pair(label, topology, FOUR_HEADS, environment=environment, chunk=CHUNK)
    prefill, decode, router = servers
    decode.environment |= HEARTBEAT
    dying, survivor = (prefill, decode) if victim == "prefill" else (decode, prefill)
    row = {"case": f"{victim} server killed in mid-transfer", "backend": backend}
    with cluster.running(servers):
        assert_right_answers(servers, expected, PATIENCE)
        assert_freed(survivor)
        files = open_files(survivor)
        disconnect_client(backend, servers, expected)

        failure, row["seconds"] = kill_in_mid_transfer(dying, prefill, router)
        row["client"] = failure or "an answer"
        survivor.check_running()
        row["freed"] = round(assert_freed(survivor), 1)
        restart(dying)
        assert_right_answers(servers, expected, PATIENCE)
        row["after"] = "right"
        assert_freed(survivor)
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
    topology = Topology(backend, prefill_tp=3, decode_tp=2, page_size=16)
    skip_if_unsupported(topology, "patched")
    servers = make_pair(f"{backend}-unfit", topology, SIX_HEADS)
    prefill, decode, router = servers
    row = {"case": "TP 3 asked by TP 2, six KV heads", "backend": backend}
    with cluster.running(servers):
        answers = []
        for prompt in prompts()[:3]:  # the first one connects the two sides
            answers += cluster.ask(router.url, [prompt], NEW_TOKENS, ERROR_PATIENCE)
        row["pace"] = busy()
        row["freed"] = round(assert_freed(decode), 1)
        row["client"] = answers[0].failure or "an answer"
        row["seconds"] = round(max(answer.seconds for answer in answers), 1)
        for server in servers:
            server.check_running()
        row["after"] = "none: they can never be served"
    record("faults", **row)
    assert all((answer.failure or "").startswith("http 5") for answer in answers), answers
    # The rank that answers may not know the reason yet when another rank fails the first one.
    assert all("neither divides" in answer.failure for answer in answers[1:]), answers
    assert row["seconds"] <= REFUSED_SECONDS * row["pace"], row


def disconnect_client(backend, servers, expected) -> None:
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
    freed = round(assert_freed(decode), 1)
    assert_freed(prefill)
    assert_right_answers(servers, expected, PATIENCE)
    row = {"case": "client hangs up in mid-transfer", "backend": backend}
    record("faults", **row, seconds="", client="", freed=freed, after="right")


def kill_in_mid_transfer(dying, prefill, router) -> tuple[str | None, float]:
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
