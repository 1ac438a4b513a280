"""On which device each rank is placed and how ranks start; the tests need no NPU."""

import fleet as fleets
import pytest
from fleet import Fleet, Side
from transfer_checks import assert_right

from pd_harness import cluster, device


def test_ranks_get_distinct_npus(monkeypatch):
    monkeypatch.setattr(fleets, "device", lambda: "npu")
    fleet = Fleet(Side(tp=2, pp=2), Side(tp=2), layers=4, backend="ascend")
    ranks = [rank for role in ("prefill", "decode") for rank in fleet.ranks(role, 1, 2)]
    assert sorted(rank["gpu_id"] for rank in ranks) == list(range(fleet.size)) == list(range(6))
    assert {rank["device"] for rank in ranks} == {"npu"}
    stores = {rank["environment"]["ASCEND_MF_STORE_URL"] for rank in ranks}
    assert stores == {"tcp://127.0.0.1:2"}
    # The engine's order: TP ranks of a stage next to each other, decode after prefill.
    assert [(r["pp_rank"], r["tp_rank"]) for r in sorted(ranks, key=lambda r: r["gpu_id"])] == [
        *[(0, 0), (0, 1), (1, 0), (1, 1)],
        *[(0, 0), (0, 1)],
    ]


@pytest.mark.parametrize(
    "fleet, engines, reason",
    [
        (Fleet(), [], "not nixl"),
        (Fleet(backend="mooncake"), [], "not mooncake"),
        (Fleet(Side(pp=3), backend="ascend"), [], "it needs 4 NPUs, one for each rank"),
        (Fleet(backend="ascend"), ["stock", "patched"], "only engine is this Python's"),
    ],
)
def test_fleets_beyond_the_npus_are_skipped(serve, monkeypatch, fleet, engines, reason):
    for module in (device, cluster):
        monkeypatch.setattr(module, "npus", lambda: 2)
    monkeypatch.delenv(device.DEVICE_VARIABLE, raising=False)
    with pytest.raises(pytest.skip.Exception, match=reason):
        serve(fleet, *engines)


@pytest.mark.transport
@pytest.mark.nightly  # the engine is imported four times
def test_ranks_in_new_interpreters():
    """NPU ranks start like this, because the NPU driver does not survive a fork."""
    fork_server = fleets.ForkServer("patched", fresh=True)
    with fleets.running(Fleet(backend="ascend", fia=True), fork_server, fork_server) as servers:
        assert_right(servers, [9, 2, 3], [0, 1, 2])
