"""Tests of the engine's real classes in one process; `stock` probes those of the stock engine.

`v0_5_9`, `v0_5_18` and `v0_5_23` test what the patch set has for one release only, and
`from_0_5_18` what it has for all releases after 0.5.9. The stock engine of such a release can run
these tests, too, and shows which of them it fails.
"""

import contextlib
import importlib.util
import json
import socket
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest
from bootstrap_server import BootstrapServer
from engine_release import SINCE_0_5_18

from pd_harness import cluster, forks
from pd_harness.cpu_host import ENVIRONMENT
from pd_harness.polling import wait_until
from pd_harness.releases import release

SUPPORT = Path(__file__).resolve().parents[1] / "support"
STOCK_SECONDS = 120  # for all probes of one call
ARRIVAL_MS = 10_000

pytest.importorskip("sglang", reason="no engine here")
PATCHED = importlib.util.find_spec("sglang.srt.disaggregation.kv_layout") is not None
if not (SINCE_0_5_18 or PATCHED):
    pytest.skip("no patched engine here", allow_module_level=True)

FOLDERS = {
    "0.5.9": {"v0_5_9"},
    "0.5.18": {"from_0_5_18", "v0_5_18"},
    "0.5.23": {"from_0_5_18", "v0_5_23"},
}
collect_ignore = sorted(set().union(*FOLDERS.values()) - FOLDERS[release()])
if not PATCHED:
    collect_ignore += ["test_noted_transfers.py", "test_npu_dry_run.py", "test_verify.py"]
    collect_ignore += ["v0_5_18"]
    # What the stock engine lacks of what later releases share.
    collect_ignore += [
        "v0_5_23/test_bootstrap_messages.py",
        "v0_5_23/test_room_state_machine.py",
        *(
            f"from_0_5_18/test_{subject}.py"
            for subject in (
                "add_transfer_request",
                "compatibility",
                "draft_kv_heads",
                "early_prefix",
                "failure_records",
                "interleaving_receiver",
                "local_layout",
                "memory_registration_at_runtime",
                "message_checks",
                "packed_transfers",
                "peer_reconnect",
                "peers",
                "prefill_servers",
                "room_failures",
                "room_status",
                "state_page_counts",
                "transfer_worker",
                "verify_elided_index_keys",
            )
        ),
    ]


@pytest.fixture(scope="session")
def stock(tmp_path_factory):
    """A function that runs probes [name, arguments...] in the stock engine; returns results."""
    try:
        python = cluster.interpreter("stock")
    except FileNotFoundError as error:
        pytest.skip(f"no stock engine to compare with: {error}")

    def ask(*calls: list) -> list:
        log = tmp_path_factory.mktemp("stock") / "log"
        words = str(SUPPORT / "engine_calls.py"), [json.dumps(calls)]
        with log.open("wb") as file:
            asked = forks.fork(str(python), *words, ENVIRONMENT, file)
        wait_until(lambda: asked.poll() is not None, STOCK_SECONDS)
        asked.stop()
        said = log.read_text()
        assert asked.returncode == 0, said[-2000:]
        return json.loads(said.splitlines()[-1])

    return ask


@pytest.fixture
def no_threads(monkeypatch):
    """A function that returns a context in which no thread can start."""

    def fail(thread) -> None:
        raise RuntimeError("can't start new thread")

    @contextlib.contextmanager
    def without_threads():
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", fail)
            yield

    return without_threads


@pytest.fixture
def unresponsive_port():
    """A port that neither accepts nor refuses connections: as if packets were lost."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener, ExitStack() as waiting:
        _, port = listener.getsockname()
        with pytest.raises(TimeoutError):
            for _ in range(10):
                waiting.enter_context(socket.create_connection(("127.0.0.1", port), 0.2))
        yield port


@pytest.fixture
def listen():
    """A function that binds a rank's socket to a port, any if it is 0; returns socket and port."""
    import zmq

    bound = []

    def bind(port: int = 0) -> tuple[zmq.Socket, int]:
        sock = zmq.Context.instance().socket(zmq.PULL)
        bound.append(sock)
        sock.setsockopt(zmq.RCVTIMEO, ARRIVAL_MS)
        if port:
            sock.bind(f"tcp://127.0.0.1:{port}")
        else:
            port = sock.bind_to_random_port("tcp://127.0.0.1")
        return sock, port

    yield bind
    for sock in bound:
        sock.close(linger=0)


# KV managers of releases after 0.5.9, without a transfer library


@pytest.fixture(params=["mooncake", "nixl"])
def backend(request) -> str:
    return request.param


@pytest.fixture
def published():
    """Publishes the engine configuration that managers read."""
    import fake_managers  # not with 0.5.9

    with fake_managers.published_config():
        yield


@pytest.fixture
def prefill(backend, published):
    import fake_managers

    return fake_managers.prefill_rank(backend)


@pytest.fixture
def decode(backend, published):
    import fake_managers

    return fake_managers.decode_rank(backend)


@pytest.fixture
def bootstrap():
    """A prefill server's bootstrap server, which decode queries."""
    server = BootstrapServer()
    yield server
    server.stop()
