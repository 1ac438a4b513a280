"""KV pools of two bytes and of one byte per element, which change all item lengths."""

import pytest
from engine_release import SINCE_0_5_18
from server_pairs import LOGS, ended, make_pair
from serving_checks import outcome
from serving_scenarios import FIVE_LAYERS, NEW_TOKENS, SEVEN_LAYERS_MLA, model_folder, prompts

from pd_harness import cluster
from pd_harness.cluster import Topology
from pd_harness.device import device

pytestmark = [
    pytest.mark.serving,
    pytest.mark.nightly,
    pytest.mark.timeout(600),
    pytest.mark.skipif(device() != "cpu", reason="each takes an NPU more than its own fleet"),
]

PATIENCE = 120  # seconds
FLEETS = {
    "nixl_tp2_to_1": (Topology("nixl", prefill_tp=2, page_size=16), FIVE_LAYERS),
    "nixl_pp2": (Topology("nixl", prefill_pp=2, page_size=16), FIVE_LAYERS),
    "ascend_mla_pp2": (Topology("ascend", prefill_pp=2, page_size=16), SEVEN_LAYERS_MLA),
    "ascend_fia_tp2_to_1": (Topology("ascend", prefill_tp=2, page_size=16, fia=True), FIVE_LAYERS),
}


# With another TP size or other chunks, a sum sometimes rounds to another float8, and one server's
# answers are not a valid reference. So float8 is tested with one topology only.
NO_FP8 = pytest.mark.skipif(SINCE_0_5_18, reason="later engines keep no float8 KV on a CPU")
CASES = [
    *((name, "bfloat16") for name in FLEETS),
    pytest.param("nixl_pp2", "fp8_e5m2", marks=NO_FP8),
]


def ask_one_by_one(url: str) -> list[cluster.Answer]:
    """Asks the prompts one by one, because sums in a shared batch may round differently."""
    return [cluster.ask(url, [one], NEW_TOKENS, PATIENCE)[0] for one in prompts()]


@pytest.mark.parametrize("name, dtype", CASES)
def test_answers_are_right_with_kv_dtype(name, dtype):
    """The reference server stores its KV in the same dtype, so it rounds in the same way."""
    (topology, model), label = FLEETS[name], f"{dtype}-{name}"
    servers = make_pair(label, topology, model, kv_dtype=dtype)
    options = {"page_size": 16, "attention": topology.attention, "kv_dtype": dtype}
    single = cluster.engine_server("single", "stock", model_folder(model), LOGS / label, **options)
    with cluster.running([*servers, single]):
        expected, answers = (ask_one_by_one(url) for url in (single.url, servers[-1].url))
        assert not any(answer.failure for answer in expected), expected
        result, detail = outcome(answers, ended([*servers, single]), expected)
    assert result == "right", detail
