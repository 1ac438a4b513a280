"""Ports for servers on this machine, each reserved until `MAX_RESERVED` more have been chosen.

A reserved port is bound, and nothing listens on it. A server can bind it, too, because servers set
SO_REUSEADDR; a library that looks for any free port (MemFabric, Mooncake) does not get it.
"""

import itertools
import random
import socket
from collections.abc import Sequence

HOST = "127.0.0.1"
PORTS = range(20_000, 32_000)  # below the kernel's range for outgoing connections
MAX_RESERVED = 200  # per process; a fleet has fewer, and binds them soon

_reserved: dict[int, socket.socket] = {}  # the oldest first


def free_ports(count: int, ports: Sequence[int] = PORTS) -> list[int]:
    """``count`` distinct ports that are free, reserved for this process.

    Raises:
        OSError: fewer are free.
    """
    found: list[int] = []
    for port in random.sample(ports, len(ports)):
        if len(found) == count:
            break
        if _reserve(port):
            found.append(port)
    if len(found) < count:
        raise OSError(f"only {len(found)} of {count} free ports between {ports[0]} and {ports[-1]}")
    return found


def free_port_range(length: int, ports: Sequence[int] = PORTS) -> int:
    """The first of ``length`` consecutive ports, all free and reserved for this process.

    Raises:
        OSError: no such range is free.
    """
    starts = ports[: len(ports) - length + 1]
    for start in random.sample(starts, len(starts)):
        taken = list(itertools.takewhile(_reserve, range(start, start + length)))
        if len(taken) == length:
            return start
        for port in taken:
            _reserved.pop(port).close()
    raise OSError(f"no {length} consecutive free ports between {ports[0]} and {ports[-1]}")


def _reserve(port: int) -> bool:
    """Reserve the port if it is free; returns whether it was."""
    holder = socket.socket()
    try:
        holder.bind((HOST, port))
    except OSError:
        holder.close()
        return False
    # Only now: before, it would let us bind a port that another process has reserved.
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    _reserved[port] = holder
    if len(_reserved) > MAX_RESERVED:
        _reserved.pop(next(iter(_reserved))).close()
    return True
