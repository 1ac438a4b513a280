"""While a decode server with open requests is stopped, another one's requests are served."""

import pytest
from attacked_fleet import (
    NOTICED_SECONDS,
    ONE_QUEUE,
    TCP,
    AttackedFleet,
    attacked_fleet,
    stopped,
)
from engine_release import SINCE_0_5_18
from fleet import Fleet
from transfer_checks import BACKENDS, nightly_except

from pd_harness.polling import is_in_time

# A turn that waits for a peer takes seconds; next to Mooncake writes to a stopped process, a turn
# may take 0.25 s.
LONGEST_TURN = 0.5
OPEN_REQUESTS = 60
RECOVERY = (20, 5)  # seconds until the stopped rank is served again, and limit of each request
FLEETS = [*BACKENDS, "ascend", "nixl_tcp"]
# (fleet, seconds for which stock serves no request of another server). 0.5.9's scheduler writes
# over NIXL itself and waits for no write.
STOCK_DELAYS = [("mooncake", 20), *([("nixl_tcp", 120)] if SINCE_0_5_18 else [])]


def fleet_of(name: str, **more: str) -> Fleet:
    """Returns a fleet with one prefill rank, whose decode waits for longer than a test."""
    backend, _, is_tcp = name.partition("_")
    over_tcp = TCP if is_tcp else {}
    sizes = {"prefill_tp": 1, "open_requests": OPEN_REQUESTS}
    return attacked_fleet(backend, waiting_seconds=300, **sizes, **over_tcp, **more)


@pytest.mark.nightly
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name, limit", STOCK_DELAYS)
def test_stock_delays_the_other_server(serve, name, limit):
    with serve(fleet_of(name, **ONE_QUEUE), "stock", "stock") as servers:
        attacked = AttackedFleet(servers)
        found = attacked.attack(stopped, attacked.start_victim(), limit, live_ones=1)
    assert [answer["state"] for answer in found["served"]] == ["hang"], found


@pytest.mark.parametrize("name", nightly_except(FLEETS, "nixl", "nixl_tcp", "ascend"))
def test_stopped_peer_does_not_delay_another(serve, name):
    with serve(fleet_of(name)) as servers:
        found = AttackedFleet(servers).survive("stopped", 1, RECOVERY)
    failed = [end for end in found["ends"] if end["state"] == "failed"]
    if name == "nixl_tcp":  # over the other backends, writes to a stopped process succeed
        assert failed
    for end in failed:
        assert "SGLANG_PD_SILENT_SECONDS" in end["reason"], end
    assert is_in_time(found["pause"], LONGEST_TURN), found["pause"]


@pytest.mark.nightly
@pytest.mark.skipif(not SINCE_0_5_18, reason="0.5.9's scheduler writes over NIXL itself")
def test_aborted_requests_of_a_stopped_peer_free_the_worker(serve):
    """Aborts free prefill's only worker, which writes to the peer, before the peer is silent."""
    with serve(fleet_of("nixl_tcp", **ONE_QUEUE)) as servers:
        attacked, (prefill,) = AttackedFleet(servers), servers.prefill
        victim = attacked.start_victim()
        rooms = attacked.open_rooms(victim)
        request = (attacked.other, [OPEN_REQUESTS], [OPEN_REQUESTS])
        with stopped(attacked, victim):
            prefill.call("send_at_once", requests=rooms, seconds=2)
            (outcome,) = servers.requests_at_once([request], seconds=60)
    (answer,) = outcome.decode
    assert answer["state"] == "right" and is_in_time(answer["seconds"], 2 * NOTICED_SECONDS), answer
