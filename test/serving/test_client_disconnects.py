"""After clients disconnect at random moments, both servers live and answer new ones at once."""

import os
import time

import pytest
from disconnects import CHUNK, DisconnectCase, disconnect_clients, fleet
from scheduler_dumps import dump_environment, pending_by_rank
from server_pairs import LOGS, ended, make_pair
from serving_checks import (
    heads_moved_by,
    outcome,
    record,
    retry_memfabric_faults,
    running,
    server_load,
)
from serving_scenarios import NEW_TOKENS, moves_heads, prompts

from pd_harness import cluster
from pd_harness.device import device
from pd_harness.polling import busy, wait_until
from pd_harness.releases import release

pytestmark = [
    pytest.mark.serving,
    pytest.mark.nightly,
    pytest.mark.xdist_group("hang-ups"),  # two at once take more than twice as long
    pytest.mark.timeout(900),
    pytest.mark.skipif(device() != "cpu", reason="the probe is the CPU host's"),
]

# If each rank has its own core; the limit grows by as much as ranks share cores, among themselves
# or with other processes.
AT_ONCE = 5  # seconds, for the next prompts
PATIENCE = 60  # seconds, for the next prompts, to distinguish late answers from none
# 0.5.9 may take minutes to answer; later releases never serve what they have not served by then.
# 0.5.23 fails requests after 15 s, and holds their pages for another 30 s.
STOCK_PATIENCE = {"0.5.9": 400, "0.5.18": 30, "0.5.23": 60}
# For a request whose client disconnects from one server before that server reads it.
ENGINE_TIMEOUTS = {
    "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": "15",
    "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": "15",
    # Interval at which the engine checks whether a client has disconnected; 4 s by default, which
    # the patches do not change.
    "SGLANG_REQUEST_STATE_WAIT_TIMEOUT": "1",
}
FREE_SECONDS = 10
MAX_LOAD_FACTOR = 8.0  # for the clients' pace; a load peak would make them take half an hour
SEEDS = 3

PP_2, PP_3, TP_2 = {"prefill_pp": 2}, {"prefill_pp": 3}, {"prefill_tp": 2}
PP_2_TP_2, TP_2_TO_2 = {**PP_2, **TP_2}, {**TP_2, "decode_tp": 2}
PP_2_TO_2 = {**PP_2, "decode_pp": 2}
TO_DP_2 = {"decode_tp": 2, "decode_dp": 2}
# All sizes with each backend, and each pair of backend, size, way and overlap once. This release
# does not support overlap with pipeline stages.
FLEETS = [
    fleet("nixl", **PP_2),
    fleet("nixl", "either", **PP_3),
    fleet("nixl", "router", overlap=True, **TP_2),
    fleet("nixl", **PP_2_TP_2),
    fleet("nixl", "either", overlap=True, **TP_2_TO_2),
    fleet("mooncake", "router", **PP_2),
    fleet("mooncake", **PP_3),
    fleet("mooncake", "either", **TP_2),
    fleet("mooncake", "either", **PP_2_TP_2),
    fleet("mooncake", overlap=True, **TP_2_TO_2),
    fleet("ascend", **PP_2),
    fleet("ascend", "router", **PP_3),
    fleet("ascend", overlap=True, **TP_2),
    fleet("ascend", "router", **PP_2_TP_2),
    fleet("ascend", gqa=True, **TP_2),
    fleet("nixl", "router", decode_tp=2),  # prefill packs KV heads
    fleet("mooncake", "either", decode_tp=2),
    fleet("nixl", "either", **PP_2_TO_2),
    fleet("mooncake", **PP_2_TO_2),
    fleet("ascend", "either", **TP_2_TO_2),
    fleet("nixl", "either", **TP_2, prefill_dp=2, **TO_DP_2),
    fleet("ascend", **PP_2, **TO_DP_2),
    fleet("nixl", "router", verify=True, **PP_2),
    fleet("mooncake", verify=True, **PP_2_TP_2, decode_tp=2),
]

# (fleet, stock's outcome afterwards). With stages of unequal length stock's tokens are wrong; the
# test is about how soon they come. A prefill server of 0.5.18 with stages may exit. 0.5.18 alone
# repeats a case that takes minutes, and whose outcome is the same on 0.5.23.
LATER = [
    (fleet("nixl", **PP_2), "http 500"),  # after the time-outs of ENGINE_TIMEOUTS
    (fleet("mooncake", **PP_2), "wrong"),
    (fleet("ascend", **PP_2), "right"),
]
STOCK = {
    "0.5.9": [(fleet(backend, **PP_2), "wrong") for backend in ("nixl", "mooncake", "ascend")],
    "0.5.18": [*LATER, (fleet("mooncake", **PP_2_TO_2), "hang")],
    "0.5.23": LATER,
}


def cases() -> list:
    """Returns one seed, in turn, for each fleet."""
    return [pytest.param(one, [at % SEEDS], id=one.name) for at, one in enumerate(FLEETS)]


@pytest.mark.parametrize("fleet, seeds", cases())
def test_servers_recover_after_disconnects(fleet, seeds, reference):
    row = retry_memfabric_faults(
        lambda: state_after_disconnects(fleet, "patched", seeds, reference, PATIENCE)
    )
    assert row["next_prompts"] == "right", row
    shared = max(1.0, sum(fleet.topology.ranks) / os.cpu_count())
    assert row["seconds"] <= AT_ONCE * row["busy"] * shared, row
    assert not row["held"], row
    assert row["never_ended"] == 0, row


@pytest.mark.timeout(1800)  # 0.5.9 answers late
@pytest.mark.parametrize(
    "fleet, next_prompts", [pytest.param(*one, id=one[0].name) for one in STOCK[release()]]
)
def test_stock_after_disconnects(fleet, next_prompts, reference):
    patience = STOCK_PATIENCE[release()]
    may_exit = release() == "0.5.18" and fleet.topology.prefill_pp > 1
    row = retry_memfabric_faults(
        lambda: state_after_disconnects(fleet, "stock", [0], reference, patience, may_exit)
    )
    assert row["next_prompts"] == next_prompts or (may_exit and not row["alive"]), row


def state_after_disconnects(
    fleet: DisconnectCase,
    engine: str,
    seeds,
    reference,
    patience: float,
    may_exit: bool = False,
) -> dict:
    """Runs two hundred clients per seed; records and returns what they leave behind.

    Fails with the log of a server that has exited, unless one may, or whose MemFabric has lost
    memory of a peer.
    """
    expected = reference(fleet.model, NEW_TOKENS)
    label = f"hang-up-{fleet.name}-{engine}"
    environment = {**dump_environment(LOGS / label / "probe"), **ENGINE_TIMEOUTS}
    environment |= {"SGLANG_PD_VERIFY": "1"} if fleet.verify else {}
    options = {"environment": environment, "overlap": fleet.overlap, "chunk": CHUNK}
    servers = make_pair(label, fleet.topology, fleet.model, engine, **options)
    row = {"fleet": fleet.name, "engine": engine, "seeds": 0, "never_ended": 0, "held": {}}
    row |= {"next_prompts": "right", "alive": True, "seconds": 0.0, "busy": 1.0}
    with running(servers):
        try:
            for seed in seeds:
                row["seeds"] += 1
                pace = min(busy(), MAX_LOAD_FACTOR) * fleet.pace
                row["never_ended"] += disconnect_clients(servers, fleet.way, seed, pace)
                _ask(servers, expected, patience * pace, row)
                row["busy"] = round(max(row["busy"], pace, busy()), 1)
                if not (row["alive"] and _is_free(servers, row)):
                    break
            if row["alive"]:
                wanted = moves_heads(fleet.topology, fleet.model, engine, engine)
                assert heads_moved_by(*servers[:2]) == wanted
        finally:
            record("hang_ups", **row)
        if not may_exit:
            for server in servers:
                server.check_running()
    return row


def _ask(servers, expected, patience: float, row: dict) -> None:
    """Sends the next six prompts; notes their outcome, and the longest time for all answers."""
    start = time.monotonic()
    answers = cluster.ask(servers[-1].url, prompts(), NEW_TOKENS, patience)
    row["seconds"] = max(row["seconds"], round(time.monotonic() - start, 1))
    exited = ended(servers)
    row["alive"] = not exited
    result, detail = outcome(answers, exited, expected)
    if result != "right":
        row |= {"next_prompts": result, "detail": detail}


def _is_free(servers, row: dict) -> bool:
    """Returns whether the servers soon free all tokens, requests and rooms; notes the rest."""

    def is_free() -> bool:
        row["held"] = _pending(servers)
        return not row["held"]

    return wait_until(is_free, FREE_SECONDS * row["busy"], pause=0.2)


def _pending(servers) -> dict[str, dict]:
    """Returns each server's own counts, and each rank's queues and tables; without zeros."""
    found = {}
    for server in servers[:2]:
        counted = {name: count for name, count in server_load(server).items() if count}
        found |= {server.name: counted} if counted else {}
        found |= pending_by_rank(server)
    return found
