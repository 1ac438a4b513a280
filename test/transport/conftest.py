"""Real transfer engines between real processes: the engine's pools and managers, no model."""

import functools
import os

import fleet as fleets
import pytest

from pd_harness.cluster import skip_reason
from pd_harness.cpu_host.memfabric import memfabric_for
from pd_harness.device import device


@pytest.fixture(scope="session")
def fork_server():
    """A function that returns a process which forks ranks of the `stock` or `patched` engine.

    The ranks use the base environment's NIXL unless SGLANG_PD_NIXL or the caller names a release.
    """

    @functools.cache
    def of(engine: str, nixl: str = os.environ.get("SGLANG_PD_NIXL", "")) -> fleets.ForkServer:
        return fleets.ForkServer(engine, nixl=nixl)

    return of


@pytest.fixture()
def serve(fork_server):
    """A function that runs a fleet with the named engines on prefill and decode.

    The function skips the test if this device cannot run the fleet.
    """

    def run(
        fleet: fleets.Fleet, prefill: str = "patched", decode: str = "patched", memfabric: str = ""
    ):
        if reason := skip_reason(fleet.backend, fleet.size, (prefill, decode)):
            pytest.skip(reason)
        if fleet.backend == "ascend" and device() == "cpu":
            memfabric = memfabric or memfabric_for(decode)
            fleets.install_library("memfabric", memfabric)
        return fleets.running(fleet, fork_server(prefill), fork_server(decode), memfabric)

    return run
