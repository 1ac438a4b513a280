"""Checks limits, shared memory and devices."""

import os
import re
from collections.abc import Iterator

from sglang_pd.doctor.findings import Finding, ok, warning, wrong
from sglang_pd.doctor.host import Host, LaunchOptions

GROUP = "system"
MIN_OPEN_FILES = 65536  # each pair of ranks has its own sockets
MIN_SHARED_MEMORY = 1 << 30
VERBS_FOLDER = "/dev/infiniband"
NPU_NODES = ("davinci_manager", "devmm_svm", "hisi_hdc")


def soft_limit(host: Host, name: str) -> float | None:
    """Returns this process's soft limit; infinity if unlimited, None if not listed."""
    found = re.search(rf"(?m)^{name} +(\S+) +\S+", host.text("/proc/self/limits"))
    if not found:
        return None
    return float("inf") if found[1] == "unlimited" else float(found[1])


def rdma_devices(host: Host) -> dict[str, bool]:
    """Returns {device: whether any port is active}."""
    states = "/sys/class/infiniband/{}/ports/{}/state"
    return {
        device: any(
            "ACTIVE" in host.text(states.format(device, port))
            for port in host.names(f"/sys/class/infiniband/{device}/ports")
        )
        for device in host.names("/sys/class/infiniband")
    }


def check_locked_memory(host: Host, launch: LaunchOptions) -> Iterator[Finding]:
    """Checks the limit: registering KV pools with the network card locks their memory."""
    found = soft_limit(host, "Max locked memory")
    if found is None:
        return
    if found == float("inf"):
        yield ok(GROUP, "locked memory", "unlimited")
    else:
        say = wrong if rdma_devices(host) and launch.backend != "ascend" else warning
        advice = "KV pools cannot be registered for RDMA: `ulimit -l unlimited`, or in Docker "
        advice += "`--ulimit memlock=-1`"
        yield say(GROUP, "locked memory", f"{found / 2**20:.0f} MiB", advice)


def check_open_files(host: Host) -> Iterator[Finding]:
    found = soft_limit(host, "Max open files")
    if found is None:
        return
    if found >= MIN_OPEN_FILES:
        yield ok(GROUP, "open files", f"{found:.0f}")
    else:
        advice = f"every peer needs sockets: `ulimit -n {MIN_OPEN_FILES}`, or in Docker "
        advice += f"`--ulimit nofile={MIN_OPEN_FILES}`"
        yield warning(GROUP, "open files", f"{found:.0f}", advice)


def check_shared_memory(host: Host) -> Iterator[Finding]:
    try:
        stat = os.statvfs(host.path("/dev/shm"))
    except OSError:
        yield wrong(GROUP, "shared memory", "no /dev/shm", "mount one; in Docker `--shm-size 16g`")
        return
    size = stat.f_frsize * stat.f_blocks
    if size >= MIN_SHARED_MEMORY:
        yield ok(GROUP, "shared memory", f"{size / 2**30:.1f} GiB")
    else:
        advice = "a server's ranks communicate by it: in Docker `--shm-size 16g` or `--ipc host`"
        yield warning(GROUP, "shared memory", f"{size / 2**20:.0f} MiB", advice)


def check_rdma(host: Host, launch: LaunchOptions) -> Iterator[Finding]:
    """Checks RDMA devices of NVIDIA hosts; an NPU has its own network."""
    if launch.backend == "ascend":
        return
    devices = rdma_devices(host)
    if not devices:
        advice = "KV goes over TCP, which is slow; in Docker, give the container the devices with "
        advice += "`--device /dev/infiniband`"
        yield warning(GROUP, "RDMA devices", "none", advice)
        return
    verbs = [name for name in host.names(VERBS_FOLDER) if name.startswith("uverbs")]
    found = ", ".join(f"{name}{'' if up else ' (down)'}" for name, up in devices.items())
    if not verbs:
        advice = f"they cannot be opened: in Docker, add `--device {VERBS_FOLDER}`"
        yield wrong(GROUP, "RDMA devices", f"{found}; no {VERBS_FOLDER}/uverbs*", advice)
    elif not any(devices.values()):
        advice = "no port is active: check `ibstat`, and the cables"
        yield wrong(GROUP, "RDMA devices", found, advice)
    elif not all(devices.values()):
        active = ",".join(name for name, up in devices.items() if up)
        advice = f"start the server with `--disaggregation-ib-device {active}`"
        yield warning(GROUP, "RDMA devices", found, advice)
    else:
        yield ok(GROUP, "RDMA devices", found)


def npus(host: Host) -> list[str]:
    """Returns the NPUs' names in /dev."""
    return [name for name in host.names("/dev") if re.fullmatch(r"davinci\d+", name)]


def check_npus(host: Host, launch: LaunchOptions) -> Iterator[Finding]:
    if launch.backend != "ascend":
        return
    found, names = npus(host), host.names("/dev")
    lacking = [f"/dev/{name}" for name in NPU_NODES if name not in names]
    if not found:
        advice = "in Docker, `--device /dev/davinci0` and so on, or `--privileged`"
        yield wrong(GROUP, "NPUs", "no /dev/davinci*", advice)
    elif lacking:
        advice = "give the container these devices, too"
        yield wrong(GROUP, "NPUs", f"{len(found)}, but no {', '.join(lacking)}", advice)
    else:
        yield ok(GROUP, "NPUs", str(len(found)))
    if not host.path("/usr/local/Ascend/driver").is_dir():
        advice = "in Docker, `--volume /usr/local/Ascend/driver:/usr/local/Ascend/driver`"
        yield wrong(GROUP, "NPU driver", "no /usr/local/Ascend/driver", advice)
