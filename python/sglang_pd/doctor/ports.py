"""Ports that a server opens, and those that it must reach."""

import errno
import socket
from collections.abc import Iterator

from sglang_pd.doctor.ascend import FIRST_PORT, LAST_PORT, STORE, session_ports, store_address
from sglang_pd.doctor.findings import Finding, ok, warning, wrong
from sglang_pd.doctor.host import Host, Launch
from sglang_pd.doctor.memfabric import installed, uses_store
from sglang_pd.doctor.system import npus

GROUP = "ports"
SECONDS = 3.0  # to reach another host


def bind_error(address: str, port: int) -> OSError | None:
    """Why nothing can listen there."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            one.bind((address, port))
        except OSError as error:
            return error
    return None


def connect_error(address: str, port: int) -> OSError | None:
    """Why nobody answers there."""
    try:
        socket.create_connection((address, port), SECONDS).close()
    except OSError as error:
        return error
    return None


def check_ports(launch: Launch) -> Iterator[Finding]:
    yield _free("server", launch.port, "--port")
    if launch.role != "decode":
        yield _free("bootstrap", launch.bootstrap_port, "--disaggregation-bootstrap-port")


def _free(name: str, port: int, flag: str) -> Finding:
    error = bind_error("0.0.0.0", port)
    if error is None:
        return ok(GROUP, name, f"{port} is free")
    return wrong(GROUP, name, f"{port}: {error.strerror}", f"end who has it, or give {flag}")


def check_memfabrics(host: Host, launch: Launch) -> Iterator[Finding]:
    """The store's, or those of decode ranks, which prefill ranks must reach."""
    if launch.backend != "ascend":
        return
    if uses_store(host):
        yield from _check_store(host, launch)
    elif launch.role != "prefill":
        yield _check_sessions(host)


def _check_sessions(host: Host) -> Finding:
    ports, ranks = session_ports(host), len(npus(host))
    said = f"MemFabric {installed(host)} takes one of {ports[0]} to {ports[-1]} for each rank"
    if len(ports) < ranks:
        advice = f"widen {FIRST_PORT} and {LAST_PORT}"
        return warning(GROUP, "sessions", f"{said}; there are {ranks} NPUs", advice)
    return ok(GROUP, "sessions", f"{said}; prefill's hosts must reach it")


def _check_store(host: Host, launch: Launch) -> Iterator[Finding]:
    """The first prefill node opens it, all others must reach it."""
    address = store_address(host.environ.get(STORE, ""))
    if not launch.role or address is None:
        return
    said = f"{address[0]}:{address[1]}"
    if launch.role == "decode":
        if error := connect_error(*address):
            advice = "start prefill first, and open the port to this host"
            yield warning(GROUP, "store", f"{said}: {error.strerror or error}", advice)
        else:
            yield ok(GROUP, "store", f"{said} answers")
        return
    error = bind_error(*address)
    if error is None:
        yield ok(GROUP, "store", f"{said} is free")
    elif error.errno == errno.EADDRNOTAVAIL:
        advice = "right on a second prefill node; the first must have that address"
        yield warning(GROUP, "store", f"{said} is no address of this host", advice)
    else:
        yield wrong(GROUP, "store", f"{said}: {error.strerror or error}", f"change {STORE}")
