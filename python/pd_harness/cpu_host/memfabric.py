"""The real MemFabric, on a host without an Ascend driver.

`scripts/setup.sh` installs its wheels and builds a stand-in for the driver (``driver/``); this
module lets the engine import them.
"""

import ctypes
import errno
import importlib.abc
import importlib.machinery
import os
import sys
from pathlib import Path

from pd_harness.releases import release

MEMFABRIC_VARIABLE = "SGLANG_PD_MEMFABRIC"
DEFAULT_MEMFABRIC = "1.3.0"
PACKAGE = "memfabric_hybrid"
CHECKOUT = Path(__file__).resolve().parents[3]
FOLDER = CHECKOUT / ".pd-env" / "memfabric"
DRIVER = FOLDER / "driver"
# Where MemFabric expects the driver's library; the driver's other libraries are links to it.
LIBRARY = DRIVER / "lib64" / "libascend_hal.so"
RELEASES = sorted(
    (file.stem for file in (CHECKOUT / "scripts" / "requirements" / "memfabric").glob("*.txt")),
    key=lambda version: [int(part) for part in version.split(".")],
)


# From this release on a transfer engine has its port once it is initialized, and needs no store.
FIRST_WITHOUT_STORE = (1, 1, 3)
# Their first write to a decode rank occasionally hangs; tests then restart the pair.
MAY_HANG = ("1.2.1",)
# Stock 0.5.9 decode serves with this release, but not with those that choose their port later.
FOR_STOCK_DECODE_0_5_9 = "1.0.8"


def chosen_memfabric() -> str:
    """The release that ``SGLANG_PD_MEMFABRIC`` names, or the newest that is tested."""
    return os.environ.get(MEMFABRIC_VARIABLE) or DEFAULT_MEMFABRIC


def memfabric_for(decode_engine: str) -> str:
    """The release that the variable names, or the newest tested one that this engine decodes with.

    ``decode_engine`` is ``stock`` or ``patched``.
    """
    if MEMFABRIC_VARIABLE not in os.environ and (release(), decode_engine) == ("0.5.9", "stock"):
        return FOR_STOCK_DECODE_0_5_9
    return chosen_memfabric()


def discovers_peers_late(version: str) -> bool:
    """Whether peers discover a new peer only after several seconds."""
    return tuple(map(int, version.split("."))) < FIRST_WITHOUT_STORE


class MemFabricFinder(importlib.abc.MetaPathFinder):
    """Finds the MemFabric release that is chosen at the time of the import."""

    def find_spec(self, name, path=None, target=None):
        """The package's spec; points MemFabric at the stand-in for the driver.

        Raises:
            ImportError: the release or the driver is missing, or does not load.
        """
        if name != PACKAGE:
            return None
        version = chosen_memfabric()
        if reason := memfabric_error(version):
            raise ImportError(reason, name=PACKAGE)
        os.environ["ASCEND_HOME_PATH"] = str(DRIVER)
        return importlib.machinery.PathFinder.find_spec(name, [str(FOLDER / version)])


def install() -> None:
    """Make MemFabric importable; an installed one comes first."""
    sys.meta_path.append(MemFabricFinder())


def memfabric_error(version: str) -> str | None:
    """Why this release cannot be imported here; None if it can."""
    if version not in RELEASES:
        return f"{MEMFABRIC_VARIABLE} is {version}; set it to one of {', '.join(RELEASES)}"
    missing = [path for path in (FOLDER / version, LIBRARY) if not path.exists()]
    if missing:
        return (
            f"{missing[0].relative_to(CHECKOUT)} is missing; run `scripts/setup.sh --memfabric "
            f"{version}`, which reports why if it cannot be made"
        )
    try:
        ctypes.CDLL(str(LIBRARY))
    except OSError as error:
        return (
            f"the stand-in for the Ascend driver does not load ({error}); it must be built "
            f"for {os.uname().machine}: remove {DRIVER.relative_to(CHECKOUT)} and run "
            "`scripts/setup.sh` again"
        )
    return None


def process_copy_error() -> str | None:
    """Why a process cannot write to another one here, as the stand-in does; None if it can."""
    libc = ctypes.CDLL(None, use_errno=True)
    there = ctypes.create_string_buffer(b"before", 6)
    ready, done = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        # Loading the driver allows other processes to access this one's memory.
        ctypes.CDLL(str(LIBRARY))
        os.write(ready[1], b"1")
        os.read(done[0], 1)
        os._exit(there.raw != b"after!")
    os.read(ready[0], 1)

    class Range(ctypes.Structure):
        _fields_ = [("start", ctypes.c_void_p), ("size", ctypes.c_size_t)]

    data = ctypes.create_string_buffer(b"after!", 6)
    own, peers = Range(ctypes.addressof(data), 6), Range(ctypes.addressof(there), 6)
    written = libc.process_vm_writev(child, ctypes.byref(own), 1, ctypes.byref(peers), 1, 0)
    number = ctypes.get_errno()
    os.write(done[1], b"1")
    _, status = os.waitpid(child, 0)
    for end in (*ready, *done):
        os.close(end)
    if written == 6 and status == 0:
        return None
    errno_text = f"{errno.errorcode.get(number, number)}, {os.strerror(number)}"
    return (
        f"process_vm_writev is refused here ({errno_text}): the stand-in for the Ascend driver "
        "copies between processes with it; allow the container to call it (by a seccomp profile, "
        "or the capability SYS_PTRACE)"
    )


def check(version: str) -> None:
    """Import this release and copy between two processes.

    Raises:
        SystemExit: the import or the copy fails; its text says why.
    """
    os.environ[MEMFABRIC_VARIABLE] = version
    install()
    try:
        __import__(PACKAGE)
    except (ImportError, OSError) as error:
        sys.exit(f"MemFabric {version} cannot be imported: {error}")
    if reason := process_copy_error():
        sys.exit(reason)


if __name__ == "__main__":
    check(sys.argv[1])
