"""A pytest plug-in: as on a machine with so many NPUs, up to where ranks or servers would start.

    PRETENDED_NPUS=4 python -m pytest -p pretended_npus test/transport test/serving test/npu

Tests in one process run whole, on `pretended_device`. Others end, as skipped, when all that starts
ranks or servers has been asked for, and fits the NPUs; nothing is started. What was asked for is
counted in the file that PRETENDED_NPUS_COUNTS names.
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
# A kind of test is given up once the machinery that it needs is not here.
counts: collections.Counter[str] = collections.Counter()
failed: list[str] = []

# Before any test has imported them by name.
os.environ[device.DEVICE_VARIABLE] = "npu"
device.npus = cluster.npus = lambda: COUNT
device.wait_for_memfabric_peers = lambda *_: None
# What is kept there, answers and models, is as made up as the NPUs.
cluster.RELEASE_ENV = cluster.RELEASE_ENV / "pretended"


def pytest_configure(config):
    """Give torch the device, when the engine has found that there is none.

    It would import all of its code for NPUs.
    """
    if importlib.util.find_spec("sglang"):
        engine_calls = importlib.import_module("engine_calls")
        pools = importlib.import_module(engine_calls.NPUMHATokenToKVPool.__module__)
        sys.modules["torch_npu"] = pools.torch_npu
        pools.torch = torch  # and not the CPU host's, whose `npu` waits for nothing
        pretended_device.install(COUNT)
        load = ctypes.CDLL
        ctypes.CDLL = lambda name, *more, **also: (
            pretended_device.AclRuntime() if name == "libascendcl.so" else load(name, *more, **also)
        )


def pytest_collection_finish(session):
    """Replace what starts processes, as the tests that were collected have it."""
    cluster.running = _pretended_servers(cluster.running)
    cluster.Server.start = _skip_start
    if fleet := importlib.util.find_spec("fleet") and importlib.import_module("fleet"):
        fleet.ForkServer, fleet.Rank = PretendedForkServer, PretendedRank
        fleet.is_listening = lambda port: True
        fleet.running = _pretended_ranks(fleet.running)
    for module in {item.module for item in session.items}:
        if hasattr(module, "INT32_ELEMENTS"):  # elements of a pool
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
    """As `cluster.running`. From one server alone tests have the answers to compare with."""

    @functools.wraps(running)
    @contextlib.contextmanager
    def pretended(servers, *args, **kwargs):
        engines = [server for server in servers if "sglang.launch_server" in server.command]
        held = [npu for server in engines for npu in _npus_of(server)]
        assert len(held) == len(set(held)) and max(held) < COUNT, (held, COUNT)
        for server in engines:
            _parse(server.command)
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


def _parse(command) -> None:
    """Each flag is one of this engine's, with a value that it takes."""
    _parser().parse_args(command[command.index("sglang.launch_server") + 1 :])


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
    """As `fleet.running`, which goes on when all ranks have been started."""

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
    """As `fleet.ForkServer`; it finds the engine, and starts nothing."""

    def __init__(self, engine: str, fresh: bool | None = None, nixl: str = ""):
        cluster.interpreter(engine)
        self.log = Path(os.devnull)

    def spawn(self):
        return PretendedRank()


class PretendedRank:
    pid = 0

    def start(self, config: dict) -> None:
        assert json.loads(json.dumps(config))["device"] == "npu"
        self.config = config

    start_bootstrap = start

    def close(self) -> None:
        """Nothing was opened."""
