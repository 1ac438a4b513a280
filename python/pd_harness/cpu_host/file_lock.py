"""A turn that all processes with one folder for temporary files take one after the other."""

import contextlib
import fcntl
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

POLL_INTERVAL_S = 0.0005  # seconds between two looks


class FileLock:
    """``taken()`` waits for the turn; after ``patience`` seconds it goes on without.

    So one that is long in coming, such as a write to a dead server, holds up nobody for longer. A
    process that ends gives its turn back.
    """

    def __init__(self, name: str, timeout_s: float = 1.0):
        self.path = Path(tempfile.gettempdir()) / f"sglang-pd-{name}-{os.getuid()}"
        self.timeout_s = timeout_s
        self.lock = threading.Lock()
        self.pid = None

    @contextlib.contextmanager
    def acquired(self) -> Iterator[bool]:
        """Whether it was had, from other processes and from this one's threads."""
        end = time.monotonic() + self.timeout_s
        if not self.lock.acquire(timeout=self.timeout_s):
            yield False
            return
        held = False
        try:
            held = self._lock_file(end)
            yield held
        finally:
            if held:
                fcntl.lockf(self.file, fcntl.LOCK_UN)
            self.lock.release()

    def _lock_file(self, end: float) -> bool:
        if self.pid != os.getpid():  # a fork has a file of its own
            self.file, self.pid = self.path.open("a"), os.getpid()
        while True:
            try:
                fcntl.lockf(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except OSError:
                if time.monotonic() >= end:
                    return False
            time.sleep(POLL_INTERVAL_S)
