"""Start servers as forks of a process that has imported their engine: in two seconds, not in ten.

On the CPU host only. There is one such process, a fork server, for each engine and for each set of
values of the variables that the engine's import reads: a fork cannot undo their effects, nor change
what C libraries read when they are loaded (MALLOC_ARENA_MAX, LD_PRELOAD). Fork servers and their
servers exit with the process that started them, for whatever reason that exits.

The workers of one test run share their fork servers: each finds the others' in the folder that
SGLANG_PD_FORKS names. No worker may exit before all have finished.
"""

import atexit
import contextlib
import fcntl
import functools
import hashlib
import json
import os
import select
import socket
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from pd_harness.polling import wait_until

START_TIMEOUT_S = 120
MODULE = "pd_harness.cpu_host.fork_server"
SHARED_FOLDER_VARIABLE = "SGLANG_PD_FORKS"
MAX_MESSAGE_BYTES = 1 << 20


class ForkServerFailed(RuntimeError):
    """The engine could not be imported, or may not be forked; the message has the log's tail."""


@dataclass(frozen=True)
class ForkServer:
    """A fork server of this or another worker, and the variables that its import read."""

    command: list[str]
    read: dict[str, str | None]  # None: the variable was not set
    path: str  # of its Unix socket
    pid: int

    def matches(self, command: Sequence[str], environment: Mapping[str, str]) -> bool:
        """Whether it runs, and an import with this environment would have the same result."""
        return (
            self.command == list(command)
            and all(environment.get(name) == value for name, value in self.read.items())
            and _is_running(self.pid)
        )

    def connect(self, kind: socket.SocketKind) -> socket.socket:
        """A new connection to the fork server."""
        connection = socket.socket(socket.AF_UNIX, kind)
        connection.connect(self.path)
        return connection


def _is_running(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())  # empty for a zombie
    return False


_started_servers: list[subprocess.Popen] = []


@atexit.register
def stop_fork_servers() -> None:
    """Stop this process's fork servers; servers that they forked run on until they are stopped."""
    while _started_servers:
        _kill(_started_servers.pop())


def _kill(process: subprocess.Popen) -> None:
    process.stdin.close()
    process.kill()
    process.wait()


@functools.cache
def _own_folder() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="sglang-pd-")


def fork_server(
    command: Sequence[str],
    environment: Mapping[str, str],
    read: Callable[[ForkServer], dict[str, str | None]],
) -> ForkServer:
    """Find a fork server that matches, or start one.

    A new one gets its socket's path as its last argument; ``read`` returns the variables that its
    import read.

    Raises:
        ForkServerFailed: It does not start.
    """
    folder = Path(os.environ.get(SHARED_FOLDER_VARIABLE) or _own_folder().name)
    name = hashlib.sha256(json.dumps(command).encode()).hexdigest()[:16]
    with (folder / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # else two workers would import the same engine
        for offer in folder.glob("*.json"):
            known = ForkServer(**json.loads(offer.read_text()))
            if known.matches(command, environment):
                return known
        started = _start(command, environment, folder)
        started.read.update(read(started))
        path = Path(started.path)
        draft = path.with_suffix(".draft")
        draft.write_text(json.dumps(asdict(started)))
        draft.rename(path.with_suffix(".json"))
    return started


def _start(command: Sequence[str], environment: Mapping[str, str], folder: Path) -> ForkServer:
    number, log = tempfile.mkstemp(prefix="fork-", suffix=".log", dir=folder)
    path = Path(log).with_suffix("")
    with open(number, "wb") as file:
        process = subprocess.Popen(
            [*command, str(path)],
            env={**environment},
            stdin=subprocess.PIPE,
            stdout=file,
            stderr=subprocess.STDOUT,
            process_group=0,
        )
    wait_until(lambda: path.exists() or process.poll() is not None, START_TIMEOUT_S)
    if not path.exists():
        _kill(process)
        tail = Path(log).read_text(errors="replace")[-4000:]
        raise ForkServerFailed(f"{' '.join(command)} did not start:\n{tail}")
    _started_servers.append(process)
    return ForkServer(list(command), {}, str(path), process.pid)


class Fork:
    """A forked server's supervisor, with the part of ``subprocess.Popen`` that callers use.

    ``pid`` is the supervisor's.
    """

    def __init__(self, connection: socket.socket):
        self.connection = connection
        self.returncode: int | None = None
        self.pid: int = _receive_message(connection)["supervisor"]

    def poll(self) -> int | None:
        """The server's exit status, or None while it runs."""
        if self.returncode is None and select.select([self.connection], [], [], 0)[0]:
            self._receive_status()
        return self.returncode

    def wait(self) -> int:
        """Wait until all of the server's processes are killed; returns its exit status."""
        if self.returncode is None:
            self._receive_status()
        self.connection.close()
        return self.returncode

    def stop(self) -> None:
        """Kill the server and everything it started."""
        if self.returncode is None:
            self.connection.shutdown(socket.SHUT_WR)
        self.wait()

    def _receive_status(self) -> None:
        # A supervisor that was killed sends nothing.
        self.returncode = _receive_message(self.connection).get("status", -9)


def _receive_message(connection: socket.socket) -> dict:
    """The next message; empty when the other end has closed the connection."""
    text = connection.recv(MAX_MESSAGE_BYTES)
    return json.loads(text) if text else {}


def fork(python: str, module: str, arguments: Sequence[str], environment, log) -> Fork:
    """Fork a process that runs ``module``: the engine's, or a file whose name ends in ``.py``.

    ``environment`` is added to this process's; output goes to the open file ``log``.

    Raises:
        ForkServerFailed: No fork server matches, and none could be started.
    """
    full = {**os.environ, **environment}
    full.pop("PYTEST_CURRENT_TEST", None)  # libraries read it, and it differs for each test
    server = fork_server([python, "-m", MODULE], full, _variables_read_by)
    connection = server.connect(socket.SOCK_SEQPACKET)
    _receive_message(connection)
    request = {"module": module, "arguments": list(arguments), "environment": full}
    socket.send_fds(connection, [json.dumps(request).encode()], [log.fileno()])
    return Fork(connection)


def _variables_read_by(server: ForkServer) -> dict[str, str | None]:
    with server.connect(socket.SOCK_SEQPACKET) as connection:
        return _receive_message(connection)["read"]
