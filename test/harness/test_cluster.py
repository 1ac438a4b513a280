"""Child processes start and stop: none survives, and failures are reported at once."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from serving_checks import LOST_MEMORY, NOT_JOINED, check_no_memory_lost, retry_memfabric_faults
from sglang.srt.server_args import DP_ATTENTION_HANDSHAKE_PORT_DELTA

from pd_harness import cluster, ports
from pd_harness.polling import wait_until
from pd_harness.ports import free_port_range, free_ports

FAULTS = (NOT_JOINED, LOST_MEMORY)  # of MemFabric
# A server with a child process, which answers on a port.
WITH_CHILD = """
import http.server, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open(sys.argv[2], "w").write(str(child.pid))
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def server_with_child(folder: Path) -> tuple[cluster.Server, Path]:
    (port,) = free_ports(1)
    command = [sys.executable, "-c", WITH_CHILD, str(port), str(folder / "child")]
    return cluster.Server("with-child", command, port, folder / "log"), folder / "child"


def python_command(code: str) -> list[str]:
    """Returns the command of a process that runs this code, with this process's import path."""
    return [sys.executable, "-c", f"import sys; sys.path[:0] = {sys.path!r}\n{code}"]


def test_processes_share_the_session_and_end_with_the_block(tmp_path):
    """With separate sessions, Linux would schedule by session and delay some for seconds."""
    server, child = server_with_child(tmp_path)
    with cluster.running([server], seconds=30):
        pid = int(child.read_text())
        assert os.getsid(pid) == os.getsid(0)
        assert os.getpgid(pid) != os.getpgid(0)
    assert wait_until(lambda: not psutil.pid_exists(pid), 20)


def test_servers_exit_with_killed_parent(tmp_path):
    server, child = server_with_child(tmp_path)
    code = f"""
import time
from pathlib import PosixPath
from pd_harness.cluster import Server
{server!r}.start()
time.sleep(600)
"""
    parent = subprocess.Popen(python_command(code))
    try:
        assert wait_until(lambda: child.exists() and child.read_text() != "", 20)
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    pid = int(child.read_text())
    assert wait_until(lambda: not psutil.pid_exists(pid), 20)


@pytest.mark.parametrize(
    "code, seconds, said",
    [
        ("print('no model'); raise SystemExit(3)", 60, "(?s)broken exited with status 3.*no model"),
        ("import time; time.sleep(600)", 1, "broken was not ready in time"),
    ],
    ids=["exits", "hangs"],
)
def test_server_that_does_not_start_is_reported_and_stopped(tmp_path, code, seconds, said):
    (port,) = free_ports(1)
    server = cluster.Server("broken", [sys.executable, "-c", code], port, tmp_path / "log")
    begun = time.monotonic()
    with pytest.raises(cluster.ServerFailed, match=said), cluster.running([server], seconds):
        pytest.fail("it must not become ready")
    assert time.monotonic() - begun < 30
    assert server.process.poll() is not None


def test_port_range_is_reserved_completely():
    start = free_port_range(3, range(19_000, 19_500))
    with pytest.raises(OSError, match="only 0 of 1 free ports"):
        free_ports(1, range(start, start + 3))
    with pytest.raises(OSError, match="no 3 consecutive free ports"):
        free_port_range(3, range(start - 2, start + 5))


def test_short_port_ranges_are_released():
    """Otherwise each failed attempt would keep ports, and a night's runs would use up all."""
    first = free_port_range(7, range(19_500, 20_000))
    around = range(first, first + 7)
    middle = first + 3
    for port in around:
        if port != middle:
            ports._reserved.pop(port).close()
    with pytest.raises(OSError, match="no 4 consecutive free ports"):
        free_port_range(4, around)
    assert sorted(free_ports(6, around)) == [port for port in around if port != middle]


def test_oldest_reserved_ports_are_released():
    """Runs in another process, because running servers use this one's ports."""
    code = """
from pd_harness import ports
ports.MAX_RESERVED = 2
oldest, other, newest = ports.free_ports(3)
print("oldest", ports.free_ports(1, [oldest]) == [oldest])
print("newest", ports.free_ports(1, [newest]))
"""
    found = subprocess.run(python_command(code), capture_output=True, text=True)
    assert found.stdout == "oldest True\n", found
    assert "OSError: only 0 of 1 free ports" in found.stderr


def test_all_ports_of_dp_attention_are_reserved(tmp_path, monkeypatch):
    held = []
    monkeypatch.setattr(cluster, "free_port_range", lambda length: held.append(length) or 20_000)
    fleet = cluster.Topology("nixl", prefill_tp=2, prefill_dp=2)
    cluster.pd_servers(fleet, tmp_path, tmp_path, "patched", "patched")
    assert held == [cluster.DIST_PORTS] and held[0] > DP_ATTENTION_HANDSHAKE_PORT_DELTA


def choose_ports_in_other_process(*ports: int) -> subprocess.CompletedProcess:
    """Runs another process that chooses one of these ports and prints it."""
    code = f"from pd_harness.ports import free_ports\nprint(free_ports(1, {list(ports)}))"
    return subprocess.run(python_command(code), capture_output=True, text=True)


def test_port_reserved_by_one_process_is_not_chosen_by_another():
    """No process listens on the reserved port yet."""
    mine, other = free_ports(2)
    with socket.create_server((cluster.HOST, other)):
        found = choose_ports_in_other_process(mine, other)
    assert f"OSError: only 0 of 1 free ports between {mine} and {other}" in found.stderr


@pytest.mark.parametrize("reuses_address", [True, False], ids=["server", "library"])
def test_reserved_port_is_for_servers(reuses_address):
    """A library that looks for any free port must not get it before the server has bound it."""
    (port,) = free_ports(1)
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuses_address)
        refused = contextlib.nullcontext() if reuses_address else pytest.raises(OSError)
        with refused:
            other.bind((cluster.HOST, port))
            other.listen()


def test_port_in_use_is_not_reserved():
    """Another process may reserve the port once no process listens on it."""
    with socket.socket() as listener:
        listener.bind((cluster.HOST, 0))
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(OSError, match="only 0 of 1 free ports"):
            free_ports(1, [port])
    found = choose_ports_in_other_process(port)
    assert found.stdout == f"[{port}]\n", found


@pytest.mark.parametrize(
    "fault, refused, starts",
    [
        *((fault, *counts) for fault in FAULTS for counts in ((0, 1), (2, 3), (3, 3))),
        ("no such model", 1, 1),
    ],
)
def test_fleet_is_restarted_only_after_a_memfabric_fault(fault, refused, starts, recwarn):
    begun = []

    def serve() -> str:
        begun.append(1)
        if len(begun) <= refused:
            raise cluster.ServerFailed(f"decode exited\n{fault}.")
        return "served"

    if refused < starts:
        assert retry_memfabric_faults(serve) == "served"
    else:
        with pytest.raises(cluster.ServerFailed, match=fault):
            retry_memfabric_faults(serve)
    assert len(begun) == starts
    assert [fault in str(one.message) for one in recwarn] == [True] * (starts - 1)


def test_server_whose_memfabric_lost_memory_is_named(tmp_path):
    servers = [SimpleNamespace(name=name, log=tmp_path / name) for name in ("prefill", "decode")]
    for server in servers:
        server.log.write_text("ready\n")
        server.log_tail = lambda: "the end"
    check_no_memory_lost(servers)
    servers[0].log.write_text(f"ready\nERROR {LOST_MEMORY}, index: 3\n")
    with pytest.raises(cluster.ServerFailed, match=f"prefill: {LOST_MEMORY}"):
        check_no_memory_lost(servers)


def test_silent_server_is_a_hang_but_refused_connection_is_not(tmp_path):
    with socket.socket() as silent:
        silent.bind((cluster.HOST, 0))
        silent.listen()
        port = silent.getsockname()[1]
        answers = cluster.ask(f"http://{cluster.HOST}:{port}", [[1], [2]], 4, seconds=1)
    assert [answer.failure for answer in answers] == ["hang", "hang"]
    (refused,) = cluster.ask(f"http://{cluster.HOST}:{port}", [[1]], 4, seconds=5)
    assert refused.failure.startswith("connection: ")
