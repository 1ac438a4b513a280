"""Decode's event loop keeps running when prefill dies with many open rooms."""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor, wait

import httpx
import pytest
from scheduler_dumps import dump_environment, dump_schedulers, longest_pause_ms, raise_priority
from server_pairs import LOGS, bootstrap_fields, make_pair
from serving_checks import record, seconds_until
from serving_scenarios import FOUR_HEADS, NEW_TOKENS

from pd_harness import cluster
from pd_harness.cpu_host.scheduler_dump import HEARTBEATS_APART_VARIABLE
from pd_harness.device import device

pytestmark = [
    pytest.mark.serving,
    pytest.mark.timeout(600),
    pytest.mark.nightly,
    pytest.mark.skipif(device() != "cpu", reason="the probe is the CPU host's"),
]

ROOMS = 100
LONGEST_MS = 50
# Pauses by other work on the machine vary between tries (up to 119 ms were measured before any
# failure); pauses by the engine occur in each try.
TRIES = 3
OPEN_SECONDS = 60  # for all rooms to be open on both ranks
BEFORE = 5  # seconds with open rooms and nothing else, for comparison
# Rank 0 checks prefill's health every 2 s, rank 1 every 6 s. Prefill is lost at the second failed
# check: for rank 0 after 2 to 4 s, and for rank 1 after 6 to 12 s.
HEARTBEATS = {
    "SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL": "2",
    "SGLANG_DISAGGREGATION_HEARTBEAT_MAX_FAILURE": "2",
    HEARTBEATS_APART_VARIABLE: "4",
}
LOST_SECONDS = 30  # within which stock notices, too, although it then fails no room over NIXL
PATIENCE = 150  # seconds; if each room blocks for a second, the rooms take 100 s


@pytest.mark.parametrize(
    "engine",
    [pytest.param("patched", marks=pytest.mark.alone), "stock"],  # its milliseconds count
)
@pytest.mark.parametrize("backend", ["nixl", "mooncake"])
def test_event_loop_keeps_polling_when_prefill_dies(backend, engine):
    rows = []
    for _ in range(TRIES if engine == "patched" else 1):
        row, statuses = measure_prefill_death(backend, engine)
        record("event_loop", **row)
        rows.append(row)
        if engine == "patched":
            assert statuses == [500] * ROOMS, row
        if row["pause_ms"] <= LONGEST_MS:
            break
    assert engine == "stock" or rows[-1]["pause_ms"] <= LONGEST_MS, rows


def measure_prefill_death(backend: str, engine: str) -> tuple[dict, list[int | None]]:
    """Returns the measurements, and each request's HTTP status, None if decode exited first."""
    label = f"event-loop-{backend}-{engine}"
    # Decode keeps 512 tokens free for each request that it has admitted.
    topology = cluster.Topology(backend, decode_tp=2, page_size=16, decode_tokens=ROOMS * 600)
    prefill, decode, _ = make_pair(
        label,
        topology,
        FOUR_HEADS,
        engine,
        environment={**dump_environment(LOGS / label / "probe"), **HEARTBEATS},
        max_requests=ROOMS + 28,
        idle_sleep=False,  # an intended sleep would count as a pause
    )
    row = {"backend": backend, "engine": engine, "rooms": ROOMS}
    # The contexts end in reverse, so decode stops before the pool waits for its clients.
    with ThreadPoolExecutor() as pool, cluster.running([prefill, decode]):
        asking = pool.submit(asyncio.run, ask_decode_alone(prefill, decode))
        seconds_until(
            lambda: open_rooms(dump_schedulers(decode)) == [ROOMS] * 2, OPEN_SECONDS, pause=1
        )
        raise_priority(decode)
        dump_schedulers(decode)
        time.sleep(BEFORE)
        row["before_ms"] = longest_pause_ms(dump_schedulers(decode))
        prefill.stop()
        row |= pauses_after_kill(decode, PATIENCE if engine == "patched" else LOST_SECONDS)
        if engine == "patched":  # stock does not answer over NIXL
            wait([asking], PATIENCE)
        decode.check_running()
    return row, asking.result()


def pauses_after_kill(decode: cluster.Server, patience: float) -> dict:
    """Returns the seconds until no rank has a room, or "never", and the longest pause in ms."""
    start, longest = time.monotonic(), 0.0
    while time.monotonic() - start < patience:
        ranks = dump_schedulers(decode)
        longest = max(longest, longest_pause_ms(ranks))
        if not any(open_rooms(ranks)):
            return {"seconds": round(time.monotonic() - start, 1), "pause_ms": longest}
        time.sleep(0.2)
    return {"seconds": "never", "pause_ms": longest}


def open_rooms(ranks: list[dict]) -> list[int]:
    """Returns, for each decode rank, the number of requests that wait for KV."""
    return [seen["queues"]["disagg_decode_transfer_queue.queue"] for seen in ranks]


async def ask_decode_alone(prefill, decode) -> list[int | None]:
    """Sends requests to decode only; returns each HTTP status, None if decode exited first."""
    async with httpx.AsyncClient(
        timeout=None, trust_env=False, limits=httpx.Limits(max_connections=None)
    ) as client:

        async def one(number: int) -> int | None:
            body = cluster.greedy_body([number % 256] * 16, NEW_TOKENS)
            body |= bootstrap_fields(prefill, 2**40 + number)
            try:
                return (await client.post(f"{decode.url}/generate", json=body)).status_code
            except httpx.HTTPError:
                return None

        return await asyncio.gather(*map(one, range(ROOMS)))
