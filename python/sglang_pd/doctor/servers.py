"""Checks running servers: each alone and against this host's engine, and in pairs."""

from collections.abc import Iterator
from itertools import product
from pathlib import PurePath
from urllib.parse import urlsplit

import httpx
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from sglang_pd.doctor.findings import Finding, ok, warning, wrong
from sglang_pd.doctor.host import LaunchOptions
from sglang_pd.patchset.patches import Release, public_version

GROUP = "servers"
HTTP_TIMEOUT_S = 10.0
REQUEST_ERRORS = (httpx.HTTPError, httpx.InvalidURL, ValueError, msgspec.ValidationError)
# Parameters of a `/route` request: for the whole server in 0.5.9, for rank 0 in later releases.
SERVER_QUERY = {"engine_rank": -1, "target_dp_group": -1, "target_pp_rank": -1}
RECENT_FAILURES = "sglang_pd_failures_last_hour"
HARMLESS = ("aborted_by_client", "aborted_by_peer")  # of the latter the other server has the cause
RANK_QUERY = dict.fromkeys(
    ("prefill_dp_rank", "prefill_cp_rank", "target_tp_rank", "target_pp_rank"), 0
)


class Server(msgspec.Struct):
    """The part of a server's `/server_info` that the checks need."""

    disaggregation_mode: str = "null"
    disaggregation_transfer_backend: str = ""
    disaggregation_bootstrap_port: int = 8998
    version: str = ""
    model_path: str = ""
    page_size: int | None = None
    kv_cache_dtype: str = "auto"
    tp_size: int = 1
    pp_size: int = 1
    dp_size: int = 1
    attn_dp_size: int = 1
    attn_cp_size: int = 1
    enable_dp_attention: bool = False
    speculative_algorithm: str | None = None
    url: str = ""

    @property
    def attn_tp(self) -> int:
        """Number of ranks that share the KV heads.

        With --enable-dp-attention and no --attn-dp-size, `dp_size` counts the groups of DP
        attention; else `attn_dp_size` does, and `dp_size` counts replicas.
        """
        old = self.enable_dp_attention and self.attn_dp_size == 1
        groups = (self.dp_size if old else self.attn_dp_size) * self.attn_cp_size
        return max(1, self.tp_size // max(1, groups))

    @property
    def name(self) -> str:
        return f"{self.disaggregation_mode} {self.url}"


def check_servers(
    client: httpx.Client, urls: list[str], launch: LaunchOptions, release: Release
) -> Iterator[Finding]:
    """Checks each server, and each prefill server with each decode server."""
    servers = []
    for url in urls:
        try:
            servers.append(query_server(client, url.rstrip("/")))
        except REQUEST_ERRORS as error:
            advice = "check that it is an SGLang server, runs, and has its port open to this host"
            yield wrong(GROUP, url, f"no answer: {error!r}", advice)
    for server in servers:
        yield from check_server(server, launch, release)
        if server.disaggregation_mode == "prefill":
            yield from check_bootstrap(client, server)
        yield from check_failures(client, server)
    prefills = [one for one in servers if one.disaggregation_mode == "prefill"]
    decodes = [one for one in servers if one.disaggregation_mode == "decode"]
    for prefill, decode in product(prefills, decodes):
        yield from check_pair(prefill, decode)


def query_server(client: httpx.Client, url: str) -> Server:
    """Requests a server's info. Raises one of REQUEST_ERRORS, also for an invalid answer."""
    response = client.get(f"{url}/server_info")
    if response.status_code == 404:
        response = client.get(f"{url}/get_server_info")
    response.raise_for_status()
    server = msgspec.convert(response.json(), Server)
    server.url = url
    return server


def check_server(server: Server, launch: LaunchOptions, release: Release) -> Iterator[Finding]:
    sizes = f"TP {server.tp_size}, PP {server.pp_size}, attention TP {server.attn_tp}"
    text = f"SGLang {server.version}, {server.disaggregation_transfer_backend}, {sizes}"
    if server.disaggregation_mode not in ("prefill", "decode"):
        found = f"disaggregation mode {server.disaggregation_mode!r}"
        advice = "start it with --disaggregation-mode prefill or decode"
        yield wrong(GROUP, server.url, found, advice)
        return
    yield ok(GROUP, server.name, text)
    if public_version(server.version) != release.name:
        found = f"SGLang {server.version}, this host has {release.name}"
        advice = "run one release on both sides; docs/upgrade.md has the order of an upgrade"
        yield warning(GROUP, server.name, found, advice)
    if server.disaggregation_transfer_backend != launch.backend:
        found = f"backend {server.disaggregation_transfer_backend}, this host has {launch.backend}"
        yield wrong(GROUP, server.name, found, "both sides need the same backend (--backend)")


def check_bootstrap(client: httpx.Client, server: Server) -> Iterator[Finding]:
    """Checks that a prefill server's bootstrap server answers, and whether it is patched."""
    host = urlsplit(server.url).hostname or ""
    host = f"[{host}]" if ":" in host else host
    address = f"{host}:{server.disaggregation_bootstrap_port}"
    try:
        known = _query_route(client, address)
    except REQUEST_ERRORS as error:
        advice = "decode hosts must reach the bootstrap port: open it"
        yield wrong(GROUP, f"bootstrap {address}", f"no answer: {error!r}", advice)
        return
    if "takes_aborts" in known or "reads_layouts" in known:
        comparing = ", and compares KV" if known.get("verifies") else ""
        yield ok(GROUP, f"bootstrap {address}", f"answers; patched{comparing}")
    else:
        advice = "run `sglang-pd apply` there, and restart it"
        yield warning(GROUP, f"bootstrap {address}", "answers; a stock engine", advice)


def _query_route(client: httpx.Client, address: str) -> dict:
    """Returns the bootstrap server's info on the server, or on rank 0. Raises as `query_server`."""
    url = f"http://{address}/route"
    response = client.get(url, params=SERVER_QUERY)
    if response.status_code == 400:
        response = client.get(url, params=RANK_QUERY)
    response.raise_for_status()
    return msgspec.convert(response.json(), dict)


def check_failures(client: httpx.Client, server: Server) -> Iterator[Finding]:
    """Reports which requests have failed in the last hour, by the other server and the reason.

    A server without the patch set's metrics has no finding.
    """
    try:
        response = client.get(f"{server.url}/metrics")
        response.raise_for_status()
        series = list(text_string_to_metric_families(response.text))
    except REQUEST_ERRORS:
        return
    if not any(one.name == "sglang_pd_rooms" for one in series):
        return
    recent = [sample for one in series if one.name == RECENT_FAILURES for sample in one.samples]
    if not recent:
        yield ok(GROUP, server.name, "no request failed in the last hour")
    for sample in sorted(recent, key=lambda one: -one.value):
        peer, reason, count = sample.labels["peer"], sample.labels["reason"], sample.value
        found = f"failures in the last hour, with {peer}: {count:.0f} {reason}"
        advice = f"docs/operate.md, `{reason}`; the server's log has the texts"
        if reason in HARMLESS:
            yield ok(GROUP, server.name, found)
        else:
            yield warning(GROUP, server.name, found, advice)


def check_pair(prefill: Server, decode: Server) -> Iterator[Finding]:
    """Checks what the two servers must have in common."""
    name = f"{prefill.url} and {decode.url}"
    found = [*_unequal_options(prefill, decode), *_incompatible_sizes(prefill, decode)]
    for what, advice in found:
        yield wrong(GROUP, name, what, advice)
    for what, left, right in (
        ("version", prefill.version, decode.version),
        ("model", PurePath(prefill.model_path).name, PurePath(decode.model_path).name),
        ("draft model", prefill.speculative_algorithm, decode.speculative_algorithm),
    ):
        if left != right:
            advice = "check that this is intended: docs/upgrade.md and docs/recipes.md"
            yield warning(GROUP, name, f"{what}: {left} and {right}", advice)
    if not found:
        yield ok(GROUP, name, "compatible")


def _unequal_options(prefill: Server, decode: Server) -> Iterator[tuple[str, str]]:
    for field in ("disaggregation_transfer_backend", "page_size", "kv_cache_dtype"):
        flag = f"--{field.replace('_', '-')}"
        left, right = getattr(prefill, field), getattr(decode, field)
        if left != right:
            yield f"{flag}: {left} and {right}", "start both servers with the same value"


def _incompatible_sizes(prefill: Server, decode: Server) -> Iterator[tuple[str, str]]:
    from sglang_pd.plan.core import kv_layout  # a slow import (1 s), for pairs only

    if kv_layout.tp_size_conflict(prefill.attn_tp, decode.attn_tp):
        what = f"attention TP: {prefill.attn_tp} and {decode.attn_tp}"
        yield what, "the larger must be a multiple of the smaller"
    if kv_layout.pp_size_conflict(prefill.pp_size, decode.pp_size):
        what = f"PP: {prefill.pp_size} and {decode.pp_size}"
        yield what, f"start decode with --pp-size 1 or {prefill.pp_size}"
