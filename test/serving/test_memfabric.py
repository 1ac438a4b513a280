"""Servers over each MemFabric release, nightly; the other tests use the newest one."""

import httpx
import pytest
from engine_release import SINCE_0_5_18
from fleet import install_library
from server_pairs import ask_router, make_pair
from serving_checks import NOT_JOINED, HangDetector
from serving_scenarios import FOUR_HEADS, NEW_TOKENS, SEVEN_LAYERS_MLA

from pd_harness import cluster
from pd_harness.cluster import Topology
from pd_harness.cpu_host.memfabric import DEFAULT_MEMFABRIC, MAY_HANG, MEMFABRIC_VARIABLE, RELEASES
from pd_harness.device import device, wait_for_memfabric_peers

pytestmark = [
    pytest.mark.serving,
    pytest.mark.nightly,
    pytest.mark.timeout(900),
    pytest.mark.skipif(device() != "cpu", reason="an NPU host has one MemFabric"),
]

FLEETS = {
    "mla_pp2": (Topology("ascend", prefill_pp=2, page_size=16), SEVEN_LAYERS_MLA),
    "fia_tp2_to_1": (Topology("ascend", prefill_tp=2, page_size=16, fia=True), FOUR_HEADS),
}
ATTEMPTS = 3
# Occasional failures of MemFabric releases, after which the servers are restarted.
FLAKY_RESULTS = {"hang": MAY_HANG, "not joined": ("1.0.8",)}


@pytest.mark.parametrize("name", FLEETS)
@pytest.mark.parametrize("memfabric", [one for one in RELEASES if one != DEFAULT_MEMFABRIC])
def test_tokens_over_each_memfabric(memfabric, name, reference):
    install_library("memfabric", memfabric)
    topology, model = FLEETS[name]
    expected = reference(model, NEW_TOKENS)
    label, environment = f"memfabric-{memfabric}-{name}", {MEMFABRIC_VARIABLE: memfabric}
    for _ in range(ATTEMPTS):
        servers = make_pair(label, topology, model, environment=environment)
        try:
            with cluster.running(servers):
                wait_for_memfabric_peers(memfabric)
                lost = HangDetector(*servers[:2])
                result, detail = ask_router(servers, expected, is_lost=lost)
        except cluster.ServerFailed as error:
            result, detail = "not joined" if NOT_JOINED in str(error) else "dead", str(error)
        if memfabric not in FLAKY_RESULTS.get(result, ()):
            break
    assert result == "right", detail


# 1.1.6 refuses to register the same memory again; 1.3.0 accepts it without effect.
REFUSALS_PER_RESUME = {"1.1.6": 1, "1.3.0": 0}


@pytest.mark.skipif(not SINCE_0_5_18, reason="0.5.9 registers nothing again after a pause")
@pytest.mark.parametrize("memfabric", REFUSALS_PER_RESUME)
def test_memory_release_and_resume(memfabric, reference):
    """After release and resume of KV memory, which MemFabric cannot unregister, all is right."""
    install_library("memfabric", memfabric)
    topology, model = FLEETS["mla_pp2"]
    expected = reference(model, NEW_TOKENS)
    environment = {MEMFABRIC_VARIABLE: memfabric}
    servers = make_pair(f"memfabric-{memfabric}-pause", topology, model, environment=environment)
    prefill, decode, _ = servers
    with cluster.running(servers):
        for paused in ((), (decode,), (prefill,), (prefill, decode)):
            for what in ("release", "resume"):
                for server in paused:
                    url = f"{server.url}/{what}_memory_occupation"
                    httpx.post(url, json={"tags": ["kv_cache"]}, timeout=60).raise_for_status()
            result, detail = ask_router(servers, expected)
            assert result == "right", (paused, detail)
    said = decode.log.read_text().count("did not register this rank's buffers again")
    assert said == 2 * REFUSALS_PER_RESUME[memfabric]
