"""Names of servers in metrics: HOST:PORT, where clients and routers reach them."""

from __future__ import annotations

import ipaddress
import socket
from typing import Any

from sglang.srt.disaggregation.kv_layout import LayoutError, decode_layout

# Addresses of which each node has its own. The engine listens at the first by default, behind a
# router on the same node.
OF_ANY_NODE = ("127.0.0.1", "localhost", "::1", "", "0.0.0.0", "::", "[::]")
MAX_NAME = 100


def own_server_name(scheduler: Any) -> str:
    """Returns this server's name; without a host if that says nothing of its only node.

    Empty if the scheduler does not know it.
    """
    args = getattr(scheduler, "server_args", None)
    port, first_node = getattr(args, "port", 0), getattr(args, "dist_init_addr", None)
    if not port:
        return ""
    host = getattr(args, "host", None) or ""
    if getattr(args, "nnodes", 1) > 1 and first_node:
        host = first_node.rpartition(":")[0]
    return f"{'' if host in OF_ANY_NODE else host}:{port}"


def server_name(layout_frame: bytes, address: str) -> str:
    """Returns the name of the server that a decode rank belongs to.

    Args:
        layout_frame: The description that the rank sends; empty from a stock one.
        address: Where it reads messages, the name of a rank that sends none.
    """
    try:
        layout = decode_layout(layout_frame)
    except LayoutError:  # its refusal says why
        layout = None
    name = layout.server if layout is not None else ""
    if not name or len(name) > MAX_NAME or not name.isprintable():
        return address
    return address + name if name.startswith(":") else name


def resolved_name(address: str) -> str:
    """Returns a server's name, the same however a client spells its host; waits for DNS.

    Args:
        address: HOST:PORT.

    Returns:
        HOST:PORT with an IP address; empty if the host has none.
    """
    host, _, port = address.rpartition(":")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
        ip = ipaddress.ip_address(found[0][4][0])
    except (OSError, ValueError, OverflowError):  # among them those of `idna`
        return ""
    ip = getattr(ip, "ipv4_mapped", None) or ip
    if ip.is_loopback or ip.is_unspecified:  # all of which are this node
        ip = ipaddress.ip_address("127.0.0.1")
    return f"[{ip}]:{int(port)}" if ip.version == 6 else f"{ip}:{int(port)}"
