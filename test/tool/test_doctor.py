"""What `sglang-pd doctor` finds on fake hosts, images and servers."""

import errno
import json
import re
import socket
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest
from toy import ROOT, VERSION, install_package, write

from sglang_pd.doctor import ascend, environment, packages, ports, servers, system
from sglang_pd.doctor.engine import check_engine, check_patches
from sglang_pd.doctor.findings import ok
from sglang_pd.doctor.host import Host, LaunchOptions, import_error
from sglang_pd.doctor.run_checks import run_checks
from sglang_pd.errors import ExitCode
from sglang_pd.patchset.patches import load_release, supported_releases

LIMITS = """\
Limit                     Soft Limit           Hard Limit           Units
Max open files            {files}              {files}              files
Max locked memory         {locked}             {locked}             bytes
"""


def levels(findings) -> dict[str, str]:
    return {one.name: one.level for one in findings}


def single(findings):
    (one,) = findings
    return one


def launch(
    backend="nixl", role="", port=30000, bootstrap_port=8998, image=False, nodes=1
) -> LaunchOptions:
    return LaunchOptions(role, backend, port, bootstrap_port, image, nodes)


@pytest.fixture
def fake(tmp_path):
    """A host that has only what a test writes."""

    class Fake:
        root = tmp_path / "root"

        def host(self, failing=None, **environ) -> Host:
            self.root.mkdir(exist_ok=True)
            folders = [str(tmp_path / "site")]
            return Host(environ, self.root, folders, lambda module: (failing or {}).get(module, ""))

        def file(self, name, text="") -> None:
            write(self.root / name.lstrip("/"), text)

        def limits(self, locked="unlimited", files="1048576") -> None:
            self.file("/proc/self/limits", LIMITS.format(locked=locked, files=files))

        def install(self, name, version) -> None:
            install_package(tmp_path / "site", name, version)

        def rdma(self, name, state="4: ACTIVE", verbs=True) -> None:
            self.file(f"/sys/class/infiniband/{name}/ports/1/state", state)
            if verbs:
                self.file("/dev/infiniband/uverbs0")

    return Fake()


# The engine


def test_stock_engine_is_wrong_and_patched_is_ok(toy):
    found = single(check_patches(toy.status()))
    assert (found.level, found.found) == ("wrong", "absent") and "sglang-pd apply" in found.advice
    toy.apply()
    found = single(check_patches(toy.status()))
    assert (found.level, found.found) == ("ok", "2 applied")


def test_edited_file_is_reported(toy):
    toy.apply()
    write(toy.root / "srt/net/conn.py", "theirs = 1\n")
    found = list(check_patches(toy.status()))
    assert levels(found)["files"] == "wrong" and "srt/net/conn.py" in found[-1].found


def test_preview_release_is_a_warning(toy):
    assert single(check_engine(toy.engine(), toy.release())).level == "ok"
    write(toy.releases / VERSION / "release.toml", 'trees = ["sglang"]\npreview = "new"\n')
    found = single(check_engine(toy.engine(), toy.release()))
    assert (found.level, "new" in found.advice) == ("warning", True)


# Packages


@pytest.fixture
def release(toy):
    """A release that was tested with NIXL 1.5.1."""
    write(toy.releases / VERSION / "release.toml", 'trees = ["sglang"]\ntested.nixl = ["1.5.1"]\n')
    return toy.release()


@pytest.mark.parametrize(
    ("name", "version", "level"),
    [
        ("nixl", "1.5.1", "ok"),
        ("nixl-cu12", "1.5.1+vendor", "ok"),
        ("nixl", "0.9.0", "warning"),
        ("nothing", "1", "wrong"),
    ],
)
def test_untested_library_version_is_a_warning(fake, release, name, version, level):
    fake.install(name, version)
    found = list(packages.check_versions(fake.host(), launch(), release))
    assert levels(found)["nixl"] == level
    assert level != "warning" or "1.5.1" in found[-1].advice


def test_cann_is_found_by_environment_variable(fake, release):
    fake.install("torch_npu", "2.8.0")
    fake.install("memfabric_hybrid", "1.0.5")
    assert packages.choose_backend(fake.host()) == "ascend"
    found = levels(packages.check_versions(fake.host(), launch("ascend"), release))
    assert found == {"torch": "wrong", "torch_npu": "warning", "CANN": "wrong"}
    fake.file("/usr/local/Ascend/cann/compiler/version.info", "Version=8.3.RC2\n")
    assert packages.cann_version(fake.host()) == "8.3.RC2"
    fake.file("/opt/cann/aarch64-linux/ascend_toolkit_install.info", "x=1\nversion=8.5.0\n")
    assert packages.cann_version(fake.host(ASCEND_TOOLKIT_HOME="/opt/cann")) == "8.5.0"


def test_backend_is_chosen_from_installed_packages(fake):
    assert packages.choose_backend(fake.host()) == "mooncake"
    fake.install("nixl", "1.5.1")
    assert packages.choose_backend(fake.host()) == "nixl"
    fake.install("mooncake-transfer-engine", "0.3.13")
    assert packages.choose_backend(fake.host()) == "mooncake"


def test_library_import_error_is_reported(fake):
    fake.install("mooncake-transfer-engine-non-cuda", "0.3.13")
    missing = "ImportError: libibverbs.so.1: cannot open shared object file"
    host = fake.host({"mooncake.engine": missing})
    found = single(packages.check_library(host, launch("mooncake")))
    assert (found.level, found.found) == ("wrong", missing)
    assert single(packages.check_library(fake.host(), launch("mooncake"))).level == "ok"
    assert not list(packages.check_library(host, launch("nixl")))  # NIXL is not installed


def test_missing_npu_driver_in_image_is_a_warning(fake):
    fake.install("memfabric-hybrid", "1.0.5")
    host = fake.host({"memfabric_hybrid": "ImportError: libascend_hal.so"})
    assert single(packages.check_library(host, launch("ascend", image=True))).level == "warning"
    assert single(packages.check_library(host, launch("ascend"))).level == "wrong"


def test_imports_are_tried_in_a_subprocess():
    assert import_error("json") == ""
    assert import_error("there_is_none").startswith("ModuleNotFoundError")


@pytest.mark.parametrize("name", supported_releases())
def test_tested_versions_match_requirements(name):
    tested = load_release(name, with_fingerprints=False).tested
    pins = (ROOT / "scripts/requirements/common.txt").read_text() + "\n"
    setup = (ROOT / "scripts/setup_env.py").read_text()
    pins += re.search(r'DEFAULT_TORCH = "(.+)"', setup)[1]
    pinned = dict(line.split("==") for line in pins.splitlines() if "==" in line)
    for package in ("torch", "nixl", "mooncake"):
        (version,) = {pinned[one] for one in packages.PACKAGES[package] if one in pinned}
        assert version in tested[package]


# The system


def test_low_memlock_limit_is_wrong_only_with_rdma(fake):
    fake.limits()
    assert single(system.check_locked_memory(fake.host(), launch())).level == "ok"
    fake.limits(locked="8388608")
    found = single(system.check_locked_memory(fake.host(), launch()))
    assert (found.level, found.found) == ("warning", "8 MiB")
    fake.rdma("mlx5_0")
    assert single(system.check_locked_memory(fake.host(), launch())).level == "wrong"
    assert single(system.check_locked_memory(fake.host(), launch("ascend"))).level == "warning"


def test_low_open_files_limit_is_a_warning(fake):
    assert not list(system.check_open_files(fake.host()))  # the limit is unknown
    for files, level in (("1048576", "ok"), ("1024", "warning")):
        fake.limits(files=files)
        found = single(system.check_open_files(fake.host()))
        assert (found.level, found.found) == (level, files)


def test_missing_or_small_shared_memory_is_reported(fake, monkeypatch):
    assert single(system.check_shared_memory(fake.host())).level == "wrong"
    for blocks, level in ((1 << 22, "ok"), (1 << 14, "warning")):
        stat = type("Stat", (), {"f_frsize": 4096, "f_blocks": blocks})
        monkeypatch.setattr("os.statvfs", lambda path, stat=stat: stat)
        assert single(system.check_shared_memory(fake.host())).level == level


def test_rdma_devices_and_verbs_are_checked(fake):
    def found():
        return single(system.check_rdma(fake.host(), launch()))

    assert found().level == "warning"
    fake.rdma("mlx5_0", verbs=False)
    assert found().level == "wrong" and "--device /dev/infiniband" in found().advice
    fake.rdma("mlx5_0")
    assert (found().level, found().found) == ("ok", "mlx5_0")
    fake.rdma("mlx5_1", "1: DOWN")
    assert found().level == "warning"
    assert "--disaggregation-ib-device mlx5_0`" in found().advice
    fake.rdma("mlx5_0", "1: DOWN")
    assert found().level == "wrong"
    assert not list(system.check_rdma(fake.host(), launch("ascend")))


def test_npu_devices_and_driver_are_checked(fake):
    def found():
        return levels(system.check_npus(fake.host(), launch("ascend")))

    assert not list(system.check_npus(fake.host(), launch()))
    assert found() == {"NPUs": "wrong", "NPU driver": "wrong"}
    fake.file("/usr/local/Ascend/driver/version.info")
    for number in range(2):
        fake.file(f"/dev/davinci{number}")
    assert found() == {"NPUs": "wrong"}
    for name in system.NPU_NODES:
        fake.file(f"/dev/{name}")
    assert single(system.check_npus(fake.host(), launch("ascend"))) == ok("system", "NPUs", "2")


# Ports


@contextmanager
def listening_port():
    """A port that is in use on all addresses."""
    with socket.create_server(("0.0.0.0", 0)) as one:
        yield one.getsockname()[1]


def free_port() -> int:
    with listening_port() as port:
        return port


def test_ports_in_use_are_wrong():
    with listening_port() as taken:
        found = list(ports.check_ports(launch(port=taken, bootstrap_port=free_port())))
        assert levels(found) == {"server": "wrong", "bootstrap": "ok"}
        assert str(taken) in found[0].found and "--port" in found[0].advice
        found = levels(ports.check_ports(launch(port=free_port(), bootstrap_port=taken)))
        assert found == {"server": "ok", "bootstrap": "wrong"}
        found = ports.check_ports(launch(role="decode", port=free_port(), bootstrap_port=taken))
        assert levels(found) == {"server": "ok"}


def test_memfabric_store_is_opened_by_prefill_and_reached_by_decode(fake):
    def found(role, port, address="127.0.0.1"):
        host = fake.host(ASCEND_MF_STORE_URL=f"tcp://{address}:{port}")
        return single(ports.check_memfabric_ports(host, launch("ascend", role))).level

    fake.install("memfabric-hybrid", "1.1.2")

    with listening_port() as port:
        assert (found("prefill", port), found("decode", port)) == ("wrong", "ok")
    assert (found("prefill", port), found("decode", port)) == ("ok", "warning")
    assert found("prefill", port, "203.0.113.1") == "warning"
    assert ports.bind_error("203.0.113.1", port).errno == errno.EADDRNOTAVAIL
    assert not list(ports.check_memfabric_ports(fake.host(), launch("ascend", "prefill")))


def test_later_memfabric_uses_own_ports_instead_of_store(fake):
    fake.install("memfabric-hybrid", "1.1.3")
    environ = {"ASCEND_MF_STORE_URL": "tcp://203.0.113.1:1"}

    def found(role="decode", **more):
        return list(
            ports.check_memfabric_ports(fake.host(**environ, **more), launch("ascend", role))
        )

    assert found("prefill") == []
    assert single(found()).level == "ok" and "9000 to 65535" in single(found()).found
    environ |= {ascend.FIRST_PORT: "20000", ascend.LAST_PORT: "20000"}
    assert single(found()).level == "ok" and "20000 to 20000" in single(found()).found
    for number in range(2):
        fake.file(f"/dev/davinci{number}")
    assert single(found()).level == "warning" and ascend.LAST_PORT in single(found()).advice
    assert not list(ports.check_memfabric_ports(fake.host(**environ), launch("nixl", "decode")))


# The environment


@pytest.fixture
def engine(tmp_path) -> Path:
    """An engine that reads four variables."""
    write(
        tmp_path / "engine/srt/environ.py",
        "class Envs:\n"
        "    SGLANG_DISAGGREGATION_QUEUE_SIZE = EnvInt(4)\n"
        "    SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL = EnvFloat(5.0)\n"
        "    SGLANG_MOONCAKE_SEND_AUX_TCP = EnvBool(False)\n"
        "    SGLANG_DISAGGREGATION_NIXL_BACKEND = EnvStr('UCX')\n"
        "OTHER = 1\n",
    )
    return tmp_path / "engine"


def check_variables(fake, environ, backend="nixl", engine=Path(), patched=True, nodes=1) -> list:
    return environment.check_environment(
        fake.host(**environ), launch(backend, nodes=nodes), engine, patched
    )


@pytest.mark.parametrize(
    ("name", "value", "level"),
    [
        ("SGLANG_DISAGGREGATION_QUEUE_SIZE", "8", "ok"),
        ("SGLANG_DISAGGREGATION_QUEUE_SIZE", "8.5", "wrong"),
        ("SGLANG_DISAGGREGATION_QUEUE_SIZES", "8", "warning"),
        ("SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL", "0.5", "ok"),
        ("SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL", "5s", "wrong"),
        ("SGLANG_MOONCAKE_SEND_AUX_TCP", "yes", "ok"),
        ("SGLANG_MOONCAKE_SEND_AUX_TCP", "on", "wrong"),
        ("SGLANG_DISAGGREGATION_NIXL_BACKEND", "UCX", "ok"),
        ("SGLANG_DISAGGREGATION_NIXL_BACKEND", "LIBFABRIC", "warning"),
        ("ASCEND_USE_FIA", "1", "ok"),
        ("ASCEND_USE_FIA", "False", "ok"),
        ("ASCEND_USE_FIA", "yes", "wrong"),
        ("SGLANG_PD_VERIFY", "1", "ok"),
        ("SGLANG_PD_VERIFY", "on", "wrong"),
        ("SGLANG_PD_PACKED", "0", "ok"),
        ("SGLANG_PD_PACKED", "yes", "wrong"),
        ("SGLANG_PD_PACKING_MIB", "0.5", "ok"),
        ("SGLANG_PD_PACKING_MIB", "64M", "wrong"),
        ("SGLANG_PD_PACKING_MIB", "-1", "wrong"),
        ("SGLANG_PD_CPU_HOST", "1", "wrong"),
        ("UCX_NET_DEVICES", "mlx5_0:1", "ok"),
        ("UCX_NET_DEVICES", "mlx5_0:1,mlx5_7:1", "wrong"),
        ("UCX_TLS", "rc,cuda_copy", "ok"),
        ("UCX_TLS", "self,sm", "warning"),
        ("NIXL_PLUGIN_DIR", "/nowhere", "wrong"),
        ("SGLANG_HOST_IP", "10.0.0.1", "ok"),
        ("SGLANG_HOST_IP", "127.0.0.1", "warning"),
        ("SGLANG_HOST_IP", "gpu-7", "ok"),
        ("http_proxy", "http://proxy:3128", "warning"),
    ],
)
def test_environment_variables_are_validated(fake, engine, name, value, level):
    fake.rdma("mlx5_0")
    found = check_variables(fake, {name: value}, engine=engine)
    assert levels(found) == {name: level}
    assert level == "ok" or single(found).advice


STORE_URL, FIRST, LAST = ascend.STORE_URL, ascend.FIRST_PORT, ascend.LAST_PORT


@pytest.mark.parametrize(
    ("memfabric", "url", "level"),
    [
        ("", None, "wrong"),
        ("", "10.0.0.1:24667", "wrong"),
        ("", "tcp://10.0.0.1", "wrong"),
        ("", "tcp://10.0.0.1:port", "wrong"),
        ("", "tcp://127.0.0.1:24667", "warning"),
        ("", "tcp://10.0.0.1:24667", "ok"),
        ("1.1.2", "tcp://prefill-0:24667", "wrong"),
        ("1.1.2", "", "wrong"),
        ("1.1.3", "tcp://prefill-0:24667", "ok"),
        ("1.3.0", "tcp://127.0.0.1:24667", "ok"),
        ("1.3.0", "", "ok"),
        ("1.3.0", None, "wrong"),
    ],
)
def test_ascend_needs_memfabric_store_url_even_if_unused(fake, memfabric, url, level):
    if memfabric:
        fake.install("memfabric-hybrid", memfabric)
    environ = {} if url is None else {STORE_URL: url}
    found = check_variables(fake, environ, "ascend")
    assert levels(found) == {STORE_URL: level}
    assert level == "wrong" or memfabric in single(found).found
    assert levels(check_variables(fake, environ)) == dict.fromkeys(environ, "ok")


def test_memfabric_store_variable_is_not_read_by_engine(fake):
    found = check_variables(fake, {"MF_CONFIG_STORE_URL": "tcp://10.0.0.1:24667"}, "ascend")
    assert levels(found) == {STORE_URL: "wrong", "MF_CONFIG_STORE_URL": "ok"}
    assert "ASCEND_MF_STORE_URL=$MF_CONFIG_STORE_URL" in found[0].advice


@pytest.mark.parametrize(
    ("memfabric", "environ", "expected"),
    [
        ("1.3.0", {FIRST: "20000", LAST: "20063"}, {FIRST: "ok"}),
        ("1.3.0", {FIRST: "20000"}, {FIRST: "ok"}),
        ("1.3.0", {FIRST: "20063", LAST: "20000"}, {"MemFabric's ports": "warning"}),
        ("1.3.0", {FIRST: "many", LAST: "20000"}, {FIRST: "warning"}),
        ("1.3.0", {FIRST: "80", LAST: "90"}, {FIRST: "wrong"}),
        ("1.0.8", {FIRST: "20000", LAST: "20063"}, {FIRST: "warning"}),
        ("1.3.0", {ascend.PROTOCOL: "DEVICE_RDMA"}, {ascend.PROTOCOL: "ok"}),
        ("1.3.0", {ascend.PROTOCOL: "rdma"}, {ascend.PROTOCOL: "warning"}),
        # MemFabric requires an IP address.
        ("1.3.0", {"SGLANG_HOST_IP": "npu-7"}, {"SGLANG_HOST_IP": "wrong"}),
        ("1.3.0", {"SGLANG_HOST_IP": "localhost"}, {"SGLANG_HOST_IP": "wrong"}),
        ("1.3.0", {"SGLANG_HOST_IP": "10.0.0.1"}, {"SGLANG_HOST_IP": "ok"}),
        ("1.3.0", {"SGLANG_HOST_IP": "fd00::7"}, {"SGLANG_HOST_IP": "ok"}),
        ("1.3.0", {"HOST_IP": "npu-7"}, {"HOST_IP": "wrong"}),
        (
            "1.3.0",
            {"SGLANG_HOST_IP": "10.0.0.1", "HOST_IP": "npu-7"},
            {"SGLANG_HOST_IP": "ok", "HOST_IP": "ok"},
        ),
    ],
)
def test_variables_of_ascend_are_validated(fake, memfabric, environ, expected):
    fake.install("memfabric-hybrid", memfabric)
    environ = {STORE_URL: "tcp://10.0.0.1:24667", **environ}
    assert expected.items() <= levels(check_variables(fake, environ, "ascend")).items()


@pytest.mark.parametrize(
    ("backend", "nodes", "environ", "expected"),
    [
        ("ascend", 1, {}, {}),
        ("ascend", 2, {}, {"GLOO": "warning", "HCCL": "warning"}),
        ("nixl", 2, {}, {"GLOO": "warning"}),
        ("ascend", 2, {"GLOO": "eth0", "HCCL": "eth"}, {"GLOO": "ok", "HCCL": "ok"}),
        ("ascend", 2, {"GLOO": "eth", "HCCL": "=eth0"}, {"GLOO": "wrong", "HCCL": "ok"}),
        ("ascend", 1, {"GLOO": "eth0", "HCCL": "^docker"}, {"GLOO": "ok", "HCCL": "ok"}),
        ("ascend", 1, {"GLOO": "eth0", "HCCL": "=eth"}, {"GLOO": "ok", "HCCL": "wrong"}),
        ("ascend", 1, {"GLOO": "ib0", "HCCL": "ib0"}, {"GLOO": "wrong", "HCCL": "wrong"}),
    ],
)
def test_multi_node_server_needs_network_interface(fake, backend, nodes, environ, expected):
    fake.file("/sys/class/net/eth0/address")
    fake.file("/sys/class/net/lo/address")

    environ = {f"{name}_SOCKET_IFNAME": value for name, value in environ.items()}
    found = levels(check_variables(fake, environ, backend, nodes=nodes))
    found.pop(STORE_URL, None)
    assert found == {f"{name}_SOCKET_IFNAME": level for name, level in expected.items()}


def test_mooncake_variables_are_checked_only_with_mooncake(fake):
    environ = {"MC_FORCE_TCP": "0", "MC_GID_INDEX": "three", "MC_IB_PORT": "1"}
    found = levels(check_variables(fake, environ, "mooncake"))
    assert found == {"MC_FORCE_TCP": "warning", "MC_GID_INDEX": "wrong", "MC_IB_PORT": "ok"}
    assert levels(check_variables(fake, environ)) == dict.fromkeys(environ, "ok")


def test_no_proxy_silences_proxy_warning(fake):
    environ = {"http_proxy": "http://proxy:3128", "no_proxy": "10.0.0.0/8"}
    assert check_variables(fake, environ) == []


def test_verify_variable_on_stock_engine_is_wrong(fake):
    found = single(check_variables(fake, {"SGLANG_PD_VERIFY": "1"}, patched=False))
    assert (found.level, "sglang-pd apply" in found.advice) == ("wrong", True)


@pytest.mark.engine
def test_variables_of_published_engine_are_parsed(published):
    known = environment.engine_variables(published / "sglang")
    assert known["SGLANG_DISAGGREGATION_WAITING_TIMEOUT"] == "EnvInt"
    assert known["SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL"] == "EnvFloat"
    assert known["SGLANG_DISAGGREGATION_NIXL_BACKEND"] == "EnvStr"


# Servers

PREFILL = {
    "disaggregation_mode": "prefill",
    "disaggregation_transfer_backend": "nixl",
    "version": VERSION,
    "model_path": "/models/qwen",
    "page_size": 16,
    "kv_cache_dtype": "auto",
    "tp_size": 4,
    "internal_states": [{}],
}
DECODE = {**PREFILL, "disaggregation_mode": "decode", "tp_size": 2}


@contextmanager
def http_server(answers, api_key=""):
    """An HTTP server with these answers, by path and query; yields its URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            status, body = answers.get(self.path, (404, None))
            if api_key and self.headers["Authorization"] != f"Bearer {api_key}":
                status, body = 401, None
            self.send_response(status)
            self.end_headers()
            text = body if self.path == "/metrics" else json.dumps(body)
            self.wfile.write((text or "").encode())

        def log_message(self, *args):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


OLD_ROUTE = "/route?engine_rank=-1&target_dp_group=-1&target_pp_rank=-1"
NEW_ROUTE = "/route?prefill_dp_rank=0&prefill_cp_rank=0&target_tp_rank=0&target_pp_rank=0"
BOOTSTRAPS = {
    "0.5.9, patched": ({OLD_ROUTE: (200, {"takes_aborts": True})}, "ok"),
    "0.5.9, stock": ({OLD_ROUTE: (200, {"prefill_pp_size": 1})}, "warning"),
    "0.5.23, patched": ({OLD_ROUTE: (400, ""), NEW_ROUTE: (200, {"reads_layouts": True})}, "ok"),
    "0.5.23, stock": ({OLD_ROUTE: (400, ""), NEW_ROUTE: (200, {"rank_ip": ""})}, "warning"),
    "another server": ({}, "wrong"),
}


# TP 8 with DP attention of 2, as each release reports it at /server_info.
OLD_GROUPS = {"tp_size": 8, "dp_size": 2, "enable_dp_attention": True}
NEW_GROUPS = {"tp_size": 8, "dp_size": 1, "attn_dp_size": 2, "enable_dp_attention": True}


@pytest.fixture
def examine_servers(toy):
    """A function that returns findings on servers that differ from PREFILL and DECODE in values."""

    def examine(backend="nixl", prefill=None, decode=None, bootstrap="0.5.9, patched"):
        with http_server(BOOTSTRAPS[bootstrap][0]) as bootstrap_url:
            port = int(bootstrap_url.split(":")[-1])
            first = {**PREFILL, "disaggregation_bootstrap_port": port, **(prefill or {})}
            last = {**DECODE, **(decode or {})}
            with (
                http_server({"/server_info": (200, first)}) as one,
                http_server({"/get_server_info": (200, last)}) as two,
            ):
                return check_servers([one, two + "/"], backend, toy.release())

    return examine


METRICS = """\
# TYPE sglang_pd_rooms gauge
sglang_pd_rooms{side="decode",state="waiting"} 0.0
# TYPE sglang_pd_failures_last_hour gauge
sglang_pd_failures_last_hour{side="decode",peer="10.0.0.1:8998",reason="peer_lost"} 3.0
sglang_pd_failures_last_hour{side="decode",peer="10.0.0.1:8998",reason="aborted_by_client"} 7.0
"""


def check_servers(urls, backend, release) -> list:
    with httpx.Client(trust_env=False) as client:
        return list(servers.check_servers(client, urls, launch(backend), release))


def test_compatible_servers_are_ok(examine_servers):
    found = examine_servers()
    assert [one.level for one in found] == ["ok"] * 4
    assert "TP 4, PP 1" in found[0].found
    assert "patched" in found[1].found
    assert found[3].found == "compatible"


@pytest.mark.parametrize("bootstrap", BOOTSTRAPS)
def test_bootstrap_server_of_prefill_is_checked(examine_servers, bootstrap):
    found = {one.name.split()[0]: one.level for one in examine_servers(bootstrap=bootstrap)}
    assert found["bootstrap"] == BOOTSTRAPS[bootstrap][1]


@pytest.mark.parametrize(
    ("prefill", "decode", "level", "said"),
    [
        ({"page_size": 64}, {}, "wrong", "--page-size: 64 and 16"),
        ({}, {"kv_cache_dtype": "fp8_e4m3"}, "wrong", "--kv-cache-dtype: auto and fp8_e4m3"),
        ({"tp_size": 3}, {}, "wrong", "attention TP: 3 and 2"),
        ({**OLD_GROUPS, "tp_size": 6}, {}, "wrong", "attention TP: 3 and 2"),
        ({**NEW_GROUPS, "tp_size": 6}, {}, "wrong", "attention TP: 3 and 2"),
        ({"pp_size": 4}, {"pp_size": 2}, "wrong", "PP: 4 and 2"),
        ({}, {"version": "1.0"}, "warning", f"version: {VERSION} and 1.0"),
        ({}, {"model_path": "/other/llama"}, "warning", "model: qwen and llama"),
        ({}, {"speculative_algorithm": "EAGLE"}, "warning", "draft model: None and EAGLE"),
    ],
)
def test_incompatible_servers_are_reported(examine_servers, prefill, decode, level, said):
    found = examine_servers(prefill=prefill, decode=decode)
    pair = [one for one in found if " and http" in one.name]
    assert [(one.level, said in one.found) for one in pair if one.level != "ok"] == [(level, True)]
    assert (level == "wrong") != any(one.found == "compatible" for one in pair)


def test_different_but_compatible_sizes_are_ok(examine_servers):
    sizes = {**OLD_GROUPS, "pp_size": 4}
    found = examine_servers(prefill=sizes, decode={"model_path": "elsewhere/qwen"})
    assert {one.level for one in found} == {"ok"}
    assert "attention TP 4" in found[0].found


@pytest.mark.parametrize(
    ("sizes", "attention_tp"),
    [
        (OLD_GROUPS, 4),
        (NEW_GROUPS, 4),
        ({**NEW_GROUPS, "attn_cp_size": 2}, 2),
        ({"tp_size": 8, "dp_size": 2, "attn_dp_size": 1}, 8),
    ],
)
def test_attention_tp_of_each_release(examine_servers, sizes, attention_tp):
    assert f"attention TP {attention_tp}" in examine_servers(prefill=sizes)[0].found


def test_server_unlike_this_host_is_reported(examine_servers):
    found = examine_servers(backend="mooncake", prefill={"version": "1.0"})
    of_prefill = [one.level for one in found if one.name.startswith("prefill")]
    assert of_prefill == ["ok", "warning", "wrong"]
    null = examine_servers(decode={"disaggregation_mode": "null"})
    assert null[-1].level == "wrong" and "--disaggregation-mode" in null[-1].advice


@pytest.mark.parametrize(
    ("metrics", "expected"),
    [
        (METRICS, [("ok", "7 aborted_by_client"), ("warning", "3 peer_lost")]),
        (METRICS.split("# TYPE sglang_pd_failures")[0], [("ok", "no request failed")]),
        ("# TYPE sglang_num_requests gauge\nsglang_num_requests 1.0\n", []),  # a stock engine
        ("no metrics", []),
    ],
)
def test_failures_of_the_last_hour_are_reported(toy, metrics, expected):
    with http_server({"/server_info": (200, DECODE), "/metrics": (200, metrics)}) as url:
        _, *found = check_servers([url], "nixl", toy.release())
    assert [one.level for one in found] == [level for level, _ in expected]
    assert all(text in one.found for one, (_, text) in zip(found, expected))


@pytest.mark.parametrize("answer", [(500, {}), (200, []), (200, {"tp_size": "two"})])
def test_non_sglang_server_is_wrong(toy, answer):
    with http_server({"/server_info": answer}) as url:
        found = single(check_servers([url], "nixl", toy.release()))
    assert (found.level, "no answer" in found.found) == ("wrong", True)
    for gone in (url, "no url"):
        assert single(check_servers([gone], "nixl", toy.release())).level == "wrong"


# The whole command


def test_image_skips_host_checks(toy, fake):
    found = list(run_checks(toy.engine(), toy.release(), fake.host(), launch(image=True)))
    assert {one.group for one in found} == {"engine", "packages"}
    found = list(run_checks(toy.engine(), toy.release(), fake.host(), launch("ascend")))
    assert {one.group for one in found} == {"engine", "packages", "system", "ports", "environment"}


@pytest.fixture
def doctor(toy, call):
    """A function that runs `doctor --image` on the toy with NIXL; returns exit code and stdout."""
    install_package(toy.site, "torch", "2.13.0")
    install_package(toy.site, "nixl", "1.5.1")
    return lambda *words: call("doctor", "--backend", "nixl", "--image", *words)[:2]


def test_exit_code_reflects_findings(doctor, toy):
    code, text = doctor()
    assert code == ExitCode.HOST_PROBLEM
    assert "wrong: patches: absent: run `sglang-pd apply`" in text
    toy.apply()
    code, text = doctor()
    assert (code, "0 wrong" in text, "2 applied" in text) == (0, True, True)


def test_findings_as_json(doctor):
    code, text = doctor("--json", "--role", "decode")
    report = json.loads(text)
    assert (code, report["wrong"], report["warnings"]) == (ExitCode.HOST_PROBLEM, 1, 2)
    assert report["launch"] == {"role": "decode", "backend": "nixl"}
    assert report["findings"][1] == {
        "group": "engine",
        "name": "patches",
        "level": "wrong",
        "found": "absent",
        "advice": "run `sglang-pd apply`",
    }


def test_running_servers_are_checked(doctor, toy):
    toy.apply()
    with http_server({"/server_info": (200, DECODE)}) as url:
        code, text = doctor("--url", url)
    assert (code, f"decode {url}" in text.replace("\n", "")) == (0, True)
    code, text = doctor("--url", url)
    assert (code, "no answer" in text) == (ExitCode.HOST_PROBLEM, True)


def test_doctor_sends_api_key(doctor, toy):
    toy.apply()
    with http_server({"/server_info": (200, DECODE)}, api_key="secret") as url:
        codes = [doctor("--url", url, *key)[0] for key in ((), ("--api-key", "secret"))]
    assert codes == [ExitCode.HOST_PROBLEM, 0]


def test_ports_are_not_checked_with_running_servers(toy, fake):
    asked = [
        run_checks(toy.engine(), toy.release(), fake.host(), launch(), urls)
        for urls in ((), ("http://127.0.0.1:9",))
    ]
    groups = [{one.group for one in found} for found in asked]
    assert groups[0] - groups[1] == {"ports"} and "servers" in groups[1]
