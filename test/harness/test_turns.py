"""A turn is one process's at a time, and nobody waits for it longer than agreed."""

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from pd_harness.cpu_host.turns import Turn

HOLDER = """
import sys, time
from pd_harness.cpu_host.turns import Turn
turn = Turn(sys.argv[1])
with turn.taken() as held:
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


def test_it_is_given_back(name, holder):
    turn = Turn(name)
    print(file=holder.stdin, flush=True)
    assert holder.stdout.readline() == "given back\n"
    with turn.taken() as first:
        pass
    with turn.taken() as second:
        pass
    assert (first, second) == (True, True)


def test_a_process_that_ends_gives_it_back(name, holder):
    holder.kill()
    with Turn(name, patience=30).taken() as held:
        assert held


def test_who_waits_too_long_goes_on_without(name, holder):
    begun = time.monotonic()
    with Turn(name, patience=0.2).taken() as held:
        assert not held
    assert time.monotonic() - begun >= 0.2
    # What it does not hold it does not give back either.
    with Turn(name, patience=0.1).taken() as held:
        assert not held


def test_it_is_given_back_after_an_error(name, holder):
    holder.kill()
    turn = Turn(name, patience=30)
    with pytest.raises(ZeroDivisionError), turn.taken():
        1 / 0  # noqa: B018
    with turn.taken() as held:
        assert held


def test_threads_too_wait_no_longer_than_agreed(name):
    turn = Turn(name, patience=0.2)
    with turn.taken() as first, ThreadPoolExecutor(1) as pool:

        def second() -> tuple[bool, float]:
            begun = time.monotonic()
            with turn.taken() as held:
                return held, time.monotonic() - begun

        held, took = pool.submit(second).result()
    assert first and not held and 0.2 <= took < 5
    with turn.taken() as held:
        assert held
