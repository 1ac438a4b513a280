"""Another prefill server takes over the bootstrap address, while the previous one lives on.

The address forwards to one server after the other, as a Kubernetes service does; existing
connections stay with their server.
"""

import contextlib
import socket
import socketserver
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from scheduler_dumps import dump_schedulers, longest_pause_ms
from server_pairs import assert_freed
from serving_scenarios import NEW_TOKENS, SEVEN_LAYERS, prompts
from three_servers import MARKS, ask, record_attack, tokens, two_prefill_servers

from pd_harness.polling import wait_until
from pd_harness.ports import HOST

pytestmark = MARKS

# Seconds after which either side aborts a request that the other side does not have.
ENGINE_TIMEOUTS = {
    "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": "30",
    "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": "30",
}
SERVED = 15  # seconds; decode checks the address every 5 s and then queries it; 8 were measured
NEVER = 25  # seconds; stock notices only when a request to the previous server has failed


class TcpForwarder(socketserver.ThreadingTCPServer):
    """Listens on its own port, and forwards new connections to `target_port`."""

    daemon_threads = True

    def __init__(self, port: int):
        super().__init__((HOST, 0), Connection)
        self.target_port = port

    @property
    def port(self) -> int:
        return self.server_address[1]


class Connection(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        with socket.create_connection((HOST, self.server.target_port)) as far:
            back = threading.Thread(target=forward, args=(far, self.request))
            back.start()
            forward(self.request, far)
            back.join()


def forward(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while part := source.recv(1 << 16):
            sink.sendall(part)
    for one in (source, sink):
        with contextlib.suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def forwarding(port: int) -> Iterator[TcpForwarder]:
    """Runs a forwarder whose first target is this local port."""
    with TcpForwarder(port) as forwarder:
        threading.Thread(target=forwarder.serve_forever, daemon=True).start()
        try:
            yield forwarder
        finally:
            forwarder.shutdown()


@pytest.mark.parametrize("engine", ["stock", pytest.param("patched", marks=pytest.mark.alone)])
@pytest.mark.parametrize("backend", ["nixl", "mooncake"])
def test_requests_follow_a_replaced_prefill_server(backend, engine, reference):
    prompt = prompts()[2]
    expected = list(reference(SEVEN_LAYERS, NEW_TOKENS)[2].ids)
    with two_prefill_servers("replaced", backend, engine, **ENGINE_TIMEOUTS) as servers:
        first, second, decode = servers
        with forwarding(first.bootstrap_port) as forwarder, ThreadPoolExecutor(NEVER) as pool:

            def answer_of(prefill) -> list[int]:
                return tokens(ask(prefill, decode, prompt, bootstrap_port=forwarder.port)[0])

            assert answer_of(first) == expected
            dump_schedulers(decode)
            forwarder.target_port = second.bootstrap_port
            begun, asked = time.monotonic(), []

            def is_served() -> bool:
                """Sends one more request; those that went to the previous server never end."""
                asked.append(pool.submit(answer_of, second))
                return any(one.done() and one.result() == expected for one in asked)

            served = wait_until(is_served, SERVED if engine == "patched" else NEVER, 1)
            seconds = round(time.monotonic() - begun, 1)
            pause_ms = longest_pause_ms(dump_schedulers(decode))
            if engine == "stock":  # it answers no request to the previous server until a time-out
                for server in servers:
                    server.stop()
        if engine == "patched":
            assert_freed(*servers)
    case = "prefill server, swapped behind its address"
    held = {} if engine == "patched" else None
    record_attack(case, backend, engine, pause_ms, [seconds], held, is_served=served)
    assert served == (engine == "patched"), seconds
