"""Servers that are forks of a process which has imported the engine: as those of ``python -m``."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from pd_harness import cluster, forks
from pd_harness.cpu_host import ENVIRONMENT
from pd_harness.waiting import awaited

pytestmark = pytest.mark.timeout(300)

PYTHON_PATH = str(cluster.CHECKOUT / "python")
PYTHON = str(cluster.interpreter("stock"))
# A child by way of "spawn", as the engine makes them; it says what it is.
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
    """Run the statements in a fork."""
    with log.open("wb") as file:
        # It runs what it is given, and is in every Python.
        return forks.fork(
            PYTHON, "timeit", ["-n1", "-r1", code], {**ENVIRONMENT, **environment}, file
        )


def lines(log: Path, count: int, seconds: float = 60) -> list[str]:
    """The first lines of a log, when they are there."""
    assert awaited(lambda: len(log.read_text().splitlines()) >= count, seconds), log.read_text()
    return log.read_text().splitlines()


def gone(pid: int, seconds: float = 20) -> bool:
    """A container's first process may not bury the dead."""

    def is_gone() -> bool:
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
        return True

    return awaited(is_gone, seconds)


def test_it_has_imported_the_engine_and_has_the_environment_it_was_given(tmp_path):
    log = tmp_path / "log"
    code = "import os, sys; print('sglang' in sys.modules, os.environ['SOME'], sys.argv[1])"
    assert run(code, log, SOME="thing").wait() == 0
    assert log.read_text().splitlines()[0] == "True thing -n1"


def test_forks_share_the_session_of_the_test(tmp_path):
    log = tmp_path / "log"
    code = "import os, time; print(os.getsid(0), os.getpgrp(), flush=True); time.sleep(600)"
    server = run(code, log)
    session, group = map(int, lines(log, 1)[0].split())
    server.stop()
    assert session == os.getsid(0)
    assert group != os.getpgrp()


def test_its_status_is_told(tmp_path):
    process = run("import os; os._exit(7)", tmp_path / "log")
    assert process.wait() == 7
    assert process.poll() == 7


def test_its_processes_are_forks_and_its_children(tmp_path):
    log = tmp_path / "log"
    process = run(CHILD.format(seconds=600, threads=False, target="child"), log)
    server, child = (line.split() for line in lines(log, 2))
    assert child == ["child", "of", server[1], "True"]
    family = {one.pid for one in psutil.Process(process.pid).children(recursive=True)}
    assert int(server[1]) in family
    assert len(family) == 2
    process.stop()
    assert all(gone(pid) for pid in family)


def test_beside_a_thread_nothing_is_forked(tmp_path):
    """It would hold a lock that nobody ever releases."""
    log = tmp_path / "log"
    # A spawned process takes its target by name, from a module that it can import.
    target = "exec, args=('import sys; print(\\'sglang\\' in sys.modules)',)"
    run(CHILD.format(seconds=0, threads=True, target=target), log).wait()
    assert lines(log, 2)[1] == "False"


def test_what_is_read_at_import_takes_another_fork_server(tmp_path):
    """One that nobody reads then does not."""
    given = {**os.environ, **ENVIRONMENT}
    del given["PYTEST_CURRENT_TEST"]
    command = [PYTHON, "-m", forks.MODULE]
    fork_server = forks.fork_server(command, given, forks._read_by)
    read = next(name for name in fork_server.read if name.startswith("SGLANG"))
    assert fork_server.fits(command, {**given, "SGLANG_NOBODY_READS_THIS": "1"})
    assert not fork_server.fits(command, {**given, read: "another value"})
    assert not fork_server.fits([str(cluster.interpreter("patched")), *command[1:]], given)


OFFERS = """
import os, sys
from pd_harness import forks
asleep = [sys.executable, "-c", "import sys, time; open(sys.argv[1], 'w'); time.sleep(600)"]
environment = {**os.environ, "SOME": sys.argv[1]}
made = forks.fork_server(asleep, environment, lambda _: {"SOME": sys.argv[1]})
print(made.pid, flush=True)
sys.stdin.read()
"""


def test_workers_of_one_run_share_them_while_they_live(tmp_path):
    def worker(value: str) -> tuple[subprocess.Popen, int]:
        """A worker that asks for one with this value, and its process id."""
        process = subprocess.Popen(
            [sys.executable, "-c", OFFERS, value],
            env={**os.environ, forks.SHARED: str(tmp_path), "PYTHONPATH": PYTHON_PATH},
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
        assert gone(made)
        assert worker("1")[1] != made


def test_it_ends_with_who_asked_also_at_once(tmp_path):
    log = tmp_path / "log"
    keepers = [run(CHILD.format(seconds=600, threads=False, target="child"), log).pid]
    assert all(gone(pid) for pid in keepers)


@pytest.mark.nightly  # the engine is imported for it
def test_all_end_with_a_killed_parent(tmp_path, monkeypatch):
    monkeypatch.delenv(forks.SHARED, raising=False)
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
        keeper = psutil.Process(server).ppid()
        fork_server = psutil.Process(keeper).ppid()
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    assert all(gone(pid) for pid in (server, child.pid, keeper, fork_server))


def test_an_engine_that_cannot_be_imported_is_reported(tmp_path):
    with pytest.raises(forks.ForkServerFailed, match="No module named"):
        forks.fork_server(
            [sys.executable, "-m", forks.MODULE], {"PYTHONPATH": PYTHON_PATH}, lambda _: {}
        )


def test_nixls_plug_in_is_there_before_a_fork(tmp_path):
    """Without it each rank would load it anew."""
    log = tmp_path / "log"
    run("print('libplugin_UCX' in open('/proc/self/maps').read())", log).wait()
    assert lines(log, 1)[0] == "True"
