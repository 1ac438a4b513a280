"""One of two decode ranks is attacked while it has open requests; the other one is served.

Prefill has two ranks, each with the engine's workers.
"""

import pytest
from attacked_fleet import (
    ATTACKS,
    LONG_SECONDS,
    ONE_QUEUE,
    TCP,
    AttackedFleet,
    assert_unharmed,
    attacked_fleet,
    killed,
)
from engine_release import IS_DEFAULT, SINCE_0_5_18
from fleet import Fleet
from serving_checks import record
from transfer_checks import BACKENDS

pytestmark = [pytest.mark.transport, pytest.mark.nightly, pytest.mark.timeout(900)]

STOCK_SECONDS = 30  # for all requests
DELAYED_SECONDS = 12.0  # a slower request waited for the attacked rank, maybe until TCP timed out
KILLS = 20


def fleet_of(backend: str, prefill_tp: int = 2, **more: str) -> Fleet:
    over_tcp = TCP if backend == "nixl" else {}
    return attacked_fleet(backend, prefill_tp, **over_tcp, **more)


def record_attack(case: str, backend: str, engine: str, found: dict, held: dict) -> None:
    """Records a row for `scripts/evidence.sh`; a loop that raised has no known pause."""
    right = [one["seconds"] for one in found["served"] if one["state"] == "right"]
    open_ones = sum(end["state"] == "hang" for end in found["ends"])
    raised = {"prefill ranks whose scheduler raises": len(found["raised"])}
    record(
        "attacks",
        case=f"decode rank, {case}",
        backend=backend,
        engine=engine,
        pause_ms="" if found["raised"] else round(1000 * found["pause"]),
        served=max(right) if len(right) == len(found["served"]) else None,
        waited=max(one["seconds"] for one in found["served"]),
        held={**held, "requests": open_ones, **raised},
    )


@pytest.mark.alone
@pytest.mark.waits
@pytest.mark.parametrize("backend", [*BACKENDS, "ascend"] if IS_DEFAULT else BACKENDS)
def test_attack_on_one_rank_does_not_delay_the_other(serve, backend):
    with serve(fleet_of(backend)) as servers:
        attacked = AttackedFleet(servers)
        for case in ATTACKS:
            found = attacked.survive(case)
            held = attacked.leftover_counts_after_close()
            record_attack(case, backend, "patched", found, held)
            assert held["rooms"] == 0, (case, held)


@pytest.mark.alone
@pytest.mark.parametrize("backend", [*BACKENDS, "ascend"])
def test_kills_under_load_do_not_delay_the_other_rank(serve, backend):
    """Simulates a rolling restart that fails under load."""
    case = f"killed {KILLS} times"
    with serve(fleet_of(backend)) as servers:
        attacked = AttackedFleet(servers)
        attacks = []
        for _ in range(KILLS):
            victim = attacked.start_victim()
            attacks.append(attacked.attack(killed, victim, LONG_SECONDS, 1, live_pause=0))
            assert_unharmed(case, attacks[-1])
        assert attacked.is_served(attacked.other, 20)
        held = attacked.leftover_counts_after_close()
        names = ("served", "ends", "raised")
        found = {name: [one for attack in attacks for one in attack[name]] for name in names}
        found["pause"] = max(attack["pause"] for attack in attacks)
        record_attack(case, backend, "patched", found, held)
        assert held["rooms"] == 0, held


STOCK = [
    (backend, case)
    # Stock 0.5.9 needs an older MemFabric.
    for backend in (*BACKENDS, *(["ascend"] if SINCE_0_5_18 else []))
    for case in ("killed", "stopped", "packets vanish")
]


# Over `ascend`, a write here does not need the peer's process to run. 0.5.9's scheduler writes over
# NIXL itself, waits for no write, and raises if one fails.
STOCK_RAISES = [] if SINCE_0_5_18 else [("nixl", "killed"), ("nixl", "packets vanish")]
STOCK_SERVES = [one for one in STOCK if "killed" in one or "ascend" in one]
if not SINCE_0_5_18:
    STOCK_SERVES.append(("nixl", "stopped"))


@pytest.mark.parametrize("backend, case", STOCK)
def test_stock_attack_has_the_known_effect(serve, backend, case):
    # Over NIXL, 0.5.9 cannot send from two prefill ranks to one decode rank.
    tp = 2 if SINCE_0_5_18 or backend != "nixl" else 1
    with serve(fleet_of(backend, tp, **ONE_QUEUE), "stock", "stock") as servers:
        attacked = AttackedFleet(servers)
        victim = attacked.start_victim()
        if case != "killed":
            attacked.alive.add(victim)
        found = attacked.attack(ATTACKS[case], victim, STOCK_SECONDS)
        record_attack(case, backend, "stock", found, attacked.leftover_counts())
    slowest = max(one["seconds"] for one in found["served"])
    is_served = found["served"][-1]["state"] == "right" and slowest < DELAYED_SECONDS
    assert bool(found["raised"]) == ((backend, case) in STOCK_RAISES), found
    if not found["raised"]:
        assert is_served == ((backend, case) in STOCK_SERVES), found
