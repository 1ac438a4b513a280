"""A pytest plug-in that runs NPU tests without NPUs, up to the start of ranks or servers.

    PRETENDED_NPUS=4 python -m pytest -p pretended_npus test/transport test/serving test/npu

Tests in one process run completely, on `pretended_device`. Tests that start ranks or servers are
skipped once these have been requested and fit the NPUs; none is started. The plug-in writes counts
of requested fleets and servers to the file that PRETENDED_NPUS_COUNTS names.
"""

import collections
import contextlib
import ctypes
import functools
import importlib
import importlib.util
import json
import os
import sys
from pathlib import Path

import pretended_device
import pytest
import torch

from pd_harness import cluster, device

COUNT = int(os.environ["PRETENDED_NPUS"])
COUNTS = "PRETENDED_NPUS_COUNTS"
SKIP_REASON = "NPUs are needed from here on"
counts: collections.Counter[str] = collections.Counter()
failed: list[str] = []

# Patched before any test imports these names.
os.environ[device.DEVICE_VARIABLE] = "npu"
device.npus = cluster.npus = lambda: COUNT
device.wait_for_memfabric_peers = lambda *_: None
# A separate folder, because the answers and models stored there are made up.
cluster.RELEASE_ENV = cluster.RELEASE_ENV / "pretended"


def pytest_configure(config):
    """Installs the device in torch after the engine has detected that there is no NPU.

    With an NPU, the engine would import all of its NPU code.
    """
    if importlib.util.find_spec("sglang"):
        engine_calls = importlib.import_module("engine_calls")
        pools = importlib.import_module(engine_calls.NPUMHATokenToKVPool.__module__)
        sys.modules["torch_npu"] = pools.torch_npu
        pools.torch = torch  # instead of the CPU host's, whose `npu` never synchronizes
        pretended_device.install(COUNT)
        load = ctypes.CDLL
        ctypes.CDLL = lambda name, *more, **also: (
            pretended_device.AclRuntime() if name == "libascendcl.so" else load(name, *more, **also)
        )


def pytest_collection_finish(session):
    """Replaces what starts processes, and shrinks the large pool, in the collected tests."""
    cluster.running = _pretended_servers(cluster.running)
    cluster.Server.start = _skip_start
    if fleet := importlib.util.find_spec("fleet") and importlib.import_module("fleet"):
        fleet.ForkServer, fleet.Rank = PretendedForkServer, PretendedRank
        fleet.is_listening = lambda port: True
        fleet.running = _pretended_ranks(fleet.running)
    for module in {item.module for item in session.items}:
        if hasattr(module, "INT32_ELEMENTS"):  # the size of the large pools
            module.INT32_ELEMENTS = 1 << 20


def pytest_runtest_logreport(report):
    if report.failed:
        failed.append(report.nodeid)
    elif report.when == "call" and report.passed:
        counts["passed"] += 1


def pytest_sessionfinish(session):
    if name := os.environ.get(COUNTS):
        Path(name).write_text(json.dumps({**counts, "failed": failed}))


def _skip_start(*args, **kwargs):
    pytest.skip(SKIP_REASON)


def _pretended_servers(running):
    """Replaces `cluster.running`; a single server, which gives reference answers, pretends them."""

    @functools.wraps(running)
    @contextlib.contextmanager
    def pretended(servers, *args, **kwargs):
        engines = [server for server in servers if "sglang.launch_server" in server.command]
        held = [npu for server in engines for npu in _npus_of(server)]
        assert len(held) == len(set(held)) and max(held) < COUNT, (held, COUNT)
        for server in engines:  # this engine accepts each flag and its value
            _parser().parse_args(server.command[server.command.index("sglang.launch_server") + 1 :])
        counts["servers"] += len(engines)
        if [server.name for server in servers] != ["single"]:
            _skip_start()
        cluster.ask = _pretended_answers
        yield

    return pretended


def _npus_of(server) -> range:
    given = dict(zip(server.command, server.command[1:]))
    first = int(given["--base-gpu-id"])
    return range(first, first + int(given["--tp-size"]) * int(given["--pp-size"]))


@functools.cache
def _parser():
    import argparse

    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser(exit_on_error=False)
    ServerArgs.add_cli_args(parser)
    return parser


def _pretended_answers(url, prompts, new_tokens, *args, **kwargs):
    return [cluster.Answer((0,) * new_tokens, (0.0,) * new_tokens) for _ in prompts]


def _pretended_ranks(running):
    """Replaces `fleet.running`; skips the test when all ranks would have been started."""

    @contextlib.contextmanager
    def pretended(fleet, *fork_servers):
        with running(fleet, *fork_servers) as servers:
            held = [rank.config["gpu_id"] for rank in (*servers.prefill, *servers.decode)]
            assert sorted(held) == list(range(fleet.size)) and fleet.size <= COUNT, held
            counts["fleets"] += 1
            _skip_start()
        yield

    return pretended


class PretendedForkServer:
    """Replaces `fleet.ForkServer`; finds the engine, but starts no process."""

    def __init__(self, engine: str, fresh: bool | None = None, nixl: str = ""):
        cluster.interpreter(engine)
        self.log = Path(os.devnull)

    def spawn(self):
        return PretendedRank()


class PretendedRank:
    pid = 0

    def start(self, config: dict, do: str = "start") -> None:
        assert json.loads(json.dumps(config))["device"] == "npu"
        self.config = config

    def close(self) -> None:
        """Does nothing, as no connection was opened."""
