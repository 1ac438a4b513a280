"""Whole servers over each MemFabric that is tried, at night; the other tests use the newest."""

import pytest
from serving_checks import Lost, outcome
from serving_scenarios import FOUR_HEADS, NEW_TOKENS, SEVEN_LAYERS_MLA, model_folder, prompts

from pd_harness import cluster
from pd_harness.cpu_host.memfabric import DEFAULT, MAY_HANG, RELEASES, VARIABLE
from pd_harness.device import await_peers, device

pytestmark = [
    pytest.mark.serving,
    pytest.mark.nightly,
    pytest.mark.timeout(900),
    pytest.mark.skipif(device() != "cpu", reason="an NPU host has one MemFabric"),
]

FLEETS = {
    "mla_pp2": (cluster.Topology("ascend", prefill_pp=2, page_size=16), SEVEN_LAYERS_MLA),
    "fia_tp2_to_1": (
        cluster.Topology("ascend", prefill_tp=2, page_size=16, fia=True),
        FOUR_HEADS,
    ),
}
PATIENCE = 120
ATTEMPTS = 3


@pytest.mark.parametrize("name", FLEETS)
@pytest.mark.parametrize("memfabric", [one for one in RELEASES if one != DEFAULT])
def test_right_tokens(memfabric, name, reference):
    topology, model = FLEETS[name]
    expected = reference(model, NEW_TOKENS)
    for _ in range(ATTEMPTS if memfabric in MAY_HANG else 1):
        servers = cluster.pd_servers(
            topology,
            model_folder(model),
            cluster.PD_ENV / "logs" / "serving" / f"memfabric-{memfabric}-{name}",
            "patched",
            "patched",
            {VARIABLE: memfabric},
        )
        with cluster.running(servers):
            await_peers(memfabric)
            *engines, router = servers
            lost = Lost(*engines)
            lost.begin()
            answers = cluster.ask(router.url, prompts(), NEW_TOKENS, PATIENCE, is_lost=lost)
            ended = [server.name for server in servers if server.has_ended()]
        result, detail = outcome(answers, ended, expected)
        if result != "hang":
            break
    assert result == "right", detail
