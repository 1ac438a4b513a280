"""Prepare .pd-env/: Python environments with the stock and the patched engine.

    base/     torch and every package that the engine imports, once
    stock/    the published engine, untouched
    patched/  the published engine with this checkout's patch set applied
    nixl/     other releases of NIXL than base's, each asked for by --nixl

A step that is done is left alone; one that was interrupted is done again from its beginning.
Everything that is installed is logged in .pd-env/logs/setup.log.
"""

import argparse
import ctypes
import fcntl
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PD_ENV = ROOT / ".pd-env"
LOG = PD_ENV / "logs" / "setup.log"
BASE = PD_ENV / "base"
REQUIREMENTS = ROOT / "scripts" / "requirements.txt"
ENGINE = "sglang==0.5.9"
DEFAULT_TORCH = "torch==2.13.0"
# Modules are compiled on all cores rather than by pip: else at each import where the environment
# says PYTHONDONTWRITEBYTECODE.  Tests are never imported, and some need a newer Python.
NOT_COMPILED = "/tests/|py312"
PIP_OPTIONS = ["--no-compile", "--progress-bar", "off"]
NO_CUDA = ROOT / "scripts" / "no_cuda.c"
# Of python/sglang_pd: starts and asks servers, and does not decide what the patch set writes.
HARNESS = {"cpu_host", "cluster.py", "demo.py", "forks.py", "keeper.py", "ports.py", "__pycache__"}
FIRST_IMPORT = "sglang.srt.managers.scheduler, sglang.srt.entrypoints.http_server"

# Libraries that Mooncake's transfer engine is linked with, and the Debian packages that bring them.
SYSTEM_LIBRARIES = {
    "libibverbs.so.1": "libibverbs1",
    "librdmacm.so.1": "librdmacm1",
    "libnuma.so.1": "libnuma1",
    "liburing.so.2": "liburing2",
    "libcurl.so.4": "libcurl4",
}

# In every environment: the packages of base, this checkout, and the CPU host if it is asked for.
PATH_FILE = """\
{base}
{checkout}
import os; "SGLANG_PD_CPU_HOST" in os.environ and \
__import__("sglang_pd.cpu_host.startup", fromlist=["activate"]).activate()
"""


def say(text: str) -> None:
    print(f"setup: {text}", file=sys.stderr, flush=True)


class Progress:
    """One line per step: rewritten every second on a terminal, every 20 seconds in a log."""

    def __init__(self, title: str):
        self.title = title
        self.detail = ""
        self.start = time.monotonic()
        self.terminal = sys.stderr.isatty()
        self.done = threading.Event()

    def __enter__(self):
        say(f"{self.title} ...")
        self.ticker = threading.Thread(target=self._tick, daemon=True)
        self.ticker.start()
        return self

    def __exit__(self, kind, error, trace):
        self.done.set()
        self.ticker.join()
        if kind is None:
            say(self._line("done"))

    def _line(self, state: str) -> str:
        seconds = time.monotonic() - self.start
        return f"{self.title}: {state}, {seconds:.0f} s"

    def _tick(self) -> None:
        while not self.done.wait(1 if self.terminal else 20):
            line = self._line(self.detail or "running")
            if self.terminal:
                print(f"\r\033[Ksetup: {line}", end="", file=sys.stderr, flush=True)
            else:
                say(line)
        if self.terminal:
            print("\r\033[K", end="", file=sys.stderr)


def run(progress: Progress, *command: str | Path, total: int = 0) -> None:
    """Run a command, its output to the log; counts what pip collects out of ``total``.

    Raises:
        SystemExit: it failed; the message holds the end of its output.
    """
    tail: list[str] = []
    collected = 0
    words = [str(word) for word in command]
    with LOG.open("a") as log:
        print(f"\n$ {shlex.join(words)}", file=log, flush=True)
        process = subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        )
        for line in process.stdout:
            log.write(line)
            tail = [*tail[-19:], line.rstrip()]
            if line.startswith("Collecting "):
                collected += 1
                of_all = f" of {total}" if total else ""
                progress.detail = f"{collected}{of_all} packages fetched"
            elif line.startswith("Installing collected packages"):
                progress.detail = f"installing {line.count(',') + 1} packages"
        if process.wait() != 0:
            print(file=sys.stderr)
            sys.exit(
                "\n".join(tail)
                + f"\nsetup: this failed (status {process.returncode}): {shlex.join(words)}"
                + f"\nsetup: the whole log is {LOG}; run again to resume"
            )


def digest(*paths: Path, text: str = "") -> str:
    """A hash over the names and bytes of the files at or below ``paths``, and ``text``."""
    state = hashlib.sha256(text.encode())
    for path in paths:
        files = [path] if path.is_file() else sorted(path.rglob("*"))
        for file in files:
            if file.is_file() and "__pycache__" not in file.parts:
                data = file.read_bytes()
                state.update(f"{file.relative_to(ROOT)}\0{len(data)}\0".encode() + data)
    return state.hexdigest()


def is_done(folder: Path, key: str, stamp: str = ".ready") -> bool:
    file = folder / stamp
    return (folder / "bin" / "python").exists() and file.exists() and file.read_text() == key


def site_packages(environment: Path) -> Path:
    return environment / "lib" / "python3.11" / "site-packages"


def missing_libraries() -> list[str]:
    """Debian packages of the libraries that the dynamic linker does not find."""
    missing = []
    for library, package in SYSTEM_LIBRARIES.items():
        try:
            ctypes.CDLL(library)
        except OSError:
            missing.append(package)
    return missing


def system_libraries(title: str) -> None:
    """Install the missing libraries where that is allowed; else name them and go on."""
    missing = missing_libraries()
    if not missing:
        return
    if os.geteuid() == 0 and shutil.which("apt-get"):
        with Progress(f"{title} ({' '.join(missing)})") as progress:
            run(progress, "apt-get", "update")
            run(progress, "apt-get", "install", "-y", "--no-install-recommends", *missing)
        missing = missing_libraries()
    if missing:
        say(
            f"Mooncake will not load: these system packages are missing: {' '.join(missing)}. "
            f"Install them, e.g. `sudo apt-get install {' '.join(missing)}`. NIXL works without."
        )


def base(title: str) -> None:
    """The environment with torch and all packages."""
    chosen = os.environ.get("SGLANG_PD_TORCH")
    torch = chosen or DEFAULT_TORCH
    key = digest(REQUIREMENTS)
    # Not chosen now: the torch that was chosen when it was made is right.
    if is_done(BASE, key) and (not chosen or is_done(BASE, torch, ".torch")):
        return
    names = [line for line in REQUIREMENTS.read_text().splitlines() if "==" in line]
    with Progress(f"{title} in .pd-env/base") as progress:
        run(progress, sys.executable, "-m", "venv", "--clear", BASE)
        pip = [BASE / "bin" / "python", "-m", "pip", "install", *PIP_OPTIONS]
        run(progress, *pip, "--no-deps", "-r", REQUIREMENTS, total=len(names))
        if torch == "existing":
            (site_packages(BASE) / "existing_torch.pth").write_text(f"{existing_torch()}\n")
        else:
            progress.detail = "torch"
            run(progress, *pip, *shlex.split(torch))
        compile_modules(progress, site_packages(BASE))
        run(progress, BASE / "bin" / "python", "-c", "import torch; print(torch.__version__)")
        (BASE / ".torch").write_text(torch)
        (BASE / ".ready").write_text(key)


def compile_modules(progress: Progress, folder: Path) -> None:
    progress.detail = "compiling modules"
    compile_all = [BASE / "bin" / "python", "-m", "compileall", "-q", "-j", "0"]
    run(progress, *compile_all, "-x", NOT_COMPILED, folder)


def existing_torch() -> Path:
    """The folder from which the Python that runs this imports torch."""
    ask = "import pathlib, torch; print(pathlib.Path(torch.__file__).parents[1])"
    found = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True)
    if found.returncode:
        sys.exit(
            f"setup: SGLANG_PD_TORCH=existing, but {sys.executable} has no torch:\n{found.stderr}"
        )
    return Path(found.stdout.strip())


def engine(title: str, name: str) -> None:
    """A light environment with the published engine, which sees the packages of base."""
    folder = PD_ENV / name
    path_file = PATH_FILE.format(base=base_paths(), checkout=ROOT / "python")
    key = digest(text=f"{ENGINE}\0{path_file}\0{(BASE / '.ready').read_text()}")
    if is_done(folder, key):
        return
    with Progress(f"{title} in .pd-env/{name}") as progress:
        run(progress, sys.executable, "-m", "venv", "--clear", "--without-pip", folder)
        pip = [BASE / "bin" / "python", "-m", "pip", "--python", folder / "bin" / "python"]
        run(progress, *pip, "install", *PIP_OPTIONS, "--no-deps", ENGINE)
        (site_packages(folder) / "sglang_pd_env.pth").write_text(path_file)
        compile_modules(progress, site_packages(folder))
        progress.detail = "first import"
        on_cpu_host = ["SGLANG_PD_CPU_HOST=1", "SGLANG_USE_CPU_ENGINE=1", "TRITON_INTERPRET=1"]
        check = [folder / "bin" / "python", "-c", f"import {FIRST_IMPORT}"]
        run(progress, "env", *on_cpu_host, *check)
        (folder / ".ready").write_text(key)


def base_paths() -> str:
    """Lines for a path file: base, and the folder of an existing torch if that is used."""
    existing = site_packages(BASE) / "existing_torch.pth"
    more = existing.read_text().strip() if existing.exists() else ""
    return "\n".join(filter(None, [str(site_packages(BASE)), more]))


def patch_set(title: str) -> None:
    """Apply this checkout's patch set to the engine in patched/, again if it has changed."""
    folder = PD_ENV / "patched"
    key = digest(
        ROOT / "python" / "sglang",
        *(path for path in sorted((ROOT / "python" / "sglang_pd").glob("*")) if is_tool(path)),
        text=(folder / ".ready").read_text(),
    )
    if is_done(folder, key, ".applied"):
        return
    tool = [folder / "bin" / "python", "-m", "sglang_pd"]
    with Progress(title) as progress:
        if (folder / ".applied").exists():
            run(progress, *tool, "revert")
        (folder / ".applied").write_text("under way")
        run(progress, *tool, "apply")
        (folder / ".applied").write_text(key)


def other_nixl(title: str, version: str) -> None:
    """NIXL of this release alone, to be put on the path before base's."""
    folder = PD_ENV / "nixl" / version
    if folder.exists():
        return
    unfinished = folder.with_name(f"{version}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    with Progress(f"{title} in .pd-env/nixl/{version}") as progress:
        pip = [BASE / "bin" / "python", "-m", "pip", "install", *PIP_OPTIONS]
        wanted = [f"nixl=={version}", f"nixl-cu12=={version}"]
        run(progress, *pip, "--no-deps", "--target", unfinished, *wanted)
        if needs_cuda(unfinished) and shutil.which("cc"):
            (unfinished / "no_cuda").mkdir()
            link = ["-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", NO_CUDA]
            run(progress, "cc", "-o", unfinished / "no_cuda" / "libcuda.so.1", *link)
    unfinished.rename(folder)


def needs_cuda(nixl: Path) -> bool:
    """Whether NIXL's UCX plug-in is linked with CUDA's driver, and there is none here."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return any(b"libcuda.so.1" in file.read_bytes() for file in nixl.rglob("libplugin_UCX.so"))
    return False


def is_tool(path: Path) -> bool:
    """Whether ``sglang_pd/PATH`` decides what `apply` writes; the CPU host and the demo do not."""
    return path.name not in HARNESS


def main() -> None:
    ask = argparse.ArgumentParser(
        prog="scripts/setup.sh",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"""\
SGLANG_PD_TORCH chooses torch: arguments of `pip install` (default: {DEFAULT_TORCH}), e.g.
"torch==2.13.0 --index-url URL" with the URL of PyTorch's CPU index, which saves gigabytes of CUDA
packages, or a wheel's path; or "existing" for the torch that this Python already has.""",
    )
    ask.add_argument(
        "engines", nargs="*", metavar="stock|patched", help="which to prepare (default: both)"
    )
    ask.add_argument(
        "--nixl",
        metavar="VERSION",
        help="prepare this release of NIXL as well, and no engine that is not named",
    )
    asked = ask.parse_args()
    wanted = asked.engines or ([] if asked.nixl else ["stock", "patched"])
    if not set(wanted) <= {"stock", "patched"}:
        ask.error(f"unknown engine among {wanted}: choose stock or patched")
    LOG.parent.mkdir(parents=True, exist_ok=True)
    with (PD_ENV / "setup.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("waiting for another set-up to finish")
            fcntl.flock(lock, fcntl.LOCK_EX)
        prepare(wanted, asked.nixl)


def prepare(wanted: list[str], nixl: str | None) -> None:
    """Run the steps in order."""
    steps = 2 + bool(nixl) + len(wanted) + ("patched" in wanted)
    system_libraries(f"[1/{steps}] system libraries")
    base(f"[2/{steps}] torch and packages")
    if nixl:
        other_nixl(f"[3/{steps}] nixl=={nixl}", nixl)
    for number, name in enumerate(wanted, 3 + bool(nixl)):
        engine(f"[{number}/{steps}] {ENGINE}", name)
    if "patched" in wanted:
        patch_set(f"[{steps}/{steps}] applying the patch set")


if __name__ == "__main__":
    main()
