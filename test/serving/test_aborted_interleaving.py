"""A request that is aborted while decode interleaves its KV heads leaves nothing to others."""

import pytest
from engine_release import SINCE_0_5_18
from server_pairs import make_pair, wait_for_peers
from serving_checks import outcome, running, server_load
from serving_scenarios import NEW_TOKENS, TABLE

from pd_harness import cluster
from pd_harness.cpu_host.packing_log import INTERLEAVED_LOG_LINE, PAUSE_VARIABLE
from pd_harness.device import device
from pd_harness.polling import wait_until

pytestmark = [
    pytest.mark.serving,
    pytest.mark.timeout(900),
    pytest.mark.nightly,
    pytest.mark.skipif(not SINCE_0_5_18, reason="0.5.9's decode keeps no prefixes"),
    pytest.mark.skipif(device() != "cpu", reason="the pause is the CPU host's"),
]

PATIENCE = 180
FREE_SECONDS = 60
(PREFIXES,) = (one for one in TABLE if one.name == "nixl-prefixes_tp2_to_1")


def test_half_interleaved_prefix_is_not_kept(reference):
    """Decode keeps prefixes: not that of a request whose client leaves in between."""
    prompts = PREFIXES.make_prompts()[:1]
    expected = reference(PREFIXES.model, NEW_TOKENS, prompts)
    slow = {PAUSE_VARIABLE: "1"}  # after each of ten buffers
    servers = make_pair("half-interleaved", PREFIXES.topology, PREFIXES.model, environment=slow)
    with running(servers):
        prefill, decode, router = servers
        wait_for_peers(PREFIXES.topology)

        def is_interleaving() -> bool:
            return INTERLEAVED_LOG_LINE in decode.log.read_text(errors="replace")

        (left,) = cluster.ask(router.url, prompts, NEW_TOKENS, PATIENCE, is_lost=is_interleaving)
        assert left.failure == "hang", left
        assert wait_until(lambda: not any(server_load(decode).values()), FREE_SECONDS)
        cached = []
        for _ in range(2):
            answers = cluster.ask(router.url, prompts, NEW_TOKENS, PATIENCE)
            assert outcome(answers, [], expected)[0] == "right"
            cached.append(answers[0].cached)
        assert cached[0] == 0 < cached[1], cached
