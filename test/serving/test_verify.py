"""`sglang-pd verify` on real servers: it passes right KV, and reports wrong KV."""

import contextlib
from collections.abc import Iterator

import pytest
from engine_release import NIGHTLY_IF_NOT_DEFAULT, nightly_if_not_default
from serving_checks import record, run_tool
from serving_scenarios import SCENARIOS, Scenario, model_folder

from pd_harness import cluster
from pd_harness.cpu_host.memfabric import memfabric_for
from pd_harness.device import wait_for_memfabric_peers
from sglang_pd.errors import ExitCode

pytestmark = [
    pytest.mark.serving,
    pytest.mark.timeout(900),
]

RIGHT = {"ascend-mla_pp2_to_dp2", "nixl-tp2_to_4_replicated", "ascend-mla_pp2_retract"}
RIGHT |= {"mooncake-pp2_odd_layers", "nixl-pp2_to_pp2"}
SLOW = {"mooncake-pp2_tp2_to_1"}  # one TCP message per token, layer and head
FEW = ("--lengths", "40", "--requests", "6")


@contextlib.contextmanager
def running(
    scenario: Scenario, test: str, sends: str = "patched", **environment: str
) -> Iterator[list[cluster.Server]]:
    """Runs the scenario with patched servers that verify; skips the test if it cannot run.

    Prefill sends with the code of the engine ``sends``.
    """
    topology = scenario.topology
    if reason := cluster.skip_reason(topology.backend, sum(topology.ranks), ("patched", sends)):
        pytest.skip(reason)
    if sends == "stock":
        environment["SGLANG_PD_STOCK_TRANSFER"] = str(cluster.engine_folder("stock"))
    servers = cluster.pd_servers(
        topology,
        model_folder(scenario.model),
        cluster.PD_ENV / "logs" / "verify" / f"{scenario.name}-{test}",
        "patched",
        "patched",
        {"SGLANG_PD_VERIFY": "1", **environment},
    )
    with cluster.running(servers):
        if topology.backend == "ascend":
            wait_for_memfabric_peers(memfabric_for("patched"))
        yield servers


def verify(*options: str) -> tuple[int, dict]:
    return run_tool("verify", *options)


def doctor(scenario: Scenario, *urls: str) -> list[dict]:
    """Returns what `sglang-pd doctor`, given their engine, finds about running servers."""
    asked = [word for url in urls for word in ("--url", url)]
    engine, backend = str(cluster.engine_folder("patched")), scenario.topology.backend
    _, found = run_tool("doctor", "--engine", engine, "--backend", backend, *asked)
    return [one for one in found["findings"] if one["group"] == "servers"]


def scenario_params(names: set[str], always: str) -> list:
    return [
        pytest.param(
            scenario,
            id=scenario.name,
            marks=NIGHTLY_IF_NOT_DEFAULT if scenario.name == always else NIGHTLY,
        )
        for scenario in SCENARIOS
        if scenario.name in names
    ]


NIGHTLY = [pytest.mark.nightly]


@pytest.mark.parametrize("scenario", scenario_params(RIGHT, "mooncake-pp2_odd_layers"))
def test_valid_transfer_passes(scenario):
    with running(scenario, "right") as (prefill, decode, router):
        status, found = verify("--router", router.url, *FEW)
        said = doctor(scenario, prefill.url, decode.url)
    assert (status, found["right"], found["mismatches"]) == (0, True, []), found
    assert {one["level"] for one in said} == {"ok"}, said
    told = " ".join(one["found"] for one in said)
    assert "patched, and compares KV" in told and "compatible" in told, said
    assert found["compared"] == found["requests"] > 30
    size = scenario.topology
    senders = {pair["prefill"] for pair in found["pairs"]}
    receivers = {pair["decode"] for pair in found["pairs"]}
    assert len(receivers) == size.decode_tp * size.decode_pp, receivers
    assert len(senders) >= size.prefill_pp, senders
    assert all(pair["bytes"] for pair in found["pairs"]) or "replicated" in scenario.name


MISMATCH = {scenario.name for scenario in SCENARIOS if scenario.stock == "wrong"} - SLOW


@pytest.mark.parametrize("scenario", scenario_params(MISMATCH, "ascend-fia_pp2_odd_layers"))
def test_stock_corruption_is_found(scenario):
    """Verification alone finds it: prefill sends with stock's code, without reference answers."""
    with running(scenario, "stock", sends="stock") as servers:
        status, found = verify("--router", servers[-1].url, *FEW)
        ended = [server.name for server in servers if server.has_ended()]
    assert status == ExitCode.MISMATCH, found
    assert not ended
    assert found["mismatches"], found
    assert any("KV verification failed" in failure for failure in found["failures"])
    record(
        "verify",
        scenario=scenario.name,
        requests=found["requests"],
        failed=len(found["failures"]),
        text=found["mismatches"][0],
    )


@nightly_if_not_default
def test_server_without_verification_is_refused():
    scenario = next(one for one in SCENARIOS if one.name == "nixl-tp1_to_1")
    with running(scenario, "off", SGLANG_PD_VERIFY="0") as (prefill, decode, router):
        for where in (
            ("--router", router.url),
            ("--prefill", prefill.url, "--decode", decode.url),
        ):
            status, found = verify(*where)
            assert status == ExitCode.NOT_VERIFYING
            assert "does not compare KV" in found["error"]["text"], found
            assert "SGLANG_PD_VERIFY=1" in found["error"]["text"], found
