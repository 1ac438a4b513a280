"""An address that forwards to one server after the other, as a Kubernetes service does.

Existing connections stay with their server.
"""

import contextlib
import socket
import socketserver
import threading
from collections.abc import Iterator

from pd_harness.ports import HOST


class TcpForwarder(socketserver.ThreadingTCPServer):
    """Listens on its own port, and forwards new connections to `target_port`."""

    daemon_threads = True

    def __init__(self, port: int):
        super().__init__((HOST, 0), _Connection)
        self.target_port = port

    @property
    def port(self) -> int:
        return self.server_address[1]


@contextlib.contextmanager
def forwarding(port: int) -> Iterator[TcpForwarder]:
    """Runs a forwarder whose first target is this local port."""
    with TcpForwarder(port) as forwarder:
        threading.Thread(target=forwarder.serve_forever, daemon=True).start()
        try:
            yield forwarder
        finally:
            forwarder.shutdown()


class _Connection(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        with socket.create_connection((HOST, self.server.target_port)) as far:
            back = threading.Thread(target=_forward, args=(far, self.request))
            back.start()
            _forward(self.request, far)
            back.join()


def _forward(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while part := source.recv(1 << 16):
            sink.sendall(part)
    for one in (source, sink):
        with contextlib.suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)
