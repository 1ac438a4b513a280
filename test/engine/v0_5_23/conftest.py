"""Ranks and a bootstrap server for tests; leaves out of runs on the stock engine what it lacks."""

import http.server
import importlib.util
import json
import threading
from urllib.parse import parse_qs, urlsplit

import pytest

from pd_harness.ports import HOST, free_ports

PATCHED = importlib.util.find_spec("sglang.srt.disaggregation.kv_layout") is not None
if not PATCHED:
    collect_ignore = [
        "test_add_transfer_request.py",
        "test_compatibility.py",
        "test_draft_kv_heads.py",
        "test_early_prefix.py",
        "test_failure_records.py",
        "test_interleaving_receiver.py",
        "test_local_layout.py",
        "test_memory_registration_at_runtime.py",
        "test_message_checks.py",
        "test_packed_transfers.py",
        "test_peer_reconnect.py",
        "test_peers.py",
        "test_prefill_servers.py",
        "test_room_failures.py",
        "test_room_state_machine.py",
        "test_room_status.py",
        "test_state_page_counts.py",
        "test_transfer_worker.py",
        "test_verify_elided_index_keys.py",
    ]


@pytest.fixture(params=["mooncake", "nixl"])
def backend(request) -> str:
    return request.param


@pytest.fixture
def published():
    """Publishes the engine configuration that managers read."""
    import fake_managers

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


class BootstrapServer(http.server.ThreadingHTTPServer):
    """Answers queries for the sizes of a prefill server, and for its ranks.

    Attributes:
        sizes: The answer to a query for sizes.
        rank_port: The first DP rank's port; each other rank has the next one.
        rank: The answer to a query for a rank; `...` for the rank's address and its numbers.
        queried_ranks: The numbers in each query: DP, CP, TP and PP rank, or -1 four times.
        open: Lets answers through.
    """

    def __init__(self):
        (port,) = free_ports(1)
        super().__init__((HOST, port), BootstrapHandler)
        self.address = f"{HOST}:{port}"
        self.sizes = {"attn_tp_size": 1, "attn_cp_size": 1, "dp_size": 1, "pp_size": 1}
        self.sizes |= {"page_size": 64, "kv_cache_dtype": "bfloat16", "follow_bootstrap_room": True}
        self.rank_port, self.rank, self.queried_ranks = 1, ..., []
        self.open = threading.Event()
        self.open.set()
        self.thread = threading.Thread(target=self.serve_forever, args=[0.01])
        self.thread.start()

    def stop(self) -> None:
        self.shutdown()
        self.thread.join()
        self.server_close()

    def answer(self, numbers: tuple[int, ...]):
        self.queried_ranks.append(numbers)
        assert self.open.wait(10)
        if numbers == (-1,) * 4:
            return self.sizes
        if self.rank is not ...:
            return self.rank
        return {"rank_ip": HOST, "rank_port": self.rank_port + numbers[0], "rank": numbers}

    def queried_dp_ranks(self) -> list[int]:
        return [dp for dp, *_ in self.queried_ranks]


class BootstrapHandler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        query = parse_qs(urlsplit(self.path).query)
        names = ("prefill_dp_rank", "prefill_cp_rank", "target_tp_rank", "target_pp_rank")
        body = json.dumps(self.server.answer(tuple(int(query[name][0]) for name in names))).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def bootstrap():
    server = BootstrapServer()
    yield server
    server.stop()
