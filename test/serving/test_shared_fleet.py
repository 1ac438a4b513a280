"""Many servers in one fleet with the engine's defaults: each prefill with each decode server.

Scheduling overlaps unless there are pipeline stages, and the radix cache is enabled.
"""

import dataclasses
import json
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import torch
from engine_release import NIGHTLY_IF_NOT_DEFAULT
from server_pairs import LOGS, ask_router, assert_freed, restart
from serving_checks import LOGPROB_TOLERANCE, heads_moved_by, outcome, record, server_load
from serving_scenarios import (
    FIVE_LAYERS,
    NEW_TOKENS,
    SEVEN_LAYERS_MLA,
    model_folder,
    prompts,
    shared_prefix_prompts,
)

from pd_harness import cluster
from pd_harness.cpu_host.models import TinyModel, load_checkpoint
from pd_harness.device import device
from pd_harness.ports import free_ports
from pd_harness.releases import release

pytestmark = [
    pytest.mark.serving,
    pytest.mark.xdist_group("shared fleets"),
    pytest.mark.timeout(600),
    pytest.mark.skipif(device() != "cpu", reason="it takes more NPUs than one machine has"),
    *NIGHTLY_IF_NOT_DEFAULT,
]

PATIENCE = 120  # seconds, for an answer
FREE_SECONDS = 30


@dataclasses.dataclass
class SharedFleet:
    """Prefill and decode servers by name, and a router for each pair."""

    name: str
    model: TinyModel
    prefills: dict[str, cluster.Server]
    decodes: dict[str, cluster.Server]
    routers: dict[tuple[str, str], cluster.Server] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        for p, prefill in self.prefills.items():
            for d, decode in self.decodes.items():
                name = f"router-{p}-{d}"
                self.routers[p, d] = cluster.router([prefill], [decode], LOGS / self.name, name)

    @property
    def servers(self) -> list[cluster.Server]:
        return [*self.prefills.values(), *self.decodes.values(), *self.routers.values()]

    def check(self, pair: tuple[str, str], expected, asked=None) -> None:
        """Sends a pair the prompts, all at once, and asserts that the answers are ``expected``."""
        start = time.monotonic()
        servers = [*self.servers, self.routers[pair]]
        result, detail = ask_router(servers, expected, asked, PATIENCE)
        record(
            "serving",
            scenario=f"{self.name} {' to '.join(pair)}",
            engine="patched",
            outcome=result,
            seconds=round(time.monotonic() - start, 1),
            detail=detail,
        )
        engines = [*self.prefills.values(), *self.decodes.values()]
        assert result == "right", f"{detail}; {[(one.name, server_load(one)) for one in engines]}"


def make_shared_fleet(
    name: str,
    model: TinyModel,
    prefills: dict,
    decodes: dict,
    metrics: bool = False,
    **environment,
) -> SharedFleet:
    """Makes patched servers of these topologies, of which each server uses its own side."""
    given = ("patched", model_folder(model), LOGS / name, *free_ports(1))
    both = {"overlap": True, "metrics": metrics, "environment": environment}

    def made(make, role: str, topologies: dict) -> dict[str, cluster.Server]:
        return {
            key: make(topology, *given, name=f"{role}-{key}", **both)
            for key, topology in topologies.items()
        }

    return SharedFleet(
        name,
        model,
        made(cluster.prefill_server, "prefill", prefills),
        made(cluster.decode_server, "decode", decodes),
    )


def sizes(backend: str, **topologies: dict) -> dict[str, cluster.Topology]:
    return {
        name: cluster.Topology(backend, page_size=16, **fields)
        for name, fields in topologies.items()
    }


PREFILLS = {"tp1": {}, "tp2": {"prefill_tp": 2}, "pp2": {"prefill_pp": 2}}
DECODES = {"tp1": {}, "tp2": {"decode_tp": 2}}
PAIRS = [(p, d) for p in PREFILLS for d in DECODES]
# Which side of these pairs packs or interleaves KV heads.
MOVERS = {("tp1", "tp2"): "prefill", ("pp2", "tp2"): "prefill", ("tp2", "tp1"): "decode"}


@pytest.fixture(scope="module")
def nixl():
    sides = (sizes("nixl", **PREFILLS), sizes("nixl", **DECODES))
    fleet = make_shared_fleet("nixl-shared", FIVE_LAYERS, *sides)
    with cluster.running(fleet.servers):
        yield fleet


@pytest.fixture(scope="module")
def ascend():
    fleet = make_shared_fleet(
        "ascend-shared",
        SEVEN_LAYERS_MLA,
        sizes("ascend", pp2={"prefill_pp": 2}),
        sizes("ascend", plain={}, retract={"retract": True}),
    )
    with cluster.running(fleet.servers):
        yield fleet


@pytest.mark.parametrize("decode", ["plain", "retract"])
def test_mla_from_stages_is_right(decode, ascend, reference):
    # Runs first, because the other fleet takes a minute to become idle.
    ascend.check(("pp2", decode), reference(ascend.model, NEW_TOKENS))


@pytest.mark.parametrize("pair", PAIRS, ids="-to-".join)
def test_each_pair_answers_right(pair, nixl, reference):
    nixl.check(pair, reference(nixl.model, NEW_TOKENS))
    p, d = pair
    if pair in MOVERS:
        assert heads_moved_by(nixl.prefills[p], nixl.decodes[d]) == MOVERS[pair]


def test_all_pairs_answer_right_at_once(nixl, reference):
    """Each rank then has open rooms of several peers with different layouts."""
    expected = reference(nixl.model, NEW_TOKENS)
    with ThreadPoolExecutor(len(PAIRS)) as pool:
        for done in [pool.submit(nixl.check, pair, expected) for pair in PAIRS]:
            done.result()


@pytest.mark.parametrize("pair", [("tp2", "tp1"), ("pp2", "tp2")], ids="-to-".join)
def test_prompts_with_a_shared_prefix_are_right(pair, nixl, reference):
    """The first prompt's prefix is cached when the other prompts arrive, all at once."""
    asked = shared_prefix_prompts()
    expected = reference(nixl.model, NEW_TOKENS, asked)
    nixl.check(pair, expected[:1], asked[:1])
    nixl.check(pair, expected[1:], asked[1:])
    nixl.check(pair, expected, asked)


def streamed(url: str, prompt: list[int], stop_after: int = NEW_TOKENS) -> list[list[int]]:
    """Returns the answer's tokens up to each streamed piece; disconnects after ``stop_after``."""
    pieces = []
    body = {**cluster.greedy_body(prompt, NEW_TOKENS), "stream": True}
    options = {"json": body, "timeout": PATIENCE, "trust_env": False}
    with httpx.stream("POST", f"{url}/generate", **options) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                pieces.append(json.loads(line.removeprefix("data: "))["output_ids"])
            if len(pieces) >= stop_after:
                break
    return pieces


@pytest.mark.parametrize("pair", [("tp2", "tp1"), ("pp2", "tp1")], ids="-to-".join)
def test_streamed_tokens_are_right(pair, nixl, reference):
    for prompt, expected in list(zip(prompts(), reference(nixl.model, NEW_TOKENS)))[::2]:
        pieces = streamed(nixl.routers[pair].url, prompt)
        assert len(pieces) > 1
        assert all(expected.ids[: len(piece)] == tuple(piece) for piece in pieces)
        assert tuple(pieces[-1]) == expected.ids


@pytest.mark.parametrize("pair", [("tp2", "tp1"), ("pp2", "tp1")], ids="-to-".join)
def test_aborted_stream_frees_both_servers(pair, nixl, reference):
    p, d = pair
    for prompt in prompts()[::2]:
        assert streamed(nixl.routers[pair].url, prompt, 1)
    assert_freed(nixl.prefills[p], nixl.decodes[d], patience=FREE_SECONDS)
    nixl.check(pair, reference(nixl.model, NEW_TOKENS))


def posted(url: str, body: dict) -> httpx.Response:
    return httpx.post(f"{url}/generate", json=body, timeout=PATIENCE, trust_env=False)


@pytest.mark.parametrize("pair", [("tp2", "tp1"), ("pp2", "tp2")], ids="-to-".join)
def test_prompt_logprobs_come_from_prefill(pair, nixl):
    """Prefill computes them, and the router merges them into decode's answer."""
    prompt = prompts()[3]
    body = cluster.greedy_body(prompt, NEW_TOKENS)
    body |= {"return_logprob": True, "logprob_start_len": 0}
    rows = posted(nixl.routers[pair].url, body).json()["meta_info"]["input_token_logprobs"]
    assert [row[1] for row in rows] == prompt
    assert rows[0][0] is None
    found = [row[0] for row in rows[1:]]
    apart = max(abs(got - want) for got, want in zip(found, logprobs(nixl.model, prompt)))
    assert apart < LOGPROB_TOLERANCE["float32"]


def logprobs(model: TinyModel, prompt: list[int]) -> list[float]:
    """Returns the logprob of each token but the first, computed by the model without a server."""
    with torch.no_grad():
        scores = (
            load_checkpoint(model_folder(model))(torch.tensor([prompt])).logits[0].log_softmax(-1)
        )
    return scores[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0].tolist()


@pytest.mark.skipif(
    release() != "0.5.9", reason="later engines, stock too, let them wait for 300 s"
)
def test_parallel_sampling_is_refused(nixl, reference):
    """0.5.9 gives all samples one room and cannot serve them, so the client gets an error."""
    body = cluster.greedy_body(prompts()[3], NEW_TOKENS)
    body["sampling_params"]["n"] = 2
    answer = posted(nixl.routers["tp2", "tp1"].url, body)
    assert answer.status_code >= 400, answer.text
    nixl.check(("tp2", "tp1"), reference(nixl.model, NEW_TOKENS))
    assert_freed(nixl.prefills["tp2"], nixl.decodes["tp1"], patience=FREE_SECONDS)


@pytest.fixture
def two_by_two_fleet():
    """Two prefill and two decode servers with different TP sizes, behind one router.

    Prefill does not know a request's decode server, so it waits, here for 10 s, for the metadata
    of a decode server that died.
    """
    both = ("tp1", "tp2")
    fleet = make_shared_fleet(
        "nixl-two-and-two",
        FIVE_LAYERS,
        sizes("nixl", **{size: PREFILLS[size] for size in both}),
        sizes("nixl", **{size: DECODES[size] for size in both}),
        SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT="10",
    )
    servers = [[*fleet.prefills.values()], [*fleet.decodes.values()]]
    router = cluster.router(*servers, LOGS / fleet.name, "everyone")
    with cluster.running([*fleet.servers, router]):
        yield fleet, router


@pytest.mark.nightly
def test_one_of_two_decode_servers_dies(two_by_two_fleet, reference):
    """Requests of live servers go on; those of the dead one fail, and no server keeps anything.

    The router does not retry here, so a request that it sends to a dead server fails.
    """
    fleet, router = two_by_two_fleet
    expected = reference(fleet.model, NEW_TOKENS)
    dying = fleet.decodes["tp2"]
    for _ in range(3):
        answers = cluster.ask(router.url, prompts(), NEW_TOKENS, PATIENCE)
        assert outcome(answers, [], expected)[0] == "right", answers
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(cluster.ask, router.url, prompts() * 4, NEW_TOKENS, PATIENCE)
        time.sleep(0.3)  # the router has sent them to servers; some are running
        dying.stop()
        answers = asking.result()
    assert_right_or_refused(answers, expected * 4)
    fleet.check(("tp1", "tp1"), expected)
    fleet.check(("tp2", "tp1"), expected)
    alive = (*fleet.prefills.values(), fleet.decodes["tp1"])
    assert_freed(*alive, patience=FREE_SECONDS)
    restart(dying)
    for pair in fleet.routers:
        fleet.check(pair, expected)


def assert_right_or_refused(answers, expected) -> None:
    for got, want in zip(answers, expected, strict=True):
        if got.failure is not None:
            assert got.failure.startswith("http 5"), got
        else:
            assert outcome([got], [], [want])[0] == "right"
    assert any(answer.failure is None for answer in answers)
