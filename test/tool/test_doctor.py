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
from toy import ROOT, VERSION, write
from typer.testing import CliRunner

from sglang_pd.cli import app
from sglang_pd.doctor import ascend, environment, packages, ports, servers, system
from sglang_pd.doctor.engine import check_engine, check_patches
from sglang_pd.doctor.findings import ok
from sglang_pd.doctor.host import Host, LaunchOptions, import_error
from sglang_pd.doctor.run_checks import run_checks
from sglang_pd.errors import ExitCode
from sglang_pd.install import operations
from sglang_pd.patchset import patches
from sglang_pd.patchset.patches import supported_releases

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
            info = tmp_path / "site" / f"{name}-{version}.dist-info"
            write(info / "METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")

        def rdma(self, name, state="4: ACTIVE", verbs=True) -> None:
            self.file(f"/sys/class/infiniband/{name}/ports/1/state", state)
            if verbs:
                self.file("/dev/infiniband/uverbs0")

    return Fake()


# The engine


def test_stock_engine_is_wrong_and_patched_is_ok(toy):
    status = operations.status(toy.engine(), toy.release())
    found = single(check_patches(status))
    assert (found.level, found.found) == ("wrong", "absent") and "sglang-pd apply" in found.advice
    operations.apply(toy.engine(), toy.release())
    found = single(check_patches(operations.status(toy.engine(), toy.release())))
    assert (found.level, found.found) == ("ok", "2 applied")


def test_edited_file_is_reported(toy):
    operations.apply(toy.engine(), toy.release())
    write(toy.root / "srt/net/conn.py", "theirs = 1\n")
    found = list(check_patches(operations.status(toy.engine(), toy.release())))
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
    tested = patches.load_release(name, with_fingerprints=False).tested
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
        ("SGLANG_PD_CPU_HOST", "1", "wrong"),
        ("UCX_NET_DEVICES", "mlx5_0:1", "ok"),
        ("UCX_NET_DEVICES", "mlx5_0:1,mlx5_7:1", "wrong"),
        ("UCX_TLS", "rc,cuda_copy", "ok"),
        ("UCX_TLS", "self,sm", "warning"),
        ("NIXL_PLUGIN_DIR", "/nowhere", "wrong"),
        ("SGLANG_HOST_IP", "10.0.0.1", "ok"),
        ("SGLANG_HOST_IP", "127.0.0.1", "warning"),
        ("http_proxy", "http://proxy:3128", "warning"),
    ],
)
def test_environment_variables_are_validated(fake, engine, name, value, level):
    fake.rdma("mlx5_0")
    found = environment.check_environment(fake.host(**{name: value}), launch(), engine, True)
    assert levels(found) == {name: level}
    assert level == "ok" or single(found).advice


@pytest.mark.parametrize(
    ("environ", "level"),
    [
        ({}, "wrong"),
        ({"ASCEND_MF_STORE_URL": "10.0.0.1:24667"}, "wrong"),
        ({"ASCEND_MF_STORE_URL": "tcp://10.0.0.1"}, "wrong"),
        ({"ASCEND_MF_STORE_URL": "tcp://10.0.0.1:port"}, "wrong"),
        ({"ASCEND_MF_STORE_URL": "tcp://127.0.0.1:24667"}, "warning"),
        ({"ASCEND_MF_STORE_URL": "tcp://10.0.0.1:24667"}, "ok"),
    ],
)
def test_ascend_needs_memfabric_store_url(fake, engine, environ, level):
    host = fake.host(**environ)
    found = environment.check_environment(host, launch("ascend"), engine, True)
    assert levels(found) == {"ASCEND_MF_STORE_URL": level}
    found = levels(environment.check_environment(host, launch(), engine, True))
    assert found == dict.fromkeys(environ, "ok")


@pytest.mark.parametrize(
    ("release", "url", "level"),
    [
        ("1.1.2", "tcp://prefill-0:24667", "wrong"),
        ("1.1.2", "", "wrong"),
        ("1.1.3", "tcp://prefill-0:24667", "ok"),
        ("1.3.0", "tcp://127.0.0.1:24667", "ok"),
        ("1.3.0", "", "ok"),
        ("1.3.0", None, "wrong"),
    ],
)
def test_store_url_must_be_set_even_if_unused(fake, release, url, level):
    fake.install("memfabric-hybrid", release)
    host = fake.host(**({} if url is None else {"ASCEND_MF_STORE_URL": url}))
    found = environment.check_environment(host, launch("ascend"), Path(), True)
    assert levels(found) == {"ASCEND_MF_STORE_URL": level}
    assert level == "wrong" or release in single(found).found


def test_memfabric_store_variable_is_not_read_by_engine(fake):
    host = fake.host(MF_CONFIG_STORE_URL="tcp://10.0.0.1:24667")
    found = environment.check_environment(host, launch("ascend"), Path(), True)
    assert levels(found) == {"ASCEND_MF_STORE_URL": "wrong", "MF_CONFIG_STORE_URL": "ok"}
    assert "ASCEND_MF_STORE_URL=$MF_CONFIG_STORE_URL" in found[0].advice


@pytest.mark.parametrize(
    ("release", "first", "last", "expected"),
    [
        ("1.3.0", "20000", "20063", {"MF_CONFIG_STORE_PORT_START": "ok"}),
        ("1.3.0", "20000", None, {"MF_CONFIG_STORE_PORT_START": "ok"}),
        ("1.3.0", "20063", "20000", {"MemFabric's ports": "warning"}),
        ("1.3.0", "many", "20000", {"MF_CONFIG_STORE_PORT_START": "warning"}),
        ("1.3.0", "80", "90", {"MF_CONFIG_STORE_PORT_START": "wrong"}),
        ("1.0.8", "20000", "20063", {"MF_CONFIG_STORE_PORT_START": "warning"}),
    ],
)
def test_memfabric_port_range_is_validated(fake, release, first, last, expected):
    fake.install("memfabric-hybrid", release)
    environ = {"MF_CONFIG_STORE_PORT_START": first, "MF_CONFIG_STORE_PORT_END": last}
    environ = {name: value for name, value in environ.items() if value is not None}
    host = fake.host(ASCEND_MF_STORE_URL="tcp://10.0.0.1:24667", **environ)
    found = levels(environment.check_environment(host, launch("ascend"), Path(), True))
    assert expected.items() <= found.items()


@pytest.mark.parametrize(
    ("backend", "environ", "expected"),
    [
        ("ascend", {"SGLANG_HOST_IP": "npu-7"}, {"SGLANG_HOST_IP": "wrong"}),
        ("ascend", {"SGLANG_HOST_IP": "localhost"}, {"SGLANG_HOST_IP": "wrong"}),
        ("ascend", {"SGLANG_HOST_IP": "10.0.0.1"}, {"SGLANG_HOST_IP": "ok"}),
        ("ascend", {"SGLANG_HOST_IP": "fd00::7"}, {"SGLANG_HOST_IP": "ok"}),
        ("ascend", {"HOST_IP": "npu-7"}, {"HOST_IP": "wrong"}),
        (
            "ascend",
            {"SGLANG_HOST_IP": "10.0.0.1", "HOST_IP": "npu-7"},
            {"SGLANG_HOST_IP": "ok", "HOST_IP": "ok"},
        ),
        ("nixl", {"SGLANG_HOST_IP": "gpu-7"}, {"SGLANG_HOST_IP": "ok"}),
    ],
)
def test_memfabric_requires_ip_address(fake, backend, environ, expected):
    host = fake.host(**environ)
    found = environment.check_environment(host, launch(backend), Path(), True)
    assert expected.items() <= levels(found).items()


@pytest.mark.parametrize(
    ("backend", "nodes", "environ", "expected"),
    [
        ("ascend", 1, {}, {}),
        (
            "ascend",
            2,
            {},
            {"GLOO_SOCKET_IFNAME": "warning", "HCCL_SOCKET_IFNAME": "warning"},
        ),
        ("nixl", 2, {}, {"GLOO_SOCKET_IFNAME": "warning"}),
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

    def named(values):
        return {name.removesuffix("_SOCKET_IFNAME"): value for name, value in values.items()}

    host = fake.host(**{f"{name}_SOCKET_IFNAME": value for name, value in environ.items()})
    found = levels(environment.check_environment(host, launch(backend, nodes=nodes), Path(), True))
    found.pop("ASCEND_MF_STORE_URL", None)
    assert named(found) == named(expected)


def test_unsupported_memfabric_protocol_is_a_warning(fake):
    for value, expected in (("DEVICE_RDMA", "ok"), ("rdma", "warning")):
        environ = {"ASCEND_MF_STORE_URL": "tcp://10.0.0.1:1", ascend.PROTOCOL: value}
        found = environment.check_environment(fake.host(**environ), launch("ascend"), Path(), True)
        assert levels(found)[ascend.PROTOCOL] == expected


def test_mooncake_variables_are_checked_only_with_mooncake(fake):
    environ = {"MC_FORCE_TCP": "0", "MC_GID_INDEX": "three", "MC_IB_PORT": "1"}
    host = fake.host(**environ)
    found = levels(environment.check_environment(host, launch("mooncake"), Path(), True))
    assert found == {"MC_FORCE_TCP": "warning", "MC_GID_INDEX": "wrong", "MC_IB_PORT": "ok"}
    found = levels(environment.check_environment(host, launch(), Path(), True))
    assert found == dict.fromkeys(environ, "ok")


def test_no_proxy_silences_proxy_warning(fake):
    host = fake.host(http_proxy="http://proxy:3128", no_proxy="10.0.0.0/8")
    assert not environment.check_environment(host, launch(), Path(), True)


def test_verify_variable_on_stock_engine_is_wrong(fake):
    host = fake.host(SGLANG_PD_VERIFY="1")
    found = single(environment.check_environment(host, launch(), Path(), False))
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
            self.wfile.write(json.dumps(body).encode())

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


def examine_servers(release, backend="nixl", prefill=None, decode=None, bootstrap="0.5.9, patched"):
    """The findings on servers that differ from PREFILL and DECODE in these values."""
    with http_server(BOOTSTRAPS[bootstrap][0]) as bootstrap_url:
        port = int(bootstrap_url.split(":")[-1])
        first = {**PREFILL, "disaggregation_bootstrap_port": port, **(prefill or {})}
        last = {**DECODE, **(decode or {})}
        with (
            http_server({"/server_info": (200, first)}) as one,
            http_server({"/get_server_info": (200, last)}) as two,
            httpx.Client(trust_env=False) as client,
        ):
            return list(servers.check_servers(client, [one, two + "/"], launch(backend), release))


def test_compatible_servers_are_ok(toy):
    found = examine_servers(toy.release())
    assert [one.level for one in found] == ["ok"] * 4
    assert "TP 4, PP 1" in found[0].found
    assert "patched" in found[1].found
    assert found[3].found == "compatible"


@pytest.mark.parametrize("bootstrap", BOOTSTRAPS)
def test_bootstrap_server_of_prefill_is_checked(toy, bootstrap):
    found = {
        one.name.split()[0]: one.level
        for one in examine_servers(toy.release(), bootstrap=bootstrap)
    }
    assert found["bootstrap"] == BOOTSTRAPS[bootstrap][1]


@pytest.mark.parametrize(
    ("prefill", "decode", "level", "said"),
    [
        ({"page_size": 64}, {}, "wrong", "--page-size: 64 and 16"),
        ({}, {"kv_cache_dtype": "fp8_e4m3"}, "wrong", "--kv-cache-dtype: auto and fp8_e4m3"),
        ({"tp_size": 3}, {}, "wrong", "attention TP: 3 and 2"),
        ({"tp_size": 6, "dp_size": 2, "enable_dp_attention": True}, {}, "wrong", "3 and 2"),
        ({"pp_size": 4}, {"pp_size": 2}, "wrong", "PP: 4 and 2"),
        ({}, {"version": "1.0"}, "warning", f"version: {VERSION} and 1.0"),
        ({}, {"model_path": "/other/llama"}, "warning", "model: qwen and llama"),
        ({}, {"speculative_algorithm": "EAGLE"}, "warning", "draft model: None and EAGLE"),
    ],
)
def test_incompatible_servers_are_reported(toy, prefill, decode, level, said):
    found = examine_servers(toy.release(), prefill=prefill, decode=decode)
    pair = [one for one in found if " and http" in one.name]
    assert [(one.level, said in one.found) for one in pair if one.level != "ok"] == [(level, True)]
    assert (level == "wrong") != any(one.found == "compatible" for one in pair)


def test_different_but_compatible_sizes_are_ok(toy):
    sizes = {"tp_size": 8, "dp_size": 2, "enable_dp_attention": True, "pp_size": 4}
    found = examine_servers(toy.release(), prefill=sizes, decode={"model_path": "elsewhere/qwen"})
    assert {one.level for one in found} == {"ok"}
    assert "attention TP 4" in found[0].found


# TP 8 with DP attention of 2, as each release reports it at /server_info.
OLD_GROUPS = {"tp_size": 8, "dp_size": 2, "enable_dp_attention": True}
NEW_GROUPS = {"tp_size": 8, "dp_size": 1, "attn_dp_size": 2, "enable_dp_attention": True}


@pytest.mark.parametrize(
    ("sizes", "attention_tp"),
    [
        (OLD_GROUPS, 4),
        (NEW_GROUPS, 4),
        ({**NEW_GROUPS, "attn_cp_size": 2}, 2),
        ({"tp_size": 8, "dp_size": 2, "attn_dp_size": 1}, 8),
    ],
)
def test_attention_tp_of_each_release(toy, sizes, attention_tp):
    found = examine_servers(toy.release(), prefill=sizes)
    assert f"attention TP {attention_tp}" in found[0].found


def test_incompatible_dp_attention_sizes_on_later_release(toy):
    found = examine_servers(toy.release(), prefill={**NEW_GROUPS, "tp_size": 6})
    assert "attention TP: 3 and 2" in [one.found for one in found]


def test_server_unlike_this_host_is_reported(toy):
    found = examine_servers(toy.release(), backend="mooncake", prefill={"version": "1.0"})
    assert [one.level for one in found if one.name.startswith("prefill")] == [
        "ok",
        "warning",
        "wrong",
    ]
    null = examine_servers(toy.release(), decode={"disaggregation_mode": "null"})
    assert null[-1].level == "wrong" and "--disaggregation-mode" in null[-1].advice


@pytest.mark.parametrize("answer", [(500, {}), (200, []), (200, {"tp_size": "two"})])
def test_non_sglang_server_is_wrong(toy, answer):
    with http_server({"/server_info": answer}) as url, httpx.Client(trust_env=False) as client:
        found = single(servers.check_servers(client, [url], launch(), toy.release()))
    assert (found.level, "no answer" in found.found) == ("wrong", True)
    with httpx.Client(trust_env=False) as client:
        for gone in (url, "no url"):
            assert single(servers.check_servers(client, [gone], launch(), toy.release())).level == (
                "wrong"
            )


# The whole command


def test_image_skips_host_checks(toy, fake):
    found = list(run_checks(toy.engine(), toy.release(), fake.host(), launch(image=True)))
    assert {one.group for one in found} == {"engine", "packages"}
    found = list(run_checks(toy.engine(), toy.release(), fake.host(), launch("ascend")))
    assert {one.group for one in found} == {"engine", "packages", "system", "ports", "environment"}


@pytest.fixture
def call(toy, monkeypatch):
    """A function that runs `doctor --image` on the toy with NIXL; returns exit code and stdout."""
    monkeypatch.setattr(patches, "RELEASES", toy.releases)
    monkeypatch.setattr(patches, "TREES", toy.trees)
    for name, version in (("torch", "2.13.0"), ("nixl", "1.5.1")):
        info = toy.site / f"{name}-{version}.dist-info"
        write(info / "METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")

    def run(*words):
        command = ["doctor", "--engine", str(toy.site), "--backend", "nixl", "--image", *words]
        got = CliRunner().invoke(app, command)
        return got.exit_code, got.stdout

    return run


def test_exit_code_reflects_findings(call, toy):
    code, text = call()
    assert (code, "wrong: patches: absent: run `sglang-pd apply`" in text) == (
        ExitCode.HOST_PROBLEM,
        True,
    )
    operations.apply(toy.engine(), toy.release())
    code, text = call()
    assert (code, "0 wrong" in text, "2 applied" in text) == (0, True, True)


def test_findings_as_json(call):
    code, text = call("--json", "--role", "decode")
    told = json.loads(text)
    assert (code, told["wrong"], told["warnings"]) == (ExitCode.HOST_PROBLEM, 1, 2)
    assert told["launch"] == {"role": "decode", "backend": "nixl"}
    assert told["findings"][1] == {
        "group": "engine",
        "name": "patches",
        "level": "wrong",
        "found": "absent",
        "advice": "run `sglang-pd apply`",
    }


def test_running_servers_are_checked(call, toy):
    operations.apply(toy.engine(), toy.release())
    with http_server({"/server_info": (200, DECODE)}) as url:
        code, text = call("--url", url)
    assert (code, f"decode {url}" in text.replace("\n", "")) == (0, True)
    code, text = call("--url", url)
    assert (code, "no answer" in text) == (ExitCode.HOST_PROBLEM, True)


def test_doctor_sends_api_key(call, toy):
    operations.apply(toy.engine(), toy.release())
    with http_server({"/server_info": (200, DECODE)}, api_key="secret") as url:
        codes = [call("--url", url, *key)[0] for key in ((), ("--api-key", "secret"))]
    assert codes == [ExitCode.HOST_PROBLEM, 0]


def test_ports_are_not_checked_with_running_servers(toy, fake):
    asked = [
        run_checks(toy.engine(), toy.release(), fake.host(), launch(), urls)
        for urls in ((), ("http://127.0.0.1:9",))
    ]
    groups = [{one.group for one in found} for found in asked]
    assert groups[0] - groups[1] == {"ports"} and "servers" in groups[1]
