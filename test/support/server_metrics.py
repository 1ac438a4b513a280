"""What a server's `/metrics` says of KV transfers."""

from collections import defaultdict
from collections.abc import Iterator

import httpx
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from pd_harness.cluster import LOCAL_HTTP, Server

SECONDS = 10  # for `/metrics`


def sums(server: Server, name: str, *by: str, **only: str) -> dict[tuple[str, ...], float]:
    """Returns a series' sums by the values of these labels.

    Args:
        name: The sample's, without `sglang_pd_`.
        only: Labels' values that samples must have.
    """
    found: dict[tuple[str, ...], float] = defaultdict(float)
    for sample in _samples(server):
        if sample.name == f"sglang_pd_{name}" and only.items() <= sample.labels.items():
            found[tuple(sample.labels[label] for label in by)] += sample.value
    return dict(found)


def series(server: Server) -> set[tuple[str, tuple[str, ...]]]:
    """Returns all series' names and labels, also the engine's, without their labels' values."""
    return {(sample.name, tuple(sorted(sample.labels))) for sample in _samples(server)}


def _samples(server: Server) -> Iterator[Sample]:
    answer = httpx.get(f"{server.url}/metrics", timeout=SECONDS, **LOCAL_HTTP)
    for family in text_string_to_metric_families(answer.raise_for_status().text):
        yield from family.samples


def total(server: Server, name: str, **only: str) -> float:
    """Returns a series' sum, 0 without samples; see `sums`."""
    return sums(server, name, **only).get((), 0.0)


def failures(server: Server) -> dict[tuple[str, str], float]:
    """Returns how many requests failed, by the other server's port and the reason.

    All servers are on this machine, whose address the engine chooses.
    """
    found: dict[tuple[str, str], float] = defaultdict(float)
    for (peer, reason), count in sums(server, "failures_total", "peer", "reason").items():
        found[peer.rpartition(":")[2], reason] += count
    return {key: count for key, count in found.items() if count}


def open_rooms(server: Server) -> dict[str, float]:
    """Returns how many requests are in each state, without states that have none."""
    return {state: count for (state,), count in sums(server, "rooms", "state").items() if count}


def name_for_prefill(decode: Server) -> str:
    """Returns the port of the label that prefill has for a decode server."""
    return str(decode.port)


def name_for_decode(prefill: Server) -> str:
    """Returns the port of the label that decode has for a prefill server."""
    return str(prefill.bootstrap_port)
