"""Three hundred requests through a pair whose decode retracts: all right, with constant memory."""

import random
import time

import pytest
from engine_release import IS_DEFAULT
from server_pairs import assert_freed, ended, make_pair, skip_if_unsupported, wait_for_peers
from serving_checks import outcome, record, resident_mib, retractions
from serving_scenarios import FOUR_HEADS, NEW_TOKENS

from pd_harness import cluster
from pd_harness.cluster import Topology

pytestmark = [
    pytest.mark.serving,
    pytest.mark.nightly,
    pytest.mark.alone,
    pytest.mark.timeout(1800),
]

# Each round sends all prompts, which together exceed prefill's radix cache.
PROMPTS = 50
ROUNDS = 6
LONGEST = 600  # tokens
AT_ONCE = 8
PATIENCE = 180  # seconds, for an answer
# Growth in the first rounds is warm-up. In later rounds, a leak of one prompt's KV (8 KiB per
# token) in fifty requests would exceed this.
WARM_UP = 3
GROWTH_MIB = 16
# Returns free memory to the system at once, so that only leaks grow.
ALLOCATOR = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
}


def soak_prompts() -> list[list[int]]:
    """Returns prompts of mixed lengths as token ids, the same in every run."""
    source = random.Random(500)
    lengths = [1, LONGEST, *(source.randint(1, LONGEST) for _ in range(PROMPTS - 2))]
    return [[source.randrange(256) for _ in range(length)] for length in lengths]


if IS_DEFAULT:
    SOAKED = [("nixl", 2, "patched"), ("mooncake", 1, "patched")]
    SOAKED += [("nixl", 1, "stock")]  # measures the engine's own memory
else:
    SOAKED = [("nixl", 1, "patched"), ("ascend", 1, "patched")]


@pytest.mark.parametrize("backend, prefill_tp, engine", SOAKED)
def test_soak(backend, prefill_tp, engine, reference):
    name = f"{backend} TP {prefill_tp} to 1, {engine}"
    topology = Topology(backend, prefill_tp=prefill_tp, page_size=16, retract=True)
    skip_if_unsupported(topology, engine)
    asked = soak_prompts()
    expected = reference(FOUR_HEADS, NEW_TOKENS, asked)
    label = f"soak-{backend}-{prefill_tp}-{engine}"
    servers = make_pair(label, topology, FOUR_HEADS, engine, environment=ALLOCATOR)
    prefill, decode, router = servers
    # The allocator reads its variables at the start of a process.
    prefill.fork = decode.fork = False
    order = random.Random(0)
    wrong, prefill_mib, decode_mib = [], [], []
    with cluster.running(servers):
        wait_for_peers(topology, engine)
        start = time.monotonic()
        for _ in range(ROUNDS):
            turn = order.sample(range(PROMPTS), PROMPTS)
            questions, wanted = [asked[at] for at in turn], [expected[at] for at in turn]
            answers = cluster.ask(router.url, questions, NEW_TOKENS, PATIENCE, AT_ONCE)
            exited = ended(servers)
            outcomes = (outcome([got], exited, [want]) for got, want in zip(answers, wanted))
            wrong += [detail for result, detail in outcomes if result != "right"]
            for server, sizes in ((prefill, prefill_mib), (decode, decode_mib)):
                assert_freed(server, patience=PATIENCE)
                sizes.append(round(resident_mib(server)))
        seconds = time.monotonic() - start
    retracted = retractions(decode.log.read_text(errors="replace"))
    record(
        "soak",
        fleet=name,
        requests=ROUNDS * PROMPTS,
        wrong=len(wrong),
        retractions=retracted,
        seconds=round(seconds, 1),
        warm_up=WARM_UP,
        prefill_mib=prefill_mib,
        decode_mib=decode_mib,
    )
    assert not wrong, wrong[:5]
    assert retracted >= PROMPTS, f"decode retracted only {retracted}"
    for sizes in (prefill_mib, decode_mib):
        assert max(sizes[WARM_UP:]) - sizes[WARM_UP - 1] <= GROWTH_MIB, sizes
