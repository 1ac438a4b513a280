"""Checks variables that set how hosts reach each other: addresses, network devices, proxies."""

from collections.abc import Iterator
from ipaddress import ip_address

from sglang_pd.doctor.findings import Finding, ok, warning, wrong
from sglang_pd.doctor.host import Host, LaunchOptions

GROUP = "environment"
# The engine takes the first that is not empty.
ADDRESSES = ("SGLANG_HOST_IP", "HOST_IP")
LOCAL_PREFIXES = ("127.", "localhost", "0.0.0.0", "::")
PROXIES = ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY")
GLOO, HCCL = "GLOO_SOCKET_IFNAME", "HCCL_SOCKET_IFNAME"


def is_address(host: str) -> bool:
    """Whether this is an IP address and not a host name."""
    try:
        ip_address(host.strip("[]"))
    except ValueError:
        return False
    return True


def check_network(host: Host, launch: LaunchOptions) -> Iterator[Finding]:
    yield from _check_address(host, launch)
    yield from _check_devices(host, launch)
    proxy = next((name for name in PROXIES if host.environ.get(name)), None)
    if proxy and not (host.environ.get("no_proxy") or host.environ.get("NO_PROXY")):
        advice = "ranks reach the bootstrap server through it: unset it, or list prefill's hosts "
        advice += "in no_proxy"
        yield warning(GROUP, proxy, host.environ[proxy], advice)


def _check_address(host: Host, launch: LaunchOptions) -> Iterator[Finding]:
    name = next((name for name in ADDRESSES if host.environ.get(name)), "")
    value = host.environ.get(name, "")
    if value and launch.backend == "ascend" and not is_address(value):
        advice = "MemFabric's session ids need an IP address, not a name: give this host's"
        yield wrong(GROUP, name, value, advice)
    elif value.startswith(LOCAL_PREFIXES):
        advice = "ranks announce it to their peers, which cannot reach it: give this host's address"
        yield warning(GROUP, name, value, advice)


def _check_devices(host: Host, launch: LaunchOptions) -> Iterator[Finding]:
    """Checks the devices' names: Gloo takes whole names, HCCL prefixes."""
    here = host.names("/sys/class/net")
    for name in (GLOO, HCCL) if launch.backend == "ascend" else (GLOO,):
        value = host.environ.get(name, "")
        lacking = [one for one in _listed_devices(value) if not _has_device(one, name, here)]
        if lacking:
            advice = f"this host lacks {', '.join(lacking)}; it has {', '.join(here)}"
            yield wrong(GROUP, name, value, advice)
        elif value:
            yield ok(GROUP, name, value)
        elif launch.nodes > 1:
            advice = "where hosts have several network devices, nodes may choose ones that cannot "
            advice += f"reach each other: `export {name}=DEVICE`, the one of --dist-init-addr"
            yield warning(GROUP, name, "not set", advice)


def _listed_devices(value: str) -> list[str]:
    """Returns the devices that a value lists; none if it starts with ^, which excludes devices."""
    return [] if value.startswith("^") else [one for one in value.split(",") if one]


def _has_device(device: str, variable: str, here: list[str]) -> bool:
    if variable == HCCL and not device.startswith("="):
        return any(one.startswith(device) for one in here)
    return device.lstrip("=") in here
