"""`sglang-pd verify` on real servers: it passes right KV, and reports wrong KV."""

import contextlib
from collections.abc import Iterator

import pytest
from engine_release import IS_DEFAULT, NIGHTLY_IF_NOT_DEFAULT, nightly_if_not_default
from server_pairs import ended, make_pair, skip_if_unsupported, wait_for_peers
from serving_checks import record, run_tool
from serving_scenarios import SCENARIOS, Scenario

from pd_harness import cluster
from sglang_pd.errors import ExitCode

pytestmark = [pytest.mark.serving, pytest.mark.timeout(900)]

RIGHT = {"ascend-mla_pp2_to_dp2", "nixl-tp2_to_4_replicated", "ascend-mla_pp2_retract"}
RIGHT |= {"mooncake-pp2_odd_layers", "nixl-pp2_to_pp2"}
RIGHT |= {"nixl-pp2_tp2_to_1", "mooncake-tp1_to_2"}  # KV heads are interleaved, and packed
SLOW = {"mooncake-pp2_tp2_to_1"}  # stock sends one TCP message per token, layer and head
FEW = ("--lengths", "40", "--requests", "6")


@contextlib.contextmanager
def running(
    scenario: Scenario, test: str, sends: str = "patched", **environment: str
) -> Iterator[list[cluster.Server]]:
    """Runs the scenario with patched servers that verify; skips the test if it cannot run.

    Prefill sends with the code of the engine ``sends``.
    """
    skip_if_unsupported(scenario.topology, "patched", sends)
    environment = {"SGLANG_PD_VERIFY": "1", **environment}
    if sends == "stock":
        environment["SGLANG_PD_STOCK_TRANSFER"] = str(cluster.engine_folder("stock"))
        environment["SGLANG_PD_PACKED"] = "0"  # stock sends slices
    label = f"verify-{scenario.name}-{test}"
    servers = make_pair(label, scenario.topology, scenario.model, environment=environment)
    with cluster.running(servers):
        wait_for_peers(scenario.topology)
        yield servers


def doctor(scenario: Scenario, *urls: str) -> list[dict]:
    """Returns what `sglang-pd doctor`, given their engine, finds about running servers."""
    asked = [word for url in urls for word in ("--url", url)]
    engine, backend = str(cluster.engine_folder("patched")), scenario.topology.backend
    _, found = run_tool("doctor", "--engine", engine, "--backend", backend, *asked)
    return [one for one in found["findings"] if one["group"] == "servers"]


def scenario_params(names: set[str], always: str = "") -> list:
    """Returns the named scenarios as parameters, on other releases every second one.

    All but `always` run nightly.
    """
    marks = {always: NIGHTLY_IF_NOT_DEFAULT}
    named = [one for one in SCENARIOS if one.name in names]
    return [
        pytest.param(one, id=one.name, marks=marks.get(one.name, [pytest.mark.nightly]))
        for at, one in enumerate(named)
        if IS_DEFAULT or at % 2 == 0 or one.name == always
    ]


@pytest.mark.parametrize("scenario", scenario_params(RIGHT))
def test_valid_transfer_passes(scenario):
    with running(scenario, "right") as (prefill, decode, router):
        status, found = run_tool("verify", "--router", router.url, *FEW)
        said = doctor(scenario, prefill.url, decode.url)
    assert (status, found["right"], found["mismatches"]) == (0, True, []), found
    assert {one["level"] for one in said} == {"ok"}, said
    text = " ".join(one["found"] for one in said)
    assert "patched, and compares KV" in text and "compatible" in text, said
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
        status, found = run_tool("verify", "--router", servers[-1].url, *FEW)
        assert not ended(servers)
    assert status == ExitCode.MISMATCH, found
    assert found["mismatches"], found
    assert found["stopped"] and len(set(found["mismatches"])) == len(found["mismatches"])
    record(
        "verify",
        scenario=scenario.name,
        requests=found["requests"],
        failed=found["stopped"],
        text=found["mismatches"][0],
    )


@nightly_if_not_default
def test_server_without_verification_is_refused():
    scenario = next(one for one in SCENARIOS if one.name == "nixl-tp1_to_1")
    with running(scenario, "off", SGLANG_PD_VERIFY="0") as (prefill, decode, router):
        pair = ("--prefill", prefill.url, "--decode", decode.url)
        for where in (("--router", router.url), pair):
            status, found = run_tool("verify", *where)
            assert status == ExitCode.NOT_VERIFYING
            assert "does not compare KV" in found["error"]["text"], found
            assert "SGLANG_PD_VERIFY=1" in found["error"]["text"], found
