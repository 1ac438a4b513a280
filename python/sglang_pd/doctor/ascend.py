"""Checks the `ascend` backend's variables: MemFabric's store, ports and transfer protocol."""

from collections.abc import Iterator
from urllib.parse import urlsplit

from sglang_pd.doctor.findings import Finding, ok, warning, wrong
from sglang_pd.doctor.host import Host, LaunchOptions
from sglang_pd.doctor.memfabric import installed, uses_store
from sglang_pd.doctor.network import GROUP, LOCAL_PREFIXES, is_address

STORE_URL = "ASCEND_MF_STORE_URL"
OTHER_STORE_URL = "MF_CONFIG_STORE_URL"
PROTOCOL = "ASCEND_MF_TRANSFER_PROTOCOL"
# Without the store, decode ranks listen on ports of this range, or of MemFabric's default.
FIRST_PORT, LAST_PORT = "MF_CONFIG_STORE_PORT_START", "MF_CONFIG_STORE_PORT_END"
DEFAULT_PORTS = range(9000, 65536)
MIN_PORT = 1024


def store_address(url: str) -> tuple[str, int] | None:
    """Returns host and port of MemFabric's store; None unless the URL is `tcp://HOST:PORT`."""
    try:
        parts = urlsplit(url)
        address = parts.hostname, parts.port
    except ValueError:
        return None
    return address if parts.scheme == "tcp" and all(address) else None


def session_ports(host: Host) -> range:
    """Returns the ports from which MemFabric picks one per rank; a non-number counts as unset."""
    named = [host.environ.get(name, "") for name in (FIRST_PORT, LAST_PORT)]
    first, last = (
        int(value) if value.isdecimal() else default
        for value, default in zip(named, (DEFAULT_PORTS[0], DEFAULT_PORTS[-1]))
    )
    return range(first, last + 1) if first <= last else DEFAULT_PORTS


def check_ascend(host: Host, launch: LaunchOptions) -> Iterator[Finding]:
    if launch.backend != "ascend":
        return
    yield from _check_store(host)
    yield from _check_ports(host)
    protocol = host.environ.get(PROTOCOL, "sdma")
    if protocol.strip().lower() not in ("sdma", "device_rdma"):
        advice = "0.5.9 uses sdma instead, later releases do if MemFabric does not support it; set "
        advice += "sdma (A3) or device_rdma (A2)"
        yield warning(GROUP, PROTOCOL, protocol, advice)


def _check_store(host: Host) -> Iterator[Finding]:
    """Checks the store's URL. The engine passes it to MemFabric, which refuses only None."""
    url, other = host.environ.get(STORE_URL), host.environ.get(OTHER_STORE_URL)
    address = store_address(url or "")
    if url is None and other is not None:
        advice = f"the engine reads only {STORE_URL}: `export {STORE_URL}=${OTHER_STORE_URL}`"
        yield wrong(GROUP, STORE_URL, f"not set, but {OTHER_STORE_URL} is", advice)
    elif url is None:
        advice = "set it on both sides, to the first prefill node's store: tcp://ADDRESS:24667"
        yield wrong(GROUP, STORE_URL, "not set", advice)
    elif not uses_store(host):
        text = f"{url or 'empty'}, which MemFabric {installed(host)} does not use"
        yield ok(GROUP, STORE_URL, text)
    elif address is None:
        yield wrong(GROUP, STORE_URL, repr(url), "expected tcp://ADDRESS:PORT")
    elif not is_address(address[0]):
        advice = "MemFabric needs an IP address: give the first prefill node's"
        yield wrong(GROUP, STORE_URL, url, advice)
    elif address[0].startswith(LOCAL_PREFIXES):
        advice = "other hosts cannot reach it: give the first prefill node's address"
        yield warning(GROUP, STORE_URL, url, advice)


def _check_ports(host: Host) -> Iterator[Finding]:
    usual = f"MemFabric would use {DEFAULT_PORTS[0]} to {DEFAULT_PORTS[-1]}"
    first, last = (host.environ.get(name) for name in (FIRST_PORT, LAST_PORT))
    for name, value in ((FIRST_PORT, first), (LAST_PORT, last)):
        if value is None:
            continue
        if uses_store(host):
            advice = "only MemFabric 1.1.3 and later read it: unset it"
            yield warning(GROUP, name, value, advice)
        elif not value.isdecimal():
            yield warning(GROUP, name, repr(value), f"expected a port; {usual}")
        elif int(value) < MIN_PORT:
            advice = f"MemFabric accepts no port below {MIN_PORT}; the server would not start"
            yield wrong(GROUP, name, value, advice)
    numbers = [int(value) for value in (first, last) if value and value.isdecimal()]
    if len(numbers) == 2 and numbers[0] > numbers[1]:
        advice = f"{usual} instead: give the lower port first"
        yield warning(GROUP, "MemFabric's ports", f"{first} to {last}", advice)
