"""The NIXL backend over older releases of NIXL; the other tests use the newest one.

With SGLANG_PD_NIXL=VERSION in the environment, all transport tests use that release.
"""

import pytest
from engine_release import SINCE_0_5_18
from error_texts import CONNECTION_CUT, TRANSFER_FAILURES
from fleet import Fleet, Side, missing_ucx_reason
from transfer_checks import (
    PAGES,
    REQUESTS,
    assert_connected_early,
    assert_failed,
    assert_heads_moved,
    assert_ranks_can_join_while_sending,
    assert_recovers,
    assert_transfers,
    only_0_5_9,
)
from transport_cases import NSA

from pd_harness.releases import release

pytestmark = [pytest.mark.transport, pytest.mark.nightly]

# NIXL 0.9 holds the GIL during its calls. 1.0 and 1.1 do not, and have no option to synchronize
# their callers. Later NIXL releases have one, and later engines require it. With 0.5.18, servers in
# the field have 1.4.
VERSIONS = {
    "0.5.9": ["0.9.0", "1.0.1", "1.1.0"],
    "0.5.18": ["1.4.0"],
    "0.5.23": ["1.2.0", "1.3.2"],
}[release()]


@pytest.fixture(params=VERSIONS)
def version(request) -> str:
    return request.param


@pytest.fixture()
def fork_server(fork_server, version):
    """Makes ranks use this NIXL release; skips the test if its UCX plug-in cannot be loaded."""

    def of(engine: str):
        if reason := missing_ucx_reason(version):
            pytest.skip(reason)
        return fork_server(engine, version)

    return of


RIGHT = {
    "tp2_to_1": Fleet(Side(tp=2)),
    "tp1_to_4_replicated": Fleet(Side(), Side(tp=4), kv_heads=2),
    "pp2_odd": Fleet(Side(pp=2), layers=7),
    "pp2_tp2_to_1": Fleet(Side(tp=2, pp=2), layers=3),
    "nsa_draft_pp2_odd": Fleet(Side(pp=2, draft_layers=1), Side(draft_layers=1), layers=7, **NSA),
    "swa_tp2_to_1": Fleet(Side(tp=2), layers=6, v_width=4, hybrid="swa"),
}


@pytest.mark.parametrize("name", RIGHT)
def test_every_byte_arrives_over_another_nixl(serve, version, name):
    with serve(RIGHT[name]) as servers:
        for rank in (*servers.prefill, *servers.decode):
            assert f"/nixl/{version}/" in rank.call("nixl")["file"]
        for request in REQUESTS:
            assert_transfers(servers, request)
        assert_heads_moved(servers)


@pytest.mark.parametrize("how", ["status", "late status"])
def test_failing_transfer_fails_only_its_request(serve, how):
    with serve(Fleet()) as servers:
        assert_transfers(servers)
        servers.prefill[0].call("plan_faults", how=how, at=[2])
        assert_failed(servers.request(*PAGES), TRANSFER_FAILURES["nixl", how])
        assert_transfers(servers)


def test_lost_connections_are_restored(serve):
    with serve(Fleet()) as servers:
        assert_transfers(servers)
        for cutting in (*servers.prefill, *servers.decode):
            assert cutting.call("cut_connections")["cut"]
            if SINCE_0_5_18 and (outcome := servers.request(*PAGES)).state != "right":
                assert_failed(outcome, CONNECTION_CUT["nixl"])
            assert_recovers(servers)


def test_decode_ranks_are_connected_at_registration(serve):
    with serve(Fleet(Side(), Side(tp=2))) as servers:
        assert_connected_early(servers)


@only_0_5_9("later agents of NIXL lock themselves")
def test_decode_ranks_join_while_transfers_run(serve):
    assert_ranks_can_join_while_sending(serve)
