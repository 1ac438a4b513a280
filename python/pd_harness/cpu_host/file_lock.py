"""A lock among all processes that share a folder for temporary files."""

import contextlib
import fcntl
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

POLL_INTERVAL_S = 0.0005


class FileLock:
    """A lock whose holder may be slow: after ``timeout_s`` the caller goes on without the lock.

    So a slow holder, such as a write to a dead server, delays the callers in a process only once:
    until the lock was free again, none of them waits. The kernel releases the lock of a process
    that exits.
    """

    def __init__(self, name: str, timeout_s: float = 1.0):
        self.path = Path(tempfile.gettempdir()) / f"sglang-pd-{name}-{os.getuid()}"
        self.timeout_s = self.patience_s = timeout_s
        self.lock = threading.Lock()
        self.pid = None

    @contextlib.contextmanager
    def acquired(self) -> Iterator[bool]:
        """Wait for other processes and this one's threads; yields whether the lock was acquired."""
        end = time.monotonic() + self.patience_s
        if not self.lock.acquire(timeout=self.patience_s):
            self.patience_s = 0.0
            yield False
            return
        held = False
        try:
            held = self._lock_file(end)
            self.patience_s = self.timeout_s if held else 0.0
            yield held
        finally:
            if held:
                fcntl.lockf(self.file, fcntl.LOCK_UN)
            self.lock.release()

    def _lock_file(self, end: float) -> bool:
        if self.pid != os.getpid():  # a fork opens its own file
            self.file, self.pid = self.path.open("a"), os.getpid()
        while True:
            try:
                fcntl.lockf(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except OSError:
                if time.monotonic() >= end:
                    return False
            time.sleep(POLL_INTERVAL_S)
