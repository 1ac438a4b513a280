"""The `ascend` backend over each MemFabric release; the other tests use the newest.

With SGLANG_PD_MEMFABRIC=VERSION in the environment, all `ascend` tests use that release.

The tests record which MemFabric release works with which engine. From these records,
`python -m sglang_pd.dev.memfabric_page .pd-env/*/evidence/memfabric/*.json` makes
docs/memfabric.md.
"""

import contextlib
from collections.abc import Iterator

import fleet as fleets
import pytest
from transfer_checks import REQUESTS, assert_all_right
from transport_cases import ASCEND

from pd_harness.cluster import RELEASE_ENV
from pd_harness.cpu_host.memfabric import MAY_HANG, RELEASES
from pd_harness.device import device
from pd_harness.releases import release
from sglang_pd.dev.memfabric_page import as_json
from sglang_pd.doctor.memfabric import Run, table

pytestmark = [
    pytest.mark.transport,
    pytest.mark.nightly,
    pytest.mark.skipif(
        device() != "cpu", reason="an NPU host has one MemFabric, and no stock engine"
    ),
]

OUTCOMES = {"right": "right", "hang": "hangs"}  # any other state is "fails"
ATTEMPTS = 4
ENGINES = [("patched", "patched"), ("stock", "patched"), ("patched", "stock"), ("stock", "stock")]


@pytest.fixture(params=RELEASES)
def memfabric(request) -> str:
    fleets.install_library("memfabric", request.param)
    return request.param


@contextlib.contextmanager
def after_first_request(serve, memfabric: str, name: str, engines) -> Iterator[fleets.Servers]:
    """Runs a fleet that has finished a first request; starts another one if the request hangs.

    After the last attempt, which is the first for releases outside `MAY_HANG`, the request may
    have hung.
    """
    attempts = ATTEMPTS if memfabric in MAY_HANG else 1
    for attempt in range(1, attempts + 1):
        with serve(ASCEND[name], *engines, memfabric) as servers:
            hangs = servers.request(*REQUESTS[0], seconds=20).state == "hang"
            if not hangs or attempt == attempts:
                yield servers
                return


@pytest.mark.parametrize("engines", ENGINES, ids="->".join)
@pytest.mark.parametrize("name", ["mla", "tp2_to_1"])
def test_outcome_is_the_recorded_one(serve, memfabric, name, engines):
    """Stock supports these layouts, so the result depends on the decode rank's session id only."""
    with after_first_request(serve, memfabric, name, engines) as servers:
        requests = [servers.request(*pages, seconds=20) for pages in REQUESTS]
    states = {outcome.state for outcome in requests}
    outcome = OUTCOMES.get(states.pop(), "fails") if len(states) == 1 else "fails"
    if engines[0] == engines[1]:
        save_outcome(Run(memfabric, release(), engines[0] == "patched", name, outcome))
    known = table().outcome(memfabric, release(), engines[1] == "patched")
    expected = "right" if engines[1] == "patched" else known
    assert outcome == expected, requests


@pytest.mark.parametrize("name", ["fia_tp2_to_1", "mla_index_keys_draft_unequal", "mla_2_2_3"])
def test_patched_fleets_transfer_every_byte(serve, memfabric, name):
    with after_first_request(serve, memfabric, name, ["patched", "patched"]) as servers:
        assert_all_right(servers)


def save_outcome(run: Run) -> None:
    folder = RELEASE_ENV / "evidence" / "memfabric"
    folder.mkdir(parents=True, exist_ok=True)
    side = "patched" if run.patched else "stock"
    (folder / f"{run.memfabric}-{side}-{run.fleet}.json").write_text(as_json([run]))
