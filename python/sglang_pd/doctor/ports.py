"""Checks the ports that a server opens, and those that it must reach."""

import errno
import socket
from collections.abc import Iterator

from sglang_pd.doctor.ascend import FIRST_PORT, LAST_PORT, STORE_URL, session_ports, store_address
from sglang_pd.doctor.findings import Finding, ok, warning, wrong
from sglang_pd.doctor.host import Host, LaunchOptions
from sglang_pd.doctor.memfabric import installed, uses_store
from sglang_pd.doctor.system import npus

GROUP = "ports"
CONNECT_TIMEOUT_S = 3.0  # to reach another host


def bind_error(address: str, port: int) -> OSError | None:
    """Returns why no server can listen there; None if one can."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            one.bind((address, port))
        except OSError as error:
            return error
    return None


def connect_error(address: str, port: int) -> OSError | None:
    """Returns why no server can be reached there; None if one can."""
    try:
        socket.create_connection((address, port), CONNECT_TIMEOUT_S).close()
    except OSError as error:
        return error
    return None


def check_ports(launch: LaunchOptions) -> Iterator[Finding]:
    yield _port_finding("server", launch.port, "--port")
    if launch.role != "decode":
        yield _port_finding("bootstrap", launch.bootstrap_port, "--disaggregation-bootstrap-port")


def _port_finding(name: str, port: int, flag: str) -> Finding:
    error = bind_error("0.0.0.0", port)
    if error is None:
        return ok(GROUP, name, f"{port} is free")
    advice = f"stop the process that uses it, or launch the server with another {flag}"
    return wrong(GROUP, name, f"{port}: {error.strerror}", advice)


def check_memfabric_ports(host: Host, launch: LaunchOptions) -> Iterator[Finding]:
    """Checks the store's port, or the decode ranks' ports, which prefill ranks must reach."""
    if launch.backend != "ascend":
        return
    if uses_store(host):
        yield from _check_store(host, launch)
    elif launch.role != "prefill":
        yield _session_ports_finding(host)


def _session_ports_finding(host: Host) -> Finding:
    ports, ranks = session_ports(host), len(npus(host))
    text = f"MemFabric {installed(host)} uses one of {ports[0]} to {ports[-1]} for each rank"
    if len(ports) < ranks:
        advice = f"widen the range of {FIRST_PORT} and {LAST_PORT}"
        return warning(GROUP, "sessions", f"{text}, but there are {ranks} NPUs", advice)
    return ok(GROUP, "sessions", f"{text}; prefill hosts must reach it")


def _check_store(host: Host, launch: LaunchOptions) -> Iterator[Finding]:
    """Checks the store's port: the first prefill node opens it, all other nodes must reach it."""
    address = store_address(host.environ.get(STORE_URL, ""))
    if not launch.role or address is None:
        return
    text = f"{address[0]}:{address[1]}"
    if launch.role == "decode":
        if error := connect_error(*address):
            advice = "start prefill first, and open the port to this host"
            yield warning(GROUP, "store", f"{text}: {error.strerror or error}", advice)
        else:
            yield ok(GROUP, "store", f"{text} answers")
        return
    error = bind_error(*address)
    if error is None:
        yield ok(GROUP, "store", f"{text} is free")
    elif error.errno == errno.EADDRNOTAVAIL:
        advice = "expected on a second prefill node; the first must have that address"
        yield warning(GROUP, "store", f"{text} is not an address of this host", advice)
    else:
        advice = f"stop the process that uses it, or set another port in {STORE_URL}, on all hosts"
        yield wrong(GROUP, "store", f"{text}: {error.strerror or error}", advice)
