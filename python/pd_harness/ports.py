"""Ports for servers on this machine, each reserved until `MAX_RESERVED` more have been chosen.

Nothing binds a port between its choice and its use. The reservation is a lock on the port's byte in
a file that all of this user's processes share, so concurrent runs never choose the same port.
"""

import fcntl
import functools
import itertools
import os
import random
import socket
import tempfile
from collections.abc import Sequence

HOST = "127.0.0.1"
PORTS = range(20_000, 32_000)  # below the kernel's range for outgoing connections
MAX_RESERVED = (
    1_000  # per process; the fleets of a nightly run would otherwise reserve nearly all ports
)


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
            _release(port)
    raise OSError(f"no {length} consecutive free ports between {ports[0]} and {ports[-1]}")


def _reserve(port: int) -> bool:
    """Reserve the port if it is free; returns whether it was."""
    file, held = _reservations(os.getpid())
    if port in held:
        return False
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
    except OSError:
        return False
    held[port] = None
    with socket.socket() as probe:
        try:
            probe.bind((HOST, port))
        except OSError:
            _release(port)
            return False
    if len(held) > MAX_RESERVED:
        _release(next(iter(held)))
    return True


def _release(port: int) -> None:
    file, held = _reservations(os.getpid())
    fcntl.lockf(file, fcntl.LOCK_UN, 1, port)
    del held[port]


@functools.cache
def _reservations(process: int) -> tuple[int, dict[int, None]]:
    """The lock file, and the ports that this process has reserved, oldest first.

    A fork does not inherit its parent's locks.
    """
    path = os.path.join(tempfile.gettempdir(), f"sglang-pd-ports-{os.getuid()}")
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), {}
