"""Run a command that must not outlive its caller.

usage: supervisor.py COMMAND [ARGUMENT...]

The command gets its own process group and temporary folder.  When the command exits, or when
standard input is closed (the kernel closes it for a killed parent, too), the supervisor kills every
process of that group, removes the folder, and exits with the command's status.
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
            process_group=0,  # but no session of its own, see `cpu_host`
            cwd=scratch,
            env={**os.environ, "TMPDIR": scratch},
        )
        threading.Thread(target=_kill_at_end_of_input, args=(process.pid,), daemon=True).start()
        status = process.wait()
        _kill_group(process.pid)
    return status if status >= 0 else 128 - status


def _kill_at_end_of_input(group: int) -> None:
    # Not through sys.stdin, whose lock a thread must not hold when the interpreter exits.
    while os.read(0, 1024):
        continue
    _kill_group(group)


def _kill_group(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
