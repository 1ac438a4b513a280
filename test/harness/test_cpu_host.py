"""The CPU host is off by default, refuses a real torch_npu, and replaces missing parts only."""

import importlib
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from pd_harness.cpu_host import SWITCH, thread_binding
from pd_harness.cpu_host.import_hooks import after_import

PACKAGE = Path(__file__).resolve().parents[2] / "python"
ON = {SWITCH: "1"}
PRINT_BINDING = "import os; print(os.environ['SGLANG_CPU_OMP_THREADS_BIND'])"


def python(code: str, *arguments: str, path: Path | None = None, **environment: str):
    """Runs ``code`` after `activate` in a new interpreter with ``environment`` only."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    folders = [str(folder) for folder in (path, PACKAGE) if folder]
    start = "from pd_harness.cpu_host.startup import activate; activate()"
    return subprocess.run(
        [sys.executable, "-c", f"{start}\n{code}", *arguments],
        env={**kept, "PYTHONPATH": os.pathsep.join(folders), **environment},
        capture_output=True,
        text=True,
    )


def test_cpu_host_is_disabled_by_default():
    found = python("import importlib.util as u; print(u.find_spec('sgl_kernel'))")
    assert found.stdout == "None\n"


def test_misspelt_switch_is_refused():
    found = python("print('ran')", **{SWITCH: "yes"})
    assert (found.returncode, found.stdout) == (1, "")
    assert f"{SWITCH} is 'yes'" in found.stderr


def test_cpu_host_refuses_installed_torch_npu(tmp_path):
    (tmp_path / "torch_npu.py").write_text("")
    found = python("print('ran')", path=tmp_path, **ON)
    assert (found.returncode, found.stdout) == (1, "")
    assert f"this machine has torch_npu ({tmp_path}" in found.stderr


def test_stub_kernel_raises_when_called():
    call = "from sgl_kernel.kvcacheio import transfer_kv_all_layer as kernel\nkernel(1)"
    found = python(call, **ON)
    assert "sgl_kernel.kvcacheio.transfer_kv_all_layer is only a stub" in found.stderr


def test_installed_package_is_preferred_to_stub(tmp_path):
    (tmp_path / "sgl_kernel.py").write_text("real = True")
    found = python("import sgl_kernel; print(sgl_kernel.real)", path=tmp_path, **ON)
    assert found.stdout == "True\n", found.stderr


@pytest.mark.parametrize(
    ("arguments", "tp", "pp"),
    [
        ([], 1, 1),
        (["--tp", "2"], 2, 1),
        (["--tp-size=4"], 4, 1),
        (["--tensor-parallel-size", "3", "--pp-size", "2"], 3, 2),
    ],
)
def test_one_core_per_rank_is_bound(arguments, tp, pp):
    found = python(PRINT_BINDING, *arguments, **ON)
    assert found.stdout.strip() == thread_binding(tp, pp), found.stderr


def test_pp_stages_have_own_cores_in_later_releases(monkeypatch):
    monkeypatch.setattr("pd_harness.cpu_host.release", lambda: "0.5.9")
    assert thread_binding(2, 2) == "0|1"
    monkeypatch.setattr("pd_harness.cpu_host.release", lambda: "0.5.23")
    assert thread_binding(2, 2) == "0|1|2|3"


def test_given_thread_binding_is_preserved():
    found = python(PRINT_BINDING, SGLANG_CPU_OMP_THREADS_BIND="all", **ON)
    assert found.stdout == "all\n", found.stderr


FAKE_NIXL = """
class nixlBind:
    class nixlAgentConfig: pass
class nixl_agent:
    def __init__(self, name):
        self.nixl_mems = {"DRAM": 0, "VRAM": 1}
"""


@pytest.mark.parametrize(
    ("patched", "kinds"), [(False, {"DRAM": 0, "VRAM": 0}), (True, {"DRAM": 0, "VRAM": 1})]
)
def test_nixl_memory_kind_is_changed_for_the_stock_engine_only(tmp_path, patched, kinds):
    modules = {
        "nixl_cu12/__init__.py": "",
        "nixl_cu12/_api.py": FAKE_NIXL,
        "sglang/__init__.py": "",
    }
    if patched:
        modules["sglang/srt/disaggregation/kv_layout/__init__.py"] = ""
    for name, text in modules.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    code = "import json, nixl_cu12._api as a; print(json.dumps(a.nixl_agent('x').nixl_mems))"
    found = python(code, path=tmp_path, **ON)
    assert json.loads(found.stdout) == kinds, found.stderr


def test_idle_nixl_agent_uses_no_cpu_time():
    code = """
import time
from nixl._api import nixl_agent, nixl_agent_config
agent = nixl_agent("idle", nixl_agent_config(backends=["UCX"]))
start, used = time.monotonic(), time.process_time()
time.sleep(2)
print((time.process_time() - used) / (time.monotonic() - start))
"""
    folders = Path(pytest.importorskip("nixl", reason="no NIXL here").__file__).parents[1]
    found = python(code, path=folders, **ON)
    assert float(found.stdout.splitlines()[-1]) < 0.2, found.stderr


KEEP_ALIVE = """
import http.client, socket, threading, time
import uvicorn

async def app(scope, receive, send):
    start = {"status": 204, "headers": []}
    await send({"type": "http.response.start", **start})
    await send({"type": "http.response.body"})

listening = socket.create_server(("127.0.0.1", 0))
server = uvicorn.Server(uvicorn.Config(app, lifespan="off", timeout_keep_alive=1))
threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True).start()
connection = http.client.HTTPConnection("127.0.0.1", listening.getsockname()[1])
connection.request("GET", "/")
connection.getresponse().read()
time.sleep(2)
connection.sock.settimeout(1)
try:
    print("closed" if connection.sock.recv(1) == b"" else "data")
except TimeoutError:
    print("open")
"""


@pytest.mark.parametrize(("switch", "state"), [({}, "closed"), (ON, "open")])
def test_idle_connections_stay_open(switch, state):
    found = python(KEEP_ALIVE, path=Path(httpx.__file__).parents[1], **switch)
    assert found.stdout.splitlines()[-1:] == [state], found.stderr


def test_import_hook_runs_once_after_import(tmp_path, monkeypatch):
    (tmp_path / "hooked_module.py").write_text("value = 1")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    seen = []
    after_import("hooked_module", lambda module: seen.append(module.value))
    assert importlib.util.find_spec("hooked_module") is not None
    assert seen == []
    try:
        importlib.import_module("hooked_module")
        importlib.import_module("hooked_module")
        assert seen == [1]
    finally:
        sys.modules.pop("hooked_module", None)


def test_import_hook_on_loaded_module_is_refused():
    with pytest.raises(RuntimeError, match="json is already imported"):
        after_import("json", print)


def test_second_import_hook_of_a_module_is_refused(monkeypatch):
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    after_import("a_module", print)
    with pytest.raises(RuntimeError, match="a_module has a hook"):
        after_import("a_module", print)


# Several callers of one transfer engine write to another one, each its own bytes. Prints the calls'
# statuses, and whether all bytes arrived.
WRITE = """
import ctypes, json, os, sys
from concurrent.futures import ThreadPoolExecutor
from mooncake.engine import TransferEngine
callers, copies = map(int, sys.argv[1:])
size = 8 * copies
src, dst = (ctypes.create_string_buffer(os.urandom(callers * size)) for _ in range(2))
engines = []
for buffer in (src, dst):
    engine = TransferEngine()
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    assert engine.register_memory(ctypes.addressof(buffer), callers * size) == 0
    engines.append(engine)
session = f"127.0.0.1:{engines[1].get_rpc_port()}"

def write(caller):
    places = range(caller * size, (caller + 1) * size, 8)
    src_places, dst_places = ([ctypes.addressof(b) + n for n in places] for b in (src, dst))
    return engines[0].batch_transfer_sync_write(session, src_places, dst_places, [8] * copies)

with ThreadPoolExecutor(callers) as pool:
    statuses = list(pool.map(write, range(callers)))
print(json.dumps([statuses, src.raw == dst.raw]), flush=True)
os._exit(0)
"""


def write_concurrently(callers: int, copies: int, **environment: str) -> str:
    found = python(WRITE, str(callers), str(copies), MC_FORCE_TCP="true", **environment)
    return found.stdout.splitlines()[-1] if found.stdout else found.stderr


def test_mooncake_without_cpu_host_refuses_many_copies():
    assert write_concurrently(1, 3000) == "[[-1], false]"


@pytest.mark.parametrize(("callers", "copies"), [(1, 3000), (4, 1300), (1, 512)])
def test_concurrent_batches_of_many_copies_arrive(callers, copies):
    assert write_concurrently(callers, copies, **ON) == f"[{[0] * callers}, true]"
