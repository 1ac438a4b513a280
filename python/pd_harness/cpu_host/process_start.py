"""How a forked server's own processes start: as forks, too, which need not import the engine."""

import functools
import multiprocessing
import os
import signal
import socket
from collections.abc import Callable
from multiprocessing import connection, forkserver, popen_fork, popen_forkserver, popen_spawn_posix

# The process that has called `_start_forker`, since its children inherit the forker's address.
_owner_of_forker: int | None = None


def fork_new_processes() -> None:
    """Let ``multiprocessing`` fork in this process and its children where it would spawn."""
    multiprocessing.context.SpawnProcess._Popen = staticmethod(_start)
    os.register_at_fork(after_in_child=_reset_signal_handlers)


def is_single_threaded() -> bool:
    """Whether this process has one thread, counting native threads."""
    return len(os.listdir("/proc/self/task")) == 1


def _start(process):
    """Fork a process instead of spawning it, unless the fork would lack threads of this one."""
    if is_single_threaded():
        # By the time the DP controller starts schedulers, ZeroMQ has started threads in it.
        if getattr(process._target, "__name__", None) == "run_data_parallel_controller_process":
            process._target = functools.partial(_run_with_forker, process._target)
        return popen_fork.Popen(process)
    if _owner_of_forker == os.getpid():
        return popen_forkserver.Popen(process)
    return popen_spawn_posix.Popen(process)


def _reset_signal_handlers() -> None:
    """Restore default handlers, since a spawned process would not inherit its parent's."""
    for number in (signal.SIGQUIT, signal.SIGTERM, signal.SIGCHLD, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)


def _run_with_forker(target: Callable, *arguments, **named) -> None:
    _start_forker()
    target(*arguments, **named)


def _start_forker() -> None:
    """Fork the server of multiprocessing's "forkserver" method, which otherwise runs a new Python.

    Processes start with the environment that this process has now.  The forker ends when this
    process does, and passes on the SIGQUIT with which a scheduler tells its parent that it failed.
    """
    global _owner_of_forker
    from sglang.srt.utils import kill_itself_when_parent_died

    server = forkserver._forkserver
    address = connection.arbitrary_address("AF_UNIX")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        ended, alive = os.pipe()
        owner = os.getpid()
        forker = os.fork()
        if forker == 0:
            kill_itself_when_parent_died()
            signal.signal(signal.SIGQUIT, lambda *_: os.kill(owner, signal.SIGQUIT))
            forkserver.main(listener.fileno(), ended, [])  # does not return
        os.close(ended)
    server._forkserver_address = address
    server._forkserver_alive_fd = alive
    server._forkserver_pid = forker
    _owner_of_forker = owner
