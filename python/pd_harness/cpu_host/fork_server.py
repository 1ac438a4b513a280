"""A process that has imported the engine and forks servers, which need not import it.

usage: python -m pd_harness.cpu_host.fork_server SOCKET   (see `pd_harness.forks`, its client)

For each connection to the Unix socket it forks a supervisor (compare `pd_harness.supervisor`).  The
supervisor sends ``{"read": {NAME: VALUE}}``, the variables that the engine's import read, and
receives ``{"module", "arguments", "environment"}`` with a file for the output.  Its child runs the
module as ``python -m`` would, or a file whose name ends in ``.py``; processes that the engine then
starts by ``multiprocessing`` are forked, too.  The supervisor sends ``{"supervisor": PID}``, its
own pid, and at the end ``{"status": N}``.  When the connection is closed or the server has exited,
it kills every process of the server's group.  The fork server exits when its standard input ends.
"""

import contextlib
import functools
import gc
import importlib
import json
import os
import runpy
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from pd_harness.cpu_host.import_hooks import after_import
from pd_harness.cpu_host.nixl_plugin import load_nixl
from pd_harness.cpu_host.process_start import fork_new_processes, is_single_threaded
from pd_harness.releases import release

PRELOADED_MODULES = (
    "sglang.launch_server",
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.scheduler",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.managers.data_parallel_controller",
    "sglang.srt.models.registry",
    # What these import only when a server starts.
    "sglang.srt.entrypoints.openai.serving_responses",
    "uvicorn.protocols.http.auto",
    "anyio._backends._asyncio",
    "sglang_router.launch_router",
)
# They read every variable to find those with their prefix; other modules do so with ``items``.
READ_ALL_MODULES = ("fsspec.config",)
MAX_MESSAGE_BYTES = 1 << 20
BOOTSTRAP_TIMEOUT_S = 10  # for the bootstrap server to start


def main(path: Path) -> None:
    """Import the engine, then fork for each connection until standard input ends.

    ``path`` is where the Unix socket appears once the engine is imported.

    Raises:
        SystemExit: the import started threads, which a fork would not have.
    """
    after_import("sglang.srt.disaggregation.common.conn", _register_after_bootstrap)
    before = dict(os.environ)
    with _recorded_reads() as read:
        for name in PRELOADED_MODULES:
            importlib.import_module(name)
        load_nixl()  # not Mooncake, whose import starts threads
    made = {name: value for name, value in os.environ.items() if before.get(name) != value}
    read = {name: before.get(name) for name in read}
    if not is_single_threaded():
        sys.exit("fork server: importing the engine has started threads, which a fork would lack")
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nothing waits for supervisors
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        draft = path.with_suffix(".draft")
        listener.bind(str(draft))
        listener.listen()
        draft.rename(path)
        while True:
            ready, _, _ = select.select([listener, sys.stdin], [], [])
            if sys.stdin in ready:
                return
            connection, _ = listener.accept()
            sys.stdout.flush()
            if os.fork() == 0:
                listener.close()
                supervise(connection, read, made)
            connection.close()


def _register_after_bootstrap(conn: ModuleType) -> None:
    """Let a prefill rank register only when the bootstrap server listens.

    The engine starts that server after the ranks, and a forked rank may be ready first: in 0.5.9 it
    would try once and stay unregistered, in later releases wait for a second.
    """
    manager = conn.CommonKVManager
    name = "_register_to_bootstrap" if release() == "0.5.9" else "register_to_bootstrap"
    register = getattr(manager, name)

    @functools.wraps(register)
    def register_in_time(self):
        start = time.monotonic()
        while time.monotonic() - start < BOOTSTRAP_TIMEOUT_S:
            try:
                socket.create_connection((self.bootstrap_host, self.bootstrap_port)).close()
                break
            except OSError:
                time.sleep(0.05)
        return register(self)

    setattr(manager, name, register_in_time)


@contextlib.contextmanager
def _recorded_reads() -> Iterator[set[str]]:
    """Record each variable that is read from ``os.environ`` by its name."""
    read: set[str] = set()
    environment = type(os.environ)
    get = environment.__getitem__

    def noted(self, name):
        caller = sys._getframe(1)
        by_name = caller.f_code.co_name != "__iter__"
        if by_name and caller.f_globals.get("__name__") not in READ_ALL_MODULES:
            read.add(name)
        return get(self, name)

    environment.__getitem__ = noted
    try:
        yield read
    finally:
        environment.__getitem__ = get


def supervise(connection: socket.socket, read: dict[str, str | None], made: dict[str, str]) -> None:
    """Run one server, and kill what is left of it; never returns.

    ``read`` are the variables that the import read, ``made`` those that it set.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setpgid(0, 0)
    _send_message(connection, read=read)
    message, files, _, _ = socket.recv_fds(connection, MAX_MESSAGE_BYTES, 1)
    if not message:
        os._exit(0)
    request = json.loads(message)
    os.dup2(files[0], 1)
    os.dup2(files[0], 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    scratch = tempfile.mkdtemp(prefix="sglang-pd-")
    server = os.fork()
    if server == 0:
        connection.close()
        os.close(files[0])
        request["environment"] = {**made, **request["environment"]}
        run_server(request, scratch)
    _send_message(connection, supervisor=os.getpid())
    select.select([connection, os.pidfd_open(server)], [], [])
    kill(server)
    _, status = os.waitpid(server, 0)
    shutil.rmtree(scratch, ignore_errors=True)
    with contextlib.suppress(OSError):
        _send_message(connection, status=os.waitstatus_to_exitcode(status))
    os._exit(0)


def _send_message(connection: socket.socket, **what) -> None:
    connection.sendall(json.dumps(what).encode())


def kill(server: int) -> None:
    """Kill the server, not yet waited for, and its group, which it may not have made yet."""
    os.kill(server, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server, signal.SIGKILL)


def run_server(request: dict, scratch: str) -> None:
    """Run the requested module in this process; exits as ``python -m MODULE`` would."""
    os.setpgid(0, 0)
    os.chdir(scratch)
    os.environ.clear()
    os.environ.update(request["environment"], TMPDIR=scratch)
    tempfile.tempdir = None
    sys.argv = ["", *request["arguments"]]
    sys.orig_argv = [sys.executable, "-m", request["module"], *request["arguments"]]
    fork_new_processes()
    if (file := Path(request["module"])).suffix == ".py":
        sys.path.insert(0, str(file.parent))
        runpy.run_path(str(file), run_name="__main__")
    else:
        runpy.run_module(request["module"], run_name="__main__", alter_sys=True)
    sys.exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
