"""A request that prefill refuses also fails on decode, at once and with prefill's reason."""

import pytest
from engine_release import SINCE_0_5_18, nightly_if_not_default
from server_pairs import LOGS, ask_both, assert_freed, skip_if_unsupported
from serving_checks import record
from serving_scenarios import SEVEN_LAYERS, model_folder

from pd_harness import cluster
from pd_harness.cluster import Topology
from pd_harness.polling import is_in_time
from pd_harness.ports import free_ports

pytestmark = [pytest.mark.serving, pytest.mark.timeout(600)]

PREFILL_TOKENS = 256
AT_ONCE = 2  # seconds
BACKENDS = [pytest.param("nixl"), pytest.param("mooncake", marks=pytest.mark.nightly)]
# Refused requests, and texts in decode's error.
REFUSED = {
    "too long for prefill's pool": ({"input_ids": list(range(1, 400))}, "maximum"),
    "with a priority": ({"input_ids": [1, 2, 3], "priority": 1}, "does not accept priorities"),
}
if not SINCE_0_5_18:  # 0.5.9's prefill accepts priorities, whatever its options say
    del REFUSED["with a priority"]
FITS = {"input_ids": [5, 6, 7, 8]}
SAMPLING = {"sampling_params": {"max_new_tokens": 2, "temperature": 0}}


@pytest.fixture(params=BACKENDS)
def servers(request):
    """A prefill server with a small pool that refuses priorities, and a decode server.

    Over Mooncake prefill has two stages, each of which receives and refuses the request.
    """
    topology = Topology(backend=request.param, prefill_pp=2 if request.param == "mooncake" else 1)
    skip_if_unsupported(topology, "patched")
    logs = LOGS / f"refused-{request.param}"
    given = (topology, "patched", model_folder(SEVEN_LAYERS), logs, *free_ports(1))
    environment = {"SGLANG_DISAGGREGATION_WAITING_TIMEOUT": "30"}
    prefill = cluster.prefill_server(*given, max_tokens=PREFILL_TOKENS)
    prefill.command.append("--abort-on-priority-when-disabled")
    decode = cluster.decode_server(*given, environment=environment)
    with cluster.running([prefill, decode]):
        yield prefill, decode


@nightly_if_not_default
def test_refusal_by_prefill_reaches_decode(servers, request):
    slowest = 0.0
    for prefill_first in (0.0, 1.0, -1.0):
        answer, _ = ask_both(*servers, FITS | SAMPLING, 60, prefill_first=prefill_first)
        assert answer.status_code == 200, answer.text
        for body, said in REFUSED.values():
            answer, seconds = ask_both(*servers, body | SAMPLING, 60, prefill_first=prefill_first)
            waited = seconds + min(0.0, prefill_first)
            slowest = max(slowest, round(waited, 2))
            assert answer.status_code >= 400, answer.text
            assert "Prefill refused the request" in answer.text and said in answer.text
            assert is_in_time(waited, AT_ONCE), (said, prefill_first, seconds)
    assert_freed(*servers, patience=10)
    row = {"case": "prefill refuses a request", "backend": request.node.callspec.params["servers"]}
    record("attacks", **row, engine="patched", served=slowest, held={})
