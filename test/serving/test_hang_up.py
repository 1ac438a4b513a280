"""Clients that hang up at any moment: both servers live, and answer the next ones at once."""

import asyncio
import dataclasses
import random
import time

import httpx
import pytest
from probed import probed, still_held
from serving_checks import held, holds_nothing, outcome, record, seconds_until
from serving_scenarios import (
    FIVE_LAYERS,
    NEW_TOKENS,
    SEVEN_LAYERS_MLA,
    model_folder,
    prompts,
)

from sglang_pd import cluster
from sglang_pd.cpu_host.models import VOCABULARY, TinyModel
from sglang_pd.device import await_peers

pytestmark = [pytest.mark.serving, pytest.mark.timeout(900)]

CLIENTS = 200
APART = 0.1  # seconds, at most
PATIENCE = 1.5  # seconds, at most, of a client
CHARACTERS = (3, 1500)
CHUNK = 128
AT_ONCE_SECONDS = 5  # in which the next prompts must be answered
STOCK_SECONDS = 400  # in which stock may answer them
FREE_SECONDS = 30  # in which nothing more is held; the engine looks every 4 s for who hung up
NIGHTLY_SEEDS = range(5)
WAYS = ("both", "router", "prefill", "decode")


@dataclasses.dataclass(frozen=True)
class Fleet:
    """``way`` is whom the clients ask, or hang up on while the other server is waited for."""

    topology: cluster.Topology
    model: TinyModel
    engine: str = "patched"
    way: str = "both"
    overlap: bool = False

    @property
    def name(self) -> str:
        sizes = self.topology
        prefill = f"tp{sizes.prefill_tp}_pp{sizes.prefill_pp}"
        parts = [sizes.backend, f"{prefill}_to_{sizes.decode_tp}", self.way]
        return "-".join([*parts, *(["overlap"] if self.overlap else [])])


def fleet(backend: str, way="both", overlap=False, engine="patched", **sizes) -> Fleet:
    is_ascend = backend == "ascend"
    topology = cluster.Topology(backend, page_size=16 if is_ascend else 1, **sizes)
    return Fleet(topology, SEVEN_LAYERS_MLA if is_ascend else FIVE_LAYERS, engine, way, overlap)


@pytest.mark.parametrize(
    "fleet, seeds",
    [pytest.param(fleet("nixl", prefill_pp=2), [0], id="nixl-pp2")],
)
def test_hang_ups(fleet, seeds, reference):
    expected = reference(fleet.model, NEW_TOKENS)
    label = f"hang-up-{fleet.name}-{fleet.engine}"
    logs = cluster.PD_ENV / "logs" / "serving" / label
    prefill, decode, router = servers = cluster.pd_servers(
        fleet.topology,
        model_folder(fleet.model),
        logs,
        fleet.engine,
        fleet.engine,
        environment=probed(logs / "probe"),
        overlap=fleet.overlap,
        chunk=CHUNK,
    )
    with cluster.running(servers):
        for seed in seeds:
            asyncio.run(hang_ups(prefill, decode, router, fleet.way, seed))
            start = time.monotonic()
            answers = cluster.ask(router.url, prompts(), NEW_TOKENS, 60)
            print("seconds", time.monotonic() - start, outcome(answers, [], expected))
            for server in servers:
                server.check_running()
            time.sleep(5)
            for server in servers[:2]:
                print(server.name, held(server), still_held(server))


async def hang_ups(prefill, decode, router, way: str, seed: int) -> None:
    """Two hundred clients, one after the other, each of which hangs up."""
    source = random.Random(seed)
    limits = httpx.Limits(max_connections=None)
    async with (
        httpx.AsyncClient(timeout=60, trust_env=False, limits=limits) as client,
        asyncio.TaskGroup() as clients,
    ):
        for _ in range(CLIENTS):
            urls = [prefill.url, decode.url]
            clients.create_task(one(client, urls, prefill, source))
            await asyncio.sleep(source.random() * APART)


async def one(client, urls, prefill, source) -> None:
    characters = source.randint(*CHARACTERS)
    body = {
        "input_ids": [source.randrange(256) for _ in range(characters)],
        "sampling_params": {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True},
        "bootstrap_host": cluster.HOST,
        "bootstrap_port": prefill.bootstrap_port,
        "bootstrap_room": source.randrange(2**32, 2**63),
    }
    patience = source.random() ** 2 * PATIENCE
    posts = [asyncio.create_task(client.post(f"{url}/generate", json=body)) for url in urls]
    await asyncio.wait(posts, timeout=patience)
    for post in posts:
        post.cancel()
    await asyncio.gather(*posts, return_exceptions=True)
