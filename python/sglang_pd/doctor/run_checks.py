"""Runs all checks, in the order in which a person fixes problems."""

from collections.abc import Iterator, Mapping, Sequence

import httpx

from sglang_pd.doctor import engine as engines
from sglang_pd.doctor import environment, memfabric, packages, ports, servers, system
from sglang_pd.doctor.findings import Finding
from sglang_pd.doctor.host import Host, LaunchOptions
from sglang_pd.install import operations
from sglang_pd.install.engine import Engine
from sglang_pd.patchset.patches import Release


def run_checks(
    engine: Engine,
    release: Release,
    host: Host,
    launch: LaunchOptions,
    urls: Sequence[str] = (),
    headers: Mapping[str, str] | None = None,
) -> Iterator[Finding]:
    """Checks an engine on a host, and the running servers at `urls`, which hold the host's ports.

    headers: sent to these servers.
    """
    status = operations.status(engine, release)
    patched = status.state == "applied"
    yield from engines.check_engine(engine, release)
    yield from engines.check_patches(status)
    yield from packages.check_versions(host, launch, release)
    yield from memfabric.check_memfabric(host, launch, release.name, patched)
    yield from packages.check_library(host, launch)
    if not launch.in_image:
        yield from system.check_locked_memory(host, launch)
        yield from system.check_open_files(host)
        yield from system.check_shared_memory(host)
        yield from system.check_rdma(host, launch)
        yield from system.check_npus(host, launch)
        if not urls:
            yield from ports.check_ports(launch)
            yield from ports.check_memfabric_ports(host, launch)
        yield from environment.check_environment(host, launch, engine.root, patched)
    if urls:
        # Requests to a fleet's servers bypass proxies.
        with httpx.Client(
            timeout=servers.HTTP_TIMEOUT_S, trust_env=False, headers=headers
        ) as client:
            yield from servers.check_servers(client, list(urls), launch, release)
