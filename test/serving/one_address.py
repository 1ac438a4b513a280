"""One address that leads to one server after the other, as a service of Kubernetes does.

Connections that there are stay where they are.
"""

import contextlib
import socket
import socketserver
import threading
from collections.abc import Iterator

from pd_harness.ports import HOST


class Address(socketserver.ThreadingTCPServer):
    """Listens on a port of its own; `leads_to` is the port of new connections."""

    daemon_threads = True

    def __init__(self, port: int):
        super().__init__((HOST, 0), _Connection)
        self.leads_to = port

    @property
    def port(self) -> int:
        return self.server_address[1]


@contextlib.contextmanager
def one_address(port: int) -> Iterator[Address]:
    """That leads to a port of this machine, at first."""
    with Address(port) as address:
        threading.Thread(target=address.serve_forever, daemon=True).start()
        try:
            yield address
        finally:
            address.shutdown()


class _Connection(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        with socket.create_connection((HOST, self.server.leads_to)) as far:
            back = threading.Thread(target=_carry, args=(far, self.request))
            back.start()
            _carry(self.request, far)
            back.join()


def _carry(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while part := source.recv(1 << 16):
            sink.sendall(part)
    for one in (source, sink):
        with contextlib.suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)
