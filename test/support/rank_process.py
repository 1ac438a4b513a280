"""A rank's process, which answers commands as JSON lines, `{"do": NAME, ...}`.

`python FILE fork SOCKET` imports the engine once, and forks a process for every connection to the
Unix socket. A connection first sends a folder for temporary files and a file descriptor for output.
`fresh` instead of `fork` starts a new interpreter per connection; `on FD` is such an interpreter.
"""

import ctypes
import gc
import importlib
import json
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Callable

from pd_harness.cpu_host.nixl_plugin import load_nixl

# In addition to the imports of a rank's module. These do not import Mooncake's library, which
# starts threads.
IMPORTED = [f"sglang.srt.disaggregation.{backend}.conn" for backend in ("nixl", "mooncake")]

PATH_LENGTH = 4096

Factories = dict[str, Callable[[dict], object]]


def serve(connection: socket.socket, factories: Factories) -> None:
    """Answers commands until the driver closes the connection.

    The first command names the factory that makes the object whose methods serve the others.
    """
    rank = None
    with connection.makefile("rw") as lines:
        for line in lines:
            command = json.loads(line)
            name = command.pop("do")
            try:
                if name in factories:
                    os.environ.update(command["environment"])
                    rank = factories[name](command)
                    answer = {"state": "started", "pid": os.getpid()}
                else:
                    answer = getattr(rank, name)(**command)
                    answer = {"state": "done"} if answer is None else answer
            except Exception as error:
                answer = {"state": "raised", "reason": f"{type(error).__name__}: {error}"}
            lines.write(json.dumps(answer) + "\n")
            lines.flush()


def die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def main(factories: Factories) -> None:
    """Runs the command line; `factories` are the first commands that a connection may send."""
    how, path = sys.argv[1:]
    if how == "on":
        serve_and_exit(socket.socket(fileno=int(path)), factories)
    die_with_parent()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    if how == "fork":
        load_nixl()
        for name in IMPORTED:
            importlib.import_module(name)
        gc.freeze()  # or else collections in a rank would copy shared pages
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{path}.new")
        listener.listen(64)
        os.rename(f"{path}.new", path)  # a socket that exists under `path` accepts connections
        while True:
            connection, _ = listener.accept()
            if os.fork() == 0:
                die_with_parent()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                listener.close()
                folder, (log,), _, _ = socket.recv_fds(connection, PATH_LENGTH, 1)
                os.environ["TMPDIR"], tempfile.tempdir = folder.decode(), None
                os.dup2(log, 1)
                os.dup2(log, 2)
                os.close(log)
                if how == "fresh":
                    os.set_inheritable(connection.fileno(), True)
                    this = [sys.executable, sys.argv[0], "on", str(connection.fileno())]
                    os.execv(sys.executable, this)
                serve_and_exit(connection, factories)
            connection.close()


def serve_and_exit(connection: socket.socket, factories: Factories) -> None:
    serve(connection, factories)
    # The engine's transfer threads never stop by themselves.
    os._exit(0)
