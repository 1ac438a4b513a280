"""Clients that disconnect at random moments, and the fleets that they use."""

import asyncio
import dataclasses
import random

import httpx
from server_pairs import bootstrap_fields
from serving_scenarios import FIVE_LAYERS, NEW_TOKENS, SEVEN_LAYERS_MLA

from pd_harness import cluster
from pd_harness.cpu_host.models import TinyModel

CLIENTS = 200
MAX_CLIENT_GAP = 0.1  # seconds between two clients
MAX_CLIENT_PATIENCE = 1.5  # seconds until a client disconnects
LENGTHS = (3, 1500)  # tokens of a prompt
CHUNK = 128  # tokens, so that most prompts are prefilled and sent in many pieces
RESPONSE_TIMEOUT_S = 60  # for the server to which a client stays connected


@dataclasses.dataclass(frozen=True)
class DisconnectCase:
    """A fleet, and the ``way`` in which its clients disconnect.

    - "both": clients ask both servers, and close both connections at once
    - "either": clients ask both servers, and close one connection; the other server must end the
      request, too
    - "router": clients ask the router, and close that connection
    """

    topology: cluster.Topology
    model: TinyModel
    way: str = "both"
    overlap: bool = False
    verify: bool = False  # whether the servers compare all KV
    gqa: bool = False  # on ``ascend``, whose other fleets have MLA

    @property
    def pace(self) -> float:
        """Factor by which clients of this fleet are slower.

        With DP attention, decode's ranks run in lockstep, even those without requests. On two
        cores, prefill then gets half of its usual processor time.
        """
        return 2.0 if self.topology.decode_dp > 1 else 1.0

    @property
    def name(self) -> str:
        sizes = self.topology
        prefill = f"tp{sizes.prefill_tp}_pp{sizes.prefill_pp}"
        prefill += f"_dp{sizes.prefill_dp}" if sizes.prefill_dp > 1 else ""
        decode = f"tp{sizes.decode_tp}"
        decode += f"_pp{sizes.decode_pp}" if sizes.decode_pp > 1 else ""
        decode += f"_dp{sizes.decode_dp}" if sizes.decode_dp > 1 else ""
        more = [name for name in ("gqa", "overlap", "verify") if getattr(self, name)]
        return "-".join([sizes.backend, f"{prefill}_to_{decode}", self.way, *more])


def fleet(
    backend: str,
    way: str = "both",
    overlap: bool = False,
    verify: bool = False,
    gqa: bool = False,
    **sizes: int,
) -> DisconnectCase:
    """Returns a case whose stages have unequal lengths; ``ascend`` has pages, and MLA or GQA."""
    is_ascend = backend == "ascend"
    topology = cluster.Topology(backend, page_size=16 if is_ascend else 1, **sizes)
    model = SEVEN_LAYERS_MLA if is_ascend and not gqa else FIVE_LAYERS
    return DisconnectCase(topology, model, way, overlap, verify, gqa)


def disconnect_clients(servers: tuple, way: str, seed: int, pace: float = 1.0) -> int:
    """Runs all clients; returns how many requests a server never ended.

    Args:
        servers: Prefill, decode and the router.
        way: See `DisconnectCase`.
        pace: Factor by which clients are slower. On a busy machine, servers could not keep up with
            clients at full pace.
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
    """Returns the URLs that a client asks, and its request's body."""
    prefill, decode, router = servers
    prompt = [source.randrange(256) for _ in range(source.randint(*LENGTHS))]
    body = cluster.greedy_body(prompt, NEW_TOKENS)
    if way == "router":
        return [router.url], body
    body |= bootstrap_fields(prefill, source.randrange(2**32, 2**63))
    return [prefill.url, decode.url], body


async def _run_client(client, urls, body, patience: float, leave: int | None) -> bool:
    """Asks all ``urls``, and after ``patience`` s disconnects from all, or from number ``leave``.

    Returns whether a server to which the client stayed connected never ended the request.
    """
    posts = [asyncio.create_task(client.post(f"{url}/generate", json=body)) for url in urls]
    await asyncio.wait(posts, timeout=patience)
    for post in posts if leave is None else [posts[leave]]:
        post.cancel()
    ends = await asyncio.gather(*posts, return_exceptions=True)
    return any(isinstance(end, httpx.TimeoutException) for end in ends)
