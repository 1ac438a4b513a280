"""Checks the environment variables that matter to PD."""

import ast
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path

from sglang_pd.doctor.ascend import check_ascend
from sglang_pd.doctor.findings import Finding, ok, warning, wrong
from sglang_pd.doctor.host import Host, LaunchOptions
from sglang_pd.doctor.network import GROUP, check_network

VERIFY = "SGLANG_PD_VERIFY"
PACKED, PACKING_SIZE = "SGLANG_PD_PACKED", "SGLANG_PD_PACKING_MIB"
# Variables that are shown if they are set.
SHOWN_PATTERN = (
    r"ASCEND_|MF_|MC_|MOONCAKE_|UCX_|NIXL_|SGLANG_(DISAGG|MOONCAKE|PD_|USE_FIA|NPU_USE|HOST_IP)"
    r"|HOST_IP|(GLOO|HCCL)_SOCKET_IFNAME"
)
# The engine's `environ.py` lists all variables with these prefixes.
ENGINE_PATTERN = re.compile(r"SGLANG_DISAGG|SGLANG_MOONCAKE_")
LISTED_PATTERN = re.compile(rf"{ENGINE_PATTERN.pattern}|MOONCAKE_")  # only some of MOONCAKE_*
EXPECTED_VALUES = {"EnvInt": "an integer", "EnvFloat": "a number", "EnvBool": "true or false"}
# Read without `environ.py`: any value except true, 1, false and 0 counts as false.
BOOLEAN_VARIABLES = ("ASCEND_USE_FIA", "SGLANG_USE_FIA_NZ", "SGLANG_NPU_USE_MLAPO")
INTEGER_VARIABLES = (
    "MC_GID_INDEX",
    "MC_IB_PORT",
    "MC_MTU",
    "MC_NUM_QP_PER_EP",
    "MC_TRANSFER_TIMEOUT",
)
LOCAL_TRANSPORTS = {"self", "shm", "sm", "sysv", "posix", "cma", "knem", "xpmem", "cuda_ipc"}


def check_environment(
    host: Host, launch: LaunchOptions, engine: Path, patched: bool
) -> list[Finding]:
    """Reports every relevant variable that is set, and each unset one that should be set."""
    found = [
        *check_engine_variables(host, engine),
        *check_boolean_variables(host),
        *check_ascend(host, launch),
        *check_mooncake(host, launch),
        *check_ucx(host, launch),
        *check_network(host, launch),
        *check_verify(host, patched),
        *check_packing(host),
    ]
    judged = {one.name for one in found}
    others = sorted(
        name for name in host.environ if re.match(SHOWN_PATTERN, name) and name not in judged
    )
    return [*found, *(ok(GROUP, name, host.environ[name]) for name in others)]


def engine_variables(engine: Path) -> dict[str, str]:
    """Returns {name: `EnvInt` or the like} from the engine's `environ.py`; empty without it."""
    try:
        module = ast.parse((engine / "srt" / "environ.py").read_bytes())
    except (OSError, SyntaxError):
        return {}
    return {
        node.targets[0].id: node.value.func.id
        for node in ast.walk(module)
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.Call)
        and isinstance(node.value.func, ast.Name)
        and node.value.func.id.startswith("Env")
    }


def check_engine_variables(host: Host, engine: Path) -> Iterator[Finding]:
    """Reports unknown names, which the engine ignores, and values that its default replaces."""
    known = engine_variables(engine)
    for name in sorted(host.environ) if known else ():
        value = host.environ[name]
        kind = known.get(name)
        if kind is None and ENGINE_PATTERN.match(name):
            advice = "this release has no such variable: check the spelling, or unset it"
            yield warning(GROUP, name, value, advice)
        elif kind and LISTED_PATTERN.match(name) and not _is_readable(kind, value):
            advice = f"expected {EXPECTED_VALUES[kind]}; the engine would use its default"
            yield wrong(GROUP, name, repr(value), advice)
    backend = host.environ.get("SGLANG_DISAGGREGATION_NIXL_BACKEND", "UCX")
    if backend != "UCX":
        name = "SGLANG_DISAGGREGATION_NIXL_BACKEND"
        yield warning(GROUP, name, backend, "the patches were tested only with UCX")
    name = "SGLANG_DISAGGREGATION_NIXL_BACKEND_PARAMS"
    if name in host.environ and not _is_object(host.environ[name]):
        yield wrong(GROUP, name, repr(host.environ[name]), "expected a JSON object, or unset it")


def _is_readable(kind: str, value: str) -> bool:
    if kind == "EnvBool":
        return value.lower() in ("true", "1", "yes", "y", "false", "0", "no", "n")
    if kind not in ("EnvInt", "EnvFloat"):
        return True
    try:
        int(value) if kind == "EnvInt" else float(value)
    except ValueError:
        return False
    return True


def _is_object(value: str) -> bool:
    try:
        return isinstance(json.loads(value), dict)
    except ValueError:
        return False


def check_boolean_variables(host: Host) -> Iterator[Finding]:
    for name in BOOLEAN_VARIABLES:
        value = host.environ.get(name)
        if value is not None and value.lower() not in ("true", "1", "false", "0"):
            yield wrong(GROUP, name, repr(value), "it counts as false: set it to 1 or 0")


def check_mooncake(host: Host, launch: LaunchOptions) -> Iterator[Finding]:
    if launch.backend != "mooncake":
        return
    if "MC_FORCE_TCP" in host.environ:
        advice = "KV goes over TCP, which is slow; unset it (0 counts as set)"
        yield warning(GROUP, "MC_FORCE_TCP", host.environ["MC_FORCE_TCP"], advice)
    for name in INTEGER_VARIABLES:
        value = host.environ.get(name, "0")
        if not re.fullmatch(r"-?\d+", value):
            yield wrong(GROUP, name, repr(value), "expected an integer")


def check_ucx(host: Host, launch: LaunchOptions) -> Iterator[Finding]:
    if launch.backend != "nixl":
        return
    devices = {*host.names("/sys/class/infiniband"), *host.names("/sys/class/net"), "all"}
    named = host.environ.get("UCX_NET_DEVICES", "")
    lacking = [one for one in named.split(",") if one and one.split(":")[0] not in devices]
    if lacking:
        advice = f"this host lacks {', '.join(lacking)}; it has {', '.join(sorted(devices))}"
        yield wrong(GROUP, "UCX_NET_DEVICES", named, advice)
    transports = host.environ.get("UCX_TLS", "")
    if transports and {*transports.split(",")} <= LOCAL_TRANSPORTS:
        advice = "these transports work only within a host: add rc or tcp, or unset it"
        yield warning(GROUP, "UCX_TLS", transports, advice)
    plugins = host.environ.get("NIXL_PLUGIN_DIR")
    if plugins and not host.path(plugins).is_dir():
        yield wrong(GROUP, "NIXL_PLUGIN_DIR", plugins, "no such folder; unset it")


def check_verify(host: Host, patched: bool) -> Iterator[Finding]:
    value = host.environ.get(VERIFY, "")
    if value not in ("", "0", "1", "log"):
        yield wrong(GROUP, VERIFY, repr(value), "expected 1, log or 0; servers would not start")
    elif value in ("1", "log") and not patched:
        advice = "a stock engine does not compare KV: run `sglang-pd apply`"
        yield wrong(GROUP, VERIFY, value, advice)
    elif value:
        yield ok(GROUP, VERIFY, value)
    if host.environ.get("SGLANG_PD_CPU_HOST") == "1":
        advice = "it replaces hardware in tests: unset it where real servers run"
        yield wrong(GROUP, "SGLANG_PD_CPU_HOST", "1", advice)


def check_packing(host: Host) -> Iterator[Finding]:
    """Reports values with which a patched server would not start."""
    value = host.environ.get(PACKED, "")
    if value not in ("", "0", "1"):
        yield wrong(GROUP, PACKED, repr(value), "expected 1 or 0; servers would not start")
    value = host.environ.get(PACKING_SIZE, "")
    if value and not _is_amount(value):
        advice = "expected a number of MiB, 0 or more; servers would not start"
        yield wrong(GROUP, PACKING_SIZE, repr(value), advice)


def _is_amount(value: str) -> bool:
    try:
        return 0 <= float(value) < math.inf
    except ValueError:
        return False
