"""Run a command that must not outlive the one who asked for it.

usage: supervisor.py COMMAND [ARGUMENT...]

The command gets a process group and a temporary folder of its own.  When it ends, or when standard
input is closed, which the kernel does for a killed parent too, every process of that group is
killed and the folder removed.  Ends with the command's status.
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="sglang-pd-", ignore_cleanup_errors=True) as scratch:
        process = subprocess.Popen(
            sys.argv[1:],
            stdin=subprocess.DEVNULL,
            process_group=0,  # and no session, see `cpu_host`
            cwd=scratch,
            env={**os.environ, "TMPDIR": scratch},
        )
        threading.Thread(target=_kill_at_end_of_input, args=(process.pid,), daemon=True).start()
        status = process.wait()
        _kill_group(process.pid)
    return status if status >= 0 else 128 - status


def _kill_at_end_of_input(group: int) -> None:
    # Not through sys.stdin, whose lock a thread must not hold when the interpreter ends.
    while os.read(0, 1024):
        continue
    _kill_group(group)


def _kill_group(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
