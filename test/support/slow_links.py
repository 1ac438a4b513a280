"""Proxies that add latency, in both directions, to TCP connections of this process."""

import queue
import socket
import struct
import threading
import time

from rank_faults import own_sockets

from pd_harness.ports import HOST


def metadata_of_slow_proxy(metadata: bytes, seconds: float, spare: set[int]) -> bytes:
    """Returns a NIXL agent's metadata with which peers reach it through proxies.

    The proxies delay each byte by `seconds`. UCX writes its listening ports into the metadata, in
    network byte order, behind the agent's name. The ports in `spare` are not UCX's.
    """
    for address, port in listening():
        if port in spare:
            continue
        listener = socket.create_server(("0.0.0.0", 0))
        place = struct.pack(">H", port)
        if place in metadata:
            own = struct.pack(">H", listener.getsockname()[1])
            metadata = metadata.replace(place, own, 1)
            _start(_accept, listener, (address, port), seconds)
        else:
            listener.close()
    return metadata


def listening() -> list[tuple[str, int]]:
    """Returns (address, port) pairs on which this process listens over IPv4."""
    found = []
    for sock in own_sockets(socket.AF_INET):
        if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            host, port = sock.getsockname()
            found.append((HOST if host == "0.0.0.0" else host, port))
    return found


def _start(work, *args) -> None:
    threading.Thread(target=work, args=args, daemon=True).start()


def _accept(listener: socket.socket, to: tuple[str, int], seconds: float) -> None:
    while True:
        near, _ = listener.accept()
        far = socket.create_connection(to)
        for source, sink in ((near, far), (far, near)):
            kept: queue.SimpleQueue = queue.SimpleQueue()
            _start(_receive, source, kept, seconds)
            _start(_send_delayed, sink, kept)


def _receive(source: socket.socket, kept: queue.SimpleQueue, seconds: float) -> None:
    part = b"first"
    while part:
        try:
            part = source.recv(1 << 16)
        except OSError:
            part = b""
        kept.put((time.monotonic() + seconds, part))


def _send_delayed(sink: socket.socket, kept: queue.SimpleQueue) -> None:
    while True:
        due, part = kept.get()
        time.sleep(max(0.0, due - time.monotonic()))
        try:
            if not part:
                return sink.shutdown(socket.SHUT_WR)
            sink.sendall(part)
        except OSError:
            return
