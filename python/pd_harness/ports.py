"""Ports for servers on this machine, held from their choice until `MOST` others have been chosen.

Between its choice and its use nothing binds a port. What holds it is a lock on its byte of a file
that all of this user's processes share; so two runs beside each other never choose the same.
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
PORTS = range(20_000, 32_000)  # below what the kernel hands to outgoing connections
MAX_RESERVED = (
    1_000  # that a process holds; those of a whole night's fleets would be nearly all there are
)


def free_ports(count: int, ports: Sequence[int] = PORTS) -> list[int]:
    """Distinct ports that nothing listens on, and that nobody else of ours will take.

    Raises:
        OSError: there are not so many.
    """
    found: list[int] = []
    for port in random.sample(ports, len(ports)):
        if len(found) == count:
            break
        if _reserve(port):
            found.append(port)
    if len(found) < count:
        raise OSError(f"no {count} free ports between {ports[0]} and {ports[-1]}")
    return found


def free_port_range(length: int, ports: Sequence[int] = PORTS) -> int:
    """The first of so many ports in a row, free and held as those of `free_ports`.

    Raises:
        OSError: there are not so many.
    """
    starts = ports[: len(ports) - length + 1]
    for start in random.sample(starts, len(starts)):
        taken = list(itertools.takewhile(_reserve, range(start, start + length)))
        if len(taken) == length:
            return start
        for port in taken:
            _release(port)
    raise OSError(f"no {length} free ports in a row between {ports[0]} and {ports[-1]}")


def _reserve(port: int) -> bool:
    """Whether the port was free, and is now held."""
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
    """The file, and the ports that this process holds, the oldest first.

    A fork has none of its parent's locks.
    """
    path = os.path.join(tempfile.gettempdir(), f"sglang-pd-ports-{os.getuid()}")
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), {}
