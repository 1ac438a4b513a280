"""Ports for servers on this machine, held from their choice until this process ends.

Between its choice and its use nothing binds a port. What holds it is a lock on its byte of a file
that all of this user's processes share; so two runs beside each other never choose the same.
"""

import fcntl
import functools
import os
import random
import socket
import tempfile
from collections.abc import Sequence

HOST = "127.0.0.1"
PORTS = range(20_000, 32_000)  # below what the kernel hands to outgoing connections


def free_ports(count: int, ports: Sequence[int] = PORTS) -> list[int]:
    """Distinct ports that nothing listens on, and that nobody else of ours will take.

    Raises:
        OSError: there are not so many.
    """
    found: list[int] = []
    for port in random.sample(ports, len(ports)):
        if len(found) == count:
            break
        if _hold(port):
            found.append(port)
    if len(found) < count:
        raise OSError(f"no {count} free ports between {ports[0]} and {ports[-1]}")
    return found


def free_run(length: int, ports: Sequence[int] = PORTS) -> int:
    """The first of so many ports in a row, free and held as those of `free_ports`.

    Raises:
        OSError: there are not so many.
    """
    starts = ports[: len(ports) - length + 1]
    for start in random.sample(starts, len(starts)):
        if all(_hold(port) for port in range(start, start + length)):
            return start
    raise OSError(f"no {length} free ports in a row between {ports[0]} and {ports[-1]}")


def _hold(port: int) -> bool:
    """Whether the port was free, and is now held."""
    file, held = _held(os.getpid())
    if port in held:
        return False
    with socket.socket() as probe:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
            probe.bind((HOST, port))
        except OSError:
            return False
    held.add(port)
    return True


@functools.cache
def _held(process: int) -> tuple[int, set[int]]:
    """The file, and the ports that this process holds; a fork has none of its parent's locks."""
    path = os.path.join(tempfile.gettempdir(), f"sglang-pd-ports-{os.getuid()}")
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), set()
