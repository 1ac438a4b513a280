"""Servers as forks of a process that has imported the engine behave like ``python -m`` ones."""

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from pd_harness import cluster, forks
from pd_harness.cpu_host import ENVIRONMENT
from pd_harness.polling import wait_until

pytestmark = pytest.mark.timeout(300)

PYTHON_PATH = str(cluster.CHECKOUT / "python")
PYTHON = str(cluster.interpreter("stock"))
# Starts a child with "spawn", as the engine does; the child prints what it is.
CHILD = """
import multiprocessing, os, sys, time, threading
def child():
    print("child of", os.getppid(), "sglang" in sys.modules, flush=True)
    time.sleep({seconds})
if {threads}:
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
context = multiprocessing.get_context("spawn")
process = context.Process(target={target})
print("server", os.getpid(), flush=True)
process.start()
process.join()
"""


def run(code: str, log: Path, **environment: str) -> forks.Fork:
    """Runs the statements in a fork, with its output in the log."""
    with log.open("wb") as file:
        # `timeit` runs given statements, and is part of every Python.
        return forks.fork(
            PYTHON, "timeit", ["-n1", "-r1", code], {**ENVIRONMENT, **environment}, file
        )


def lines(log: Path, count: int, seconds: float = 60) -> list[str]:
    """Waits until a log has ``count`` lines, and returns its lines."""
    assert wait_until(lambda: len(log.read_text().splitlines()) >= count, seconds), log.read_text()
    return log.read_text().splitlines()


def has_exited(pid: int, seconds: float = 20) -> bool:
    """Returns whether a process exits in time; a zombie, which init may not reap, has exited."""

    def is_dead() -> bool:
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
        return True

    return wait_until(is_dead, seconds)


def test_fork_has_engine_environment_and_session(tmp_path):
    """It also has NIXL's plug-in, which each rank would otherwise load again."""
    code = """
import os, sys
print('sglang' in sys.modules, 'libplugin_UCX' in open('/proc/self/maps').read())
print(os.environ['SOME'], sys.argv[1])
print(os.getsid(0), os.getpgrp(), flush=True)
os._exit(7)
"""
    process = run(code, tmp_path / "log", SOME="thing")
    assert (process.wait(), process.poll()) == (7, 7)
    loaded, given, ids = (tmp_path / "log").read_text().splitlines()[:3]
    assert (loaded, given) == ("True True", "thing -n1")
    session, group = map(int, ids.split())
    assert session == os.getsid(0) and group != os.getpgrp()


def test_spawned_processes_are_forked_children(tmp_path):
    log = tmp_path / "log"
    process = run(CHILD.format(seconds=600, threads=False, target="child"), log)
    server, child = (line.split() for line in lines(log, 2))
    assert child == ["child", "of", server[1], "True"]
    family = {one.pid for one in psutil.Process(process.pid).children(recursive=True)}
    assert int(server[1]) in family
    assert len(family) == 2
    process.stop()
    assert all(has_exited(pid) for pid in family)


def test_process_with_threads_does_not_fork(tmp_path):
    """A fork of it could hold a lock that no thread ever releases."""
    log = tmp_path / "log"
    # A spawned process needs a target from a module that it can import.
    target = "exec, args=('import sys; print(\\'sglang\\' in sys.modules)',)"
    run(CHILD.format(seconds=0, threads=True, target=target), log).wait()
    assert lines(log, 2)[1] == "False"


# A DP controller, which has threads when it starts a scheduler. Both print what they are.
CONTROLLER = """
import multiprocessing, os, threading, time
context = multiprocessing.get_context("spawn")
def run_data_parallel_controller_process():
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
    scheduler = context.Process(target=exec, args=({scheduler!r},))
    scheduler.start()
    scheduler.join()
    print("scheduler exited with", scheduler.exitcode, flush=True)
controller = context.Process(target=run_data_parallel_controller_process)
controller.start()
print("controller", controller.pid, flush=True)
controller.join()
print("controller exited with", controller.exitcode, flush=True)
"""
SCHEDULER = """
import os, sys, time
print("scheduler", os.getpid(), os.getppid(), "sglang" in sys.modules, flush=True)
"""


def test_dp_controller_forks_schedulers(tmp_path):
    log = tmp_path / "log"
    run(CONTROLLER.format(scheduler=SCHEDULER + "sys.exit(5)"), log).wait()
    found = log.read_text()
    assert re.search("^scheduler .* True$", found, re.MULTILINE), found
    assert "scheduler exited with 5" in found


@pytest.mark.parametrize("which", ["controller", "scheduler"])
def test_dp_controller_and_scheduler_end_together(which, tmp_path):
    """The engine's scheduler exits with its parent, and sends it SIGQUIT when it fails."""
    log = tmp_path / "log"
    ending = {
        "controller": "time.sleep(600)",
        "scheduler": "os.kill(os.getppid(), 3); time.sleep(600)",
    }[which]
    bound = "from sglang.srt.utils import kill_itself_when_parent_died as bind; bind()\n"
    process = run(CONTROLLER.format(scheduler=SCHEDULER + bound + ending), log)
    found = dict(line.split(maxsplit=1) for line in lines(log, 2)[:2])
    controller, (scheduler, forker) = int(found["controller"]), found["scheduler"].split()[:2]
    if which == "controller":
        os.kill(controller, signal.SIGKILL)
    process.wait()
    status = -signal.SIGKILL if which == "controller" else -signal.SIGQUIT
    assert f"controller exited with {status}" in log.read_text()
    assert all(has_exited(int(pid)) for pid in (controller, forker, scheduler))


def test_variable_read_at_import_needs_another_fork_server(tmp_path):
    """A variable that the import does not read may differ."""
    given = {**os.environ, **ENVIRONMENT}
    del given["PYTEST_CURRENT_TEST"]
    command = [PYTHON, "-m", forks.MODULE]
    fork_server = forks.fork_server(command, given, forks._variables_read_by)
    read = next(name for name in fork_server.read if name.startswith("SGLANG"))
    assert fork_server.matches(command, {**given, "SGLANG_NOBODY_READS_THIS": "1"})
    assert not fork_server.matches(command, {**given, read: "another value"})
    assert not fork_server.matches([str(cluster.interpreter("patched")), *command[1:]], given)


WORKER = """
import os, sys
from pd_harness import forks
asleep = [sys.executable, "-c", "import sys, time; open(sys.argv[1], 'w'); time.sleep(600)"]
environment = {**os.environ, "SOME": sys.argv[1]}
made = forks.fork_server(asleep, environment, lambda _: {"SOME": sys.argv[1]})
print(made.pid, flush=True)
sys.stdin.read()
"""


def test_workers_share_fork_servers_of_living_workers(tmp_path):
    shared = {forks.SHARED_FOLDER_VARIABLE: str(tmp_path), "PYTHONPATH": PYTHON_PATH}

    def worker(value: str) -> tuple[subprocess.Popen, int]:
        """Starts a worker that needs this value; returns it and its fork server's process id."""
        process = subprocess.Popen(
            [sys.executable, "-c", WORKER, value],
            env={**os.environ, **shared},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        stack.callback(process.communicate)
        return process, int(process.stdout.readline())

    with contextlib.ExitStack() as stack:
        first, made = worker("1")
        assert worker("1")[1] == made
        assert worker("2")[1] != made
        first.communicate()
        assert has_exited(made)
        assert worker("1")[1] != made


def test_fork_exits_when_its_handle_is_dropped(tmp_path):
    supervisor = run(CHILD.format(seconds=600, threads=False, target="child"), tmp_path / "log").pid
    assert has_exited(supervisor)


@pytest.mark.nightly  # it imports the engine once more
def test_forks_exit_with_killed_parent(tmp_path, monkeypatch):
    monkeypatch.delenv(forks.SHARED_FOLDER_VARIABLE, raising=False)
    log = tmp_path / "log"
    code = CHILD.format(seconds=600, threads=False, target="child")
    script = f"""
import sys, time
sys.path[:0] = {sys.path!r}
sys.path.append({str(Path(__file__).parent)!r})
from pathlib import Path
from test_forks import run
kept = run({code!r}, Path({str(log)!r}))
time.sleep(600)
"""
    parent = subprocess.Popen([sys.executable, "-c", script])
    try:
        log.touch()
        server = int(lines(log, 2, 120)[0].split()[1])
        (child,) = psutil.Process(server).children()
        supervisor = psutil.Process(server).ppid()
        fork_server = psutil.Process(supervisor).ppid()
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    assert all(has_exited(pid) for pid in (server, child.pid, supervisor, fork_server))


def test_unimportable_engine_is_reported(tmp_path):
    with pytest.raises(forks.ForkServerFailed, match="No module named"):
        forks.fork_server(
            [sys.executable, "-m", forks.MODULE], {"PYTHONPATH": PYTHON_PATH}, lambda _: {}
        )
