"""One process at a time holds a file lock, and no process waits longer than the time-out."""

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from pd_harness.cpu_host.file_lock import FileLock

HOLDER = """
import sys, time
from pd_harness.cpu_host.file_lock import FileLock
turn = FileLock(sys.argv[1])
with turn.acquired() as held:
    print(held, flush=True)
    sys.stdin.readline()
print("given back", flush=True)
time.sleep(60)
"""


@pytest.fixture
def name(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    return "turn"


@pytest.fixture
def holder(name):
    command = [sys.executable, "-c", HOLDER, name]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as process:
        assert process.stdout.readline() == "True\n"
        yield process
        process.kill()


def test_lock_is_released(name, holder):
    turn = FileLock(name)
    print(file=holder.stdin, flush=True)
    assert holder.stdout.readline() == "given back\n"
    for _ in range(2):
        with turn.acquired() as held:
            assert held


def test_timeout_proceeds_without_lock(name, holder):
    begun = time.monotonic()
    with FileLock(name, timeout_s=0.2).acquired() as held:
        assert not held
    assert time.monotonic() - begun >= 0.2
    # A lock that timed out does not release the holder's lock.
    with FileLock(name, timeout_s=0.1).acquired() as held:
        assert not held


def test_slow_holder_is_waited_for_once(name, holder):
    """Else a prompt that is sent in many chunks would wait as often."""
    lock = FileLock(name, timeout_s=0.2)
    with lock.acquired() as held:
        assert not held
    begun = time.monotonic()
    for _ in range(10):
        with lock.acquired() as held:
            assert not held
    assert time.monotonic() - begun < 0.2
    holder.kill()
    holder.wait()
    with lock.acquired() as held:
        assert held
    assert lock.patience_s == 0.2


def test_lock_is_released_when_process_exits_or_block_raises(name, holder):
    holder.kill()
    turn = FileLock(name, timeout_s=30)
    with pytest.raises(RuntimeError), turn.acquired() as held:
        assert held
        raise RuntimeError
    with turn.acquired() as held:
        assert held


def test_threads_respect_lock_timeout(name):
    turn = FileLock(name, timeout_s=0.2)
    with turn.acquired() as first, ThreadPoolExecutor(1) as pool:

        def second() -> tuple[bool, float]:
            begun = time.monotonic()
            with turn.acquired() as held:
                return held, time.monotonic() - begun

        held, took = pool.submit(second).result()
    assert first and not held and 0.2 <= took < 5
    with turn.acquired() as held:
        assert held
