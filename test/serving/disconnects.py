"""Clients that hang up at any moment, and the fleets that they do it to."""

import asyncio
import dataclasses
import random

import httpx
from serving_scenarios import FIVE_LAYERS, NEW_TOKENS, SEVEN_LAYERS_MLA

from pd_harness import cluster
from pd_harness.cpu_host.models import TinyModel

CLIENTS = 200
MAX_CLIENT_GAP = 0.1  # seconds between two clients, at most
MAX_CLIENT_PATIENCE = 1.5  # seconds, at most, of a client
LENGTHS = (3, 1500)  # tokens of a prompt
CHUNK = 128  # tokens, so that most prompts are prefilled, and sent, in many pieces
RESPONSE_TIMEOUT_S = 60  # for the server on which a client does not hang up


@dataclasses.dataclass(frozen=True)
class DisconnectCase:
    """``way`` is whom the clients ask and hang up on.

    - "both": both servers, and both connections are closed at once
    - "either": both servers, and one connection is closed; the other server must end it, too
    - "router": the router
    """

    topology: cluster.Topology
    model: TinyModel
    way: str = "both"
    overlap: bool = False
    verify: bool = False  # all KV is compared

    @property
    def pace(self) -> float:
        """How much longer than elsewhere clients take for all that they do.

        With DP attention decode's ranks work in step, also those that have nothing to decode, and
        leave prefill, on two cores, half of what it has elsewhere.
        """
        return 2.0 if self.topology.decode_dp > 1 else 1.0

    @property
    def name(self) -> str:
        sizes = self.topology
        prefill = f"tp{sizes.prefill_tp}_pp{sizes.prefill_pp}{_groups(sizes.prefill_dp)}"
        decode = f"tp{sizes.decode_tp}{_groups(sizes.decode_dp)}"
        parts = [sizes.backend, f"{prefill}_to_{decode}", self.way]
        more = [name for name in ("overlap", "verify") if getattr(self, name)]
        return "-".join([*parts, *more])


def _groups(dp: int) -> str:
    return f"_dp{dp}" if dp > 1 else ""


def fleet(
    backend: str, way: str = "both", overlap: bool = False, verify: bool = False, **sizes: int
) -> DisconnectCase:
    """Stages of unequal length; with ``ascend`` an MLA model and pages."""
    is_ascend = backend == "ascend"
    topology = cluster.Topology(backend, page_size=16 if is_ascend else 1, **sizes)
    return DisconnectCase(
        topology, SEVEN_LAYERS_MLA if is_ascend else FIVE_LAYERS, way, overlap, verify
    )


def disconnect_clients(servers: tuple, way: str, seed: int, pace: float = 1.0) -> int:
    """Let all clients come and go; returns how many were never told how their request ended.

    ``servers`` are prefill, decode and the router. Clients take ``pace`` times as long for all
    that they do: on a busy machine they would else do what servers there cannot keep up with.
    """
    return asyncio.run(_run_clients(servers, way, random.Random(seed), pace))


async def _run_clients(servers, way: str, source: random.Random, pace: float) -> int:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(
        timeout=RESPONSE_TIMEOUT_S, trust_env=False, limits=limits
    ) as client:
        clients = []
        for _ in range(CLIENTS):
            request = _request(servers, way, source)
            patience = source.random() ** 2 * MAX_CLIENT_PATIENCE * pace
            leave = source.randrange(2) if way == "either" else None
            clients.append(asyncio.create_task(_run_client(client, *request, patience, leave)))
            await asyncio.sleep(source.random() * MAX_CLIENT_GAP * pace)
        return sum(await asyncio.gather(*clients))


def _request(servers, way: str, source: random.Random) -> tuple[list[str], dict]:
    """Whom a client asks, and what."""
    prefill, decode, router = servers
    body = {
        "input_ids": [source.randrange(256) for _ in range(source.randint(*LENGTHS))],
        "sampling_params": {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True},
    }
    if way == "router":
        return [router.url], body
    meeting = {
        "bootstrap_host": cluster.HOST,
        "bootstrap_port": prefill.bootstrap_port,
        "bootstrap_room": source.randrange(2**32, 2**63),
    }
    return [prefill.url, decode.url], {**body, **meeting}


async def _run_client(client, urls, body, patience: float, leave: int | None) -> bool:
    """Ask, and hang up on all, or on ``leave`` of ``urls``. Whether another never ended it."""
    posts = [asyncio.create_task(client.post(f"{url}/generate", json=body)) for url in urls]
    await asyncio.wait(posts, timeout=patience)
    for post in posts if leave is None else [posts[leave]]:
        post.cancel()
    ends = await asyncio.gather(*posts, return_exceptions=True)
    return any(isinstance(end, httpx.TimeoutException) for end in ends)
