"""What went wrong in a fleet, read off its servers' metrics alone."""

import contextlib
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import zmq
from disconnects import CLIENTS, disconnect_clients
from engine_release import SINCE_0_5_18, release, shown_by_0_5_23
from scheduler_dumps import dump_environment, paused_in_mid_prompt
from server_metrics import (
    failures,
    name_for_decode,
    name_for_prefill,
    open_rooms,
    series,
    sums,
    total,
)
from server_pairs import LOGS, ask_both, assert_freed, assert_right_answers, make_pair, restart
from serving_checks import run_tool, stopped
from serving_scenarios import FIVE_LAYERS, NEW_TOKENS, long_prompt, model_folder, prompts
from test_serving import rank_address
from three_servers import CHUNK, HEARTBEATS, SILENT

from pd_harness import cluster
from pd_harness.cluster import Server, Topology
from pd_harness.device import device
from pd_harness.polling import wait_until
from pd_harness.ports import free_ports

pytestmark = [
    pytest.mark.serving,
    pytest.mark.nightly,
    pytest.mark.timeout(900),
    pytest.mark.skipif(device() != "cpu", reason="its backends are NIXL and Mooncake"),
]

PATIENCE = 150  # seconds, for an answer; 0.5.9's decode may keep a failed request's pages for 70
# For metrics to say so: a request that failed may end a minute later.
SETTLE_SECONDS = 90
WRITTEN_SECONDS = 3  # until request lines are in their files
ABORTED, ANOTHER_RANK = {"aborted_by_client", "aborted_by_peer"}, "another_rank"
FITS = {"input_ids": [5, 6, 7, 8]}
SAMPLING = {"sampling_params": {"max_new_tokens": 2, "temperature": 0}}
POOL = 2048  # tokens of prefill's pool
# How a dead decode server shows differs by backend; each release tests one of them.
DEAD_DECODE_BACKEND = "mooncake" if release() == "0.5.18" else "nixl"
# What prefill says of a write to a decode server that has died: NIXL knows that, Mooncake does not.
LOST = {"nixl": "peer_lost", "mooncake": "transport"}


@contextlib.contextmanager
def metered_pair(
    backend: str, case: str, decode_page: int = 16, spawn: bool = False, **environment: str
) -> Iterator[tuple[Server, Server]]:
    """Runs a prefill and a decode server with metrics; each has answered nothing yet.

    Args:
        spawn: Whether to start them as users do, not as forks of a process with the engine.
    """
    topology, logs = Topology(backend, page_size=16), LOGS / f"metrics-{case}-{backend}"
    given = ("patched", model_folder(FIVE_LAYERS), logs, *free_ports(1))
    environment |= {**SILENT, **HEARTBEATS, **dump_environment(logs / "probe")}
    both = {"metrics": True, "chunk": CHUNK, "environment": environment}
    prefill = cluster.prefill_server(topology, *given, max_tokens=POOL, **both)
    decode = cluster.decode_server(Topology(backend, page_size=decode_page), *given, **both)
    if spawn:
        prefill.fork = decode.fork = False
    with cluster.running([prefill, decode]):
        yield prefill, decode


def ask(prefill: Server, decode: Server, body: dict = FITS) -> int:
    """Asks both servers; returns the answer's status."""
    answer, _ = ask_both(prefill, decode, body | SAMPLING, PATIENCE)
    return answer.status_code


def assert_becomes(read, expected) -> None:
    """Asserts that metrics say so soon."""
    wait_until(lambda: read() == expected, SETTLE_SECONDS, 0.5)
    assert read() == expected


@pytest.mark.parametrize("backend", ["nixl"])
def test_clients_that_leave_are_told_from_failures(backend, reference, tmp_path):
    """Each request ends once on each server; those that clients left count as aborted.

    0.5.9 does not notice that a client has left if it has metrics, but has request lines without.
    """
    label, topology = f"metrics-clients-{backend}", Topology(backend, prefill_pp=2)
    environment = {"SGLANG_PD_REQUEST_LOG": str(tmp_path)}
    servers = make_pair(label, topology, FIVE_LAYERS, metrics=SINCE_0_5_18, environment=environment)
    prefill, decode, _ = servers
    with cluster.running(servers):
        assert_right_answers(servers, reference(FIVE_LAYERS, NEW_TOKENS), PATIENCE)
        assert disconnect_clients(servers, "both", seed=0) == 0
        assert_freed(prefill, decode)
        if SINCE_0_5_18:
            for server, peer in (
                (prefill, name_for_prefill(decode)),
                (decode, name_for_decode(prefill)),
            ):
                assert_becomes(lambda server=server: open_rooms(server), {})
                assert_aborts_are_counted(server, peer)
        time.sleep(WRITTEN_SECONDS)
        lines = [json.loads(line) for file in tmp_path.iterdir() for line in file.open()]
        for side, server in {"prefill": prefill, "decode": decode}.items():
            of_side = [one for one in lines if one["side"] == side]
            failed = {one["room"]: one["kind"] for one in of_side if one["ended"] == "failed"}
            assert len(failed) > CLIENTS / 10 and set(failed.values()) <= {*ABORTED, ANOTHER_RANK}
            served = [
                one for one in of_side if one["ended"] == "success" and " PP 0/" in one["rank"]
            ]
            if SINCE_0_5_18:
                assert len(served) == total(server, "requests_total", ended="success")
        assert_joined(tmp_path, prefill, decode)


def assert_aborts_are_counted(server: Server, peer: str) -> None:
    ended = sums(server, "requests_total", "ended")
    assert sum(ended.values()) <= CLIENTS + len(prompts()), ended
    assert ended.get(("aborted",), 0) > CLIENTS / 10, ended
    # Those whose first rank learns only that another one has failed.
    assert ended.get(("failed",), 0) < CLIENTS / 10, ended
    found = failures(server)
    assert {reason for _, reason in found} <= ABORTED, found
    assert {one for one, _ in found} <= {peer, "unknown"}, found
    assert not total(server, "lost_events_total")


def assert_joined(folder: Path, prefill: Server, decode: Server) -> None:
    """Asserts that `sglang-pd trace` joins both servers' lines of each request that was served."""
    _, found = run_tool("trace", str(folder), "--limit", "1000")
    assert not found["unread_lines"]
    served = [one for one in found["requests"] if one["ended"] == "success"]
    assert len(served) >= len(prompts())
    for one in served:
        assert one["prefill"].endswith(f":{name_for_decode(prefill)}"), one
        assert one["decode"].endswith(f":{name_for_prefill(decode)}"), one
        assert one["paths"] == ["whole"] and one["bytes"] > 0 < one["tokens"], one
        assert "sending" in one["seconds"]["prefill"], one
        assert {"waiting", "queued"} <= one["seconds"]["decode"].keys(), one


@pytest.mark.parametrize("backend", [DEAD_DECODE_BACKEND])
def test_dead_and_stopped_decode_servers_are_named(backend):
    with metered_pair(backend, "decode") as (prefill, decode):
        peer = name_for_prefill(decode)
        assert ask(prefill, decode) == 200
        assert_becomes(lambda: sums(prefill, "peers", "kind").get(("patched",)), 1)
        with ThreadPoolExecutor(1) as pool:
            with stopped(decode):
                waits = pool.submit(ask, prefill, decode)
                assert_becomes(lambda: sums(prefill, "peers", "kind").get(("silent",)), 1)
            waits.result()  # decode has it once it goes on
            assert wait_until(lambda: ask(prefill, decode) == 200, PATIENCE, 1)
            assert_becomes(lambda: sums(prefill, "peers", "kind").get(("silent",)), 0)
            assert {one for one, _ in failures(prefill)} <= {peer, "unknown"}
            with paused_in_mid_prompt(prefill, 3 * CHUNK) as reached:
                lost = pool.submit(ask, prefill, decode, {"input_ids": long_prompt(1)})
                reached()
                before = total(prefill, "failures_total", reason=LOST[backend])
                decode.stop()
            with contextlib.suppress(httpx.HTTPError):  # decode was to answer
                lost.result()
        assert_becomes(lambda: failures(prefill).get((peer, LOST[backend])), before + 1)
        assert_becomes(lambda: sums(prefill, "peers", "kind").get(("silent",)), 1)
        restart(decode)
        assert wait_until(lambda: ask(prefill, decode) == 200, PATIENCE, 1)
        assert_becomes(lambda: sums(prefill, "peers", "kind").get(("patched",)), 1)
        assert_becomes(lambda: sums(prefill, "peers", "kind").get(("silent",)), 0)
        assert not total(prefill, "lost_events_total")


@shown_by_0_5_23
@pytest.mark.parametrize("backend", ["nixl"])
def test_dead_prefill_server_is_named(backend):
    with metered_pair(backend, "prefill") as (prefill, decode):
        peer = name_for_decode(prefill)
        assert ask(prefill, decode) == 200
        with stopped(prefill), ThreadPoolExecutor(1) as pool:
            lost = pool.submit(
                ask_both, prefill, decode, FITS | SAMPLING, PATIENCE, to_prefill=False
            )
            assert_becomes(lambda: failures(decode), {(peer, "peer_lost"): 1})
            assert lost.result()[0].status_code >= 500
        assert total(decode, "requests_total", ended="failed") == 1
        engine = str(cluster.engine_folder("patched"))
        _, said = run_tool("doctor", "--engine", engine, "--backend", backend, "--url", decode.url)
        (why,) = (one for one in said["findings"] if "last hour" in one["found"])
        assert why["level"] == "warning" and why["found"].endswith(f":{peer}: 1 peer_lost"), why


@shown_by_0_5_23
@pytest.mark.parametrize("backend", ["nixl"])
def test_refused_servers_and_rejected_requests_are_told_apart(backend):
    too_long = {"input_ids": [5, 6, 7, 8] * (POOL // 4 + 50)}
    with metered_pair(backend, "rejected") as (prefill, decode):
        assert ask(prefill, decode) == 200
        assert ask(prefill, decode, too_long) >= 400
        assert_becomes(lambda: {why for _, why in failures(decode)}, {"rejected"})
        assert_becomes(lambda: {why for _, why in failures(prefill)}, {"rejected"})
    with metered_pair(backend, "refused", decode_page=32) as (prefill, decode):
        assert ask(prefill, decode) >= 400
        assert_becomes(lambda: {why for _, why in failures(decode)}, {"refused"})


@shown_by_0_5_23
def test_stray_messages_are_counted():
    topology = Topology("nixl")
    with metered_pair("nixl", "stray") as (prefill, decode):
        assert ask(prefill, decode) == 200
        with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
            socket.setsockopt(zmq.LINGER, 5000)
            socket.connect(rank_address(prefill, topology.prefill_pp - 1, 0))
            socket.send(b"hello")
        assert_becomes(lambda: total(prefill, "malformed_messages_total"), 1)
        assert ask(prefill, decode) == 200
        assert not failures(prefill) and not failures(decode)


@shown_by_0_5_23
def test_idle_servers_count_nothing():
    """Health checks are no requests."""
    with metered_pair("nixl", "idle") as (prefill, decode):
        time.sleep(3)
        for server in (prefill, decode):
            with httpx.Client(trust_env=False) as client:
                assert server.is_ready(client)
            assert not total(server, "requests_total") and not failures(server)


def differing_series(*servers: Server) -> set:
    return set.symmetric_difference(*map(series, servers))


def test_spawned_servers_have_the_series_of_forks():
    """Tests of metrics fork their servers; users start each anew."""
    with metered_pair("nixl", "forks") as forks, metered_pair("nixl", "spawned", spawn=True) as own:
        for pair in (forks, own):
            assert ask(*pair) == 200
        for both in zip(forks, own, strict=True):
            for server in both:
                assert_becomes(lambda server=server: total(server, "requests_total"), 1)
            # The engine writes some of its gauges seconds after a request.
            assert wait_until(lambda both=both: not differing_series(*both), SETTLE_SECONDS, 0.5), (
                differing_series(*both)
            )
