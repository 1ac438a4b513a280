"""Start servers as forks of a process that has imported their engine: in a second, not in ten.

On the CPU host only. There is one such process, a fork server, for each engine and for each value
of the variables that the engine reads while it is imported: a fork cannot change what they made,
nor what C libraries read when they are loaded (MALLOC_ARENA_MAX, LD_PRELOAD). All end with this
process, however that is, and servers with them.
"""

import atexit
import json
import os
import select
import socket
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from pd_harness.waiting import awaited

START_SECONDS = 120
MODULE = "pd_harness.cpu_host.fork_server"
LIMIT = 1 << 20  # bytes of a message


class ForkServerFailed(RuntimeError):
    """The engine could not be imported, or may not be forked; the message holds the log's end."""


class SocketServer:
    """A process that listens on a Unix socket when it is ready; its path is the last argument."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]):
        self.folder = tempfile.TemporaryDirectory(prefix="sglang-pd-")
        self.path = Path(self.folder.name) / "socket"
        self.log = Path(self.folder.name) / "log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, str(self.path)],
                env={**environment},
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        awaited(lambda: self.path.exists() or self.process.poll() is not None, START_SECONDS)
        if not self.path.exists():
            tail = self.log.read_text(errors="replace")[-4000:]
            self.close()
            raise ForkServerFailed(f"{' '.join(command)} did not start:\n{tail}")

    def connected(self, kind: socket.SocketKind) -> socket.socket:
        """A new connection to it."""
        connection = socket.socket(socket.AF_UNIX, kind)
        connection.connect(str(self.path))
        return connection

    def close(self) -> None:
        """End it, and remove its log."""
        self.process.stdin.close()
        self.process.kill()
        self.process.wait()
        self.folder.cleanup()


class ForkServer(SocketServer):
    """One process, which has imported the engine of ``python`` with ``environment``."""

    def __init__(self, python: str, environment: Mapping[str, str]):
        super().__init__([python, "-m", MODULE], environment)
        self.python = python
        with self.connected(socket.SOCK_SEQPACKET) as connection:
            self.read = _message(connection)["read"]

    def fits(self, python: str, environment: Mapping[str, str]) -> bool:
        """Whether an import with this environment would make the same."""
        return (
            python == self.python
            and self.process.poll() is None
            and all(environment.get(name) == value for name, value in self.read.items())
        )

    def fork(self, module: str, arguments: Sequence[str], environment, log) -> "Fork":
        """A new process that runs the module; its output goes to the open file ``log``."""
        connection = self.connected(socket.SOCK_SEQPACKET)
        _message(connection)
        asked = {"module": module, "arguments": list(arguments), "environment": dict(environment)}
        socket.send_fds(connection, [json.dumps(asked).encode()], [log.fileno()])
        return Fork(connection)


class Fork:
    """A server's keeper, with what is used of ``subprocess.Popen``. ``pid`` is the keeper's."""

    def __init__(self, connection: socket.socket):
        self.connection = self.stdin = connection
        self.returncode: int | None = None
        self.pid: int = _message(connection)["keeper"]

    def poll(self) -> int | None:
        """The server's exit status, or None while it runs."""
        if self.returncode is None and select.select([self.connection], [], [], 0)[0]:
            self._take_status()
        return self.returncode

    def wait(self) -> int:
        """Its status, when all its processes have been killed."""
        if self.returncode is None:
            self._take_status()
        self.connection.close()
        return self.returncode

    def stop(self) -> None:
        """Kill the server and all that it started."""
        if self.returncode is None:
            self.connection.shutdown(socket.SHUT_WR)
        self.wait()

    def _take_status(self) -> None:
        # A keeper that was killed says nothing.
        self.returncode = _message(self.connection).get("status", -9)


def _message(connection: socket.socket) -> dict:
    """The next one; empty at the end of the connection."""
    text = connection.recv(LIMIT)
    return json.loads(text) if text else {}


_fork_servers: list[ForkServer] = []


@atexit.register
def close_all() -> None:
    """End the fork servers of this process; what they have forked goes on until it is stopped."""
    while _fork_servers:
        _fork_servers.pop().close()


def fork(python: str, module: str, arguments: Sequence[str], environment, log) -> Fork:
    """Fork a process that runs a module of the engine, from a fork server that is made if need be.

    Raises:
        ForkServerFailed: it could not be made.
    """
    full = {**os.environ, **environment}
    full.pop("PYTEST_CURRENT_TEST", None)  # another for each test, and libraries read it
    for fork_server in _fork_servers:
        if fork_server.fits(python, full):
            break
    else:
        fork_server = ForkServer(python, full)
        _fork_servers.append(fork_server)
    return fork_server.fork(module, arguments, full, log)
