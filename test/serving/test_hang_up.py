"""After clients that hang up at any moment both servers live, and answer the next ones at once."""

import os
import time

import pytest
from hang_ups import CHUNK, Fleet, fleet, hang_up
from of_release import IS_DEFAULT
from probed import probed, still_held
from serving_checks import held, outcome, record, retry_memfabric_faults, running
from serving_scenarios import NEW_TOKENS, model_folder, prompts

from pd_harness import cluster
from pd_harness.device import device
from pd_harness.releases import release
from pd_harness.waiting import awaited, busy

pytestmark = [
    pytest.mark.serving,
    pytest.mark.xdist_group("hang-ups"),  # two beside each other take more than twice as long
    pytest.mark.timeout(900),
    pytest.mark.skipif(device() != "cpu", reason="the probe is the CPU host's"),
]

# Where each rank has a core of its own; ranks that share cores, among themselves or with others,
# take as much longer.
AT_ONCE = 5  # seconds, for the next prompts
PATIENCE = 60  # seconds, for them, to tell late from never
# Where 0.5.9 answers, it may take minutes; what 0.5.23 cannot serve, it never serves.
STOCK_PATIENCE = {"0.5.9": 400, "0.5.23": 60}
# For a request that its client withdrew from one of the servers before that had read it.
PATIENT = {
    "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": "15",
    "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": "15",
    # How often the engine looks whether a client has hung up; of itself every 4 s, and what waits
    # for that is not ours.
    "SGLANG_REQUEST_STATE_WAIT_TIMEOUT": "1",
}
FREE_SECONDS = 10
MOST_BUSY = 8.0  # for what clients do; a moment of more would have them come for half an hour
SEEDS = 5
ALWAYS = {"0.5.9": (), "0.5.23": ("nixl-tp1_pp2_to_tp1-both",)}

PP_2, PP_3, TP_2 = {"prefill_pp": 2}, {"prefill_pp": 3}, {"prefill_tp": 2}
PP_2_TP_2, TP_2_TO_2 = {**PP_2, **TP_2}, {**TP_2, "decode_tp": 2}
TO_DP_2 = {"decode_tp": 2, "decode_dp": 2}
# All sizes with each backend, and each pair of backend, size, way and overlap once; pipeline stages
# know no overlap in this release.
FLEETS = [
    fleet("nixl", **PP_2),
    fleet("nixl", "either", **PP_3),
    fleet("nixl", "router", overlap=True, **TP_2),
    fleet("nixl", **PP_2_TP_2),
    fleet("nixl", "either", overlap=True, **TP_2_TO_2),
    fleet("mooncake", "router", **PP_2),
    fleet("mooncake", **PP_3),
    fleet("mooncake", "either", **TP_2),
    # To TP 1 it would be a TCP message for each token, layer and head: 15 s for six prompts.
    fleet("mooncake", "either", **PP_2_TP_2, decode_tp=2),
    fleet("mooncake", overlap=True, **TP_2_TO_2),
    fleet("ascend", **PP_2),
    fleet("ascend", "router", **PP_3),
    fleet("ascend", overlap=True, **TP_2),
    fleet("ascend", "router", **PP_2_TP_2),
    fleet("ascend", "either", **TP_2_TO_2),
    fleet("nixl", "either", **TP_2, prefill_dp=2, **TO_DP_2),
    fleet("ascend", **PP_2, **TO_DP_2),
    fleet("nixl", "router", verify=True, **PP_2),
    fleet("mooncake", verify=True, **PP_2_TP_2, decode_tp=2),
]

# And what stock answers then. Tokens are wrong with stages of unequal length: the question is how
# soon they come.
STOCK = {
    "0.5.9": [(fleet(backend, **PP_2), "wrong") for backend in ("nixl", "mooncake", "ascend")],
    "0.5.23": [
        (fleet("nixl", **PP_2), "http 500"),  # after the time-outs of PATIENT
        (fleet("nixl", **TP_2), "right"),
        (fleet("nixl", "either", overlap=True, **TP_2_TO_2), "right"),
        (fleet("mooncake", **PP_2), "wrong"),
        (fleet("mooncake", overlap=True, **TP_2_TO_2), "right"),
        (fleet("ascend", **PP_2), "right"),
        (fleet("ascend", "router", **PP_3), "right"),
    ],
}


def every_run() -> list:
    always = ALWAYS[release()]
    return [pytest.param(one, [0], id=f"{one.name}-0") for one in FLEETS if one.name in always]


def nightly() -> list:
    """For two stages over each backend all seeds, for each other fleet one, in turn.

    In releases other than the default two instead of all.
    """
    many = SEEDS if IS_DEFAULT else 2
    found = []
    for at, one in enumerate(FLEETS):
        has_many = one.topology.prefill_pp == 2 and one.topology.prefill_tp == 1
        seeds = [(at + 2 * n) % SEEDS for n in range(many if has_many else 1)]
        found.append(pytest.param(one, seeds, id=one.name, marks=pytest.mark.nightly))
    return found


@pytest.mark.parametrize("fleet, seeds", [*every_run(), *nightly()])
def test_hang_ups(fleet, seeds, reference):
    row = retry_memfabric_faults(
        lambda: after_hang_ups(fleet, "patched", seeds, reference, PATIENCE)
    )
    assert row["next_prompts"] == "right", row
    shared = max(1.0, sum(fleet.topology.ranks) / os.cpu_count())
    assert row["seconds"] <= AT_ONCE * row["busy"] * shared, row
    assert not row["held"], row
    assert row["never_ended"] == 0, row


def beside_it() -> list:
    return [pytest.param(*one, id=one[0].name) for one in STOCK[release()]]


@pytest.mark.nightly
@pytest.mark.timeout(1800)  # 0.5.9 answers late
@pytest.mark.parametrize("fleet, next_prompts", beside_it())
def test_stock_beside_it(fleet, next_prompts, reference):
    patience = STOCK_PATIENCE[release()]
    row = retry_memfabric_faults(lambda: after_hang_ups(fleet, "stock", [0], reference, patience))
    assert row["next_prompts"] == next_prompts, row


def after_hang_ups(fleet: Fleet, engine: str, seeds, reference, patience: float) -> dict:
    """What two hundred clients for each seed leave behind; recorded.

    Fails with the log of a server that has ended, or whose MemFabric has lost memory of a peer.
    """
    expected = reference(fleet.model, NEW_TOKENS)
    logs = cluster.PD_ENV / "logs" / "serving" / f"hang-up-{fleet.name}-{engine}"
    servers = cluster.pd_servers(
        fleet.topology,
        model_folder(fleet.model),
        logs,
        engine,
        engine,
        environment={
            **probed(logs / "probe"),
            **PATIENT,
            **({"SGLANG_PD_VERIFY": "1"} if fleet.verify else {}),
        },
        overlap=fleet.overlap,
        chunk=CHUNK,
    )
    row = {"fleet": fleet.name, "engine": engine, "seeds": 0, "never_ended": 0, "held": {}}
    row |= {"next_prompts": "right", "alive": True, "seconds": 0.0, "busy": 1.0}
    with running(servers):
        try:
            for seed in seeds:
                row["seeds"] += 1
                pace = min(busy(), MOST_BUSY) * fleet.pace
                row["never_ended"] += hang_up(servers, fleet.way, seed, pace)
                _ask(servers, expected, patience * pace, row)
                row["busy"] = round(max(row["busy"], pace, busy()), 1)
                if not (row["alive"] and _is_free(servers, row)):
                    break
        finally:
            record("hang_ups", **row)
        for server in servers:
            server.check_running()
    return row


def _ask(servers, expected, patience: float, row: dict) -> None:
    """Ask the next six prompts; notes the outcome, and the longest time until all are answered."""
    start = time.monotonic()
    answers = cluster.ask(servers[-1].url, prompts(), NEW_TOKENS, patience)
    row["seconds"] = max(row["seconds"], round(time.monotonic() - start, 1))
    ended = [server.name for server in servers if server.has_ended()]
    row["alive"] = not ended
    result, detail = outcome(answers, ended, expected)
    if result != "right":
        row |= {"next_prompts": result, "detail": detail}


def _is_free(servers, row: dict) -> bool:
    """Whether soon no token, request or room is held; notes what is held otherwise."""

    def is_free() -> bool:
        row["held"] = _held(servers)
        return not row["held"]

    return awaited(is_free, FREE_SECONDS * row["busy"], pause=0.2)


def _held(servers) -> dict[str, dict]:
    """By server and rank: what its own count says, then what is in its queues and tables."""
    found = {}
    for server in servers[:2]:
        counted = {name: count for name, count in held(server).items() if count}
        found |= {server.name: counted} if counted else {}
        found |= still_held(server)
    return found
