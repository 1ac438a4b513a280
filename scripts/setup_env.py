"""Prepare .pd-env/: Python environments with the stock and the patched engine.

    base/              torch, and the packages that all releases of the engine share
    RELEASE/packages/  packages that this release needs in another version, or in addition
    RELEASE/stock/     the published engine, untouched
    RELEASE/patched/   the published engine with this checkout's patch set applied
    nixl/              releases of NIXL other than base's, each requested by --nixl
    memfabric/         MemFabric, which `ascend` servers use, and a stand-in for its driver

uv installs packages, pip installs torch. A finished step is skipped; an interrupted one is
repeated.
"""

import argparse
import ctypes
import fcntl
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from setup_memfabric import memfabric
from setup_steps import BASE, PD_ENV, REQUIREMENTS, ROOT, digest, log, run, step, uv_install

from pd_harness.cpu_host.memfabric import FOR_STOCK_DECODE_0_5_9, chosen_memfabric
from pd_harness.cpu_host.memfabric import RELEASES as MEMFABRICS
from pd_harness.releases import RELEASE_VARIABLE, chosen_release

COMMON = REQUIREMENTS / "common.txt"
RELEASES = sorted({file.stem for file in REQUIREMENTS.glob("*.txt")} - {COMMON.stem})
DEFAULT_TORCH = "torch==2.13.0"
UV = "uv==0.13.9"
# Set-up compiles all modules on all cores: with PYTHONDONTWRITEBYTECODE each import would compile
# them again.  Tests are never imported, and some need a newer Python.
NOT_COMPILED = "/tests/|py312"
NO_CUDA = ROOT / "scripts" / "no_cuda.c"
# The folders of python/ that determine what `apply` writes.
PATCH_SET = ("sglang", "engines", "sglang_pd")
FIRST_IMPORT = "sglang.srt.managers.scheduler, sglang.srt.entrypoints.http_server"

# Libraries that Mooncake's transfer engine is linked with, and their Debian packages.
SYSTEM_LIBRARIES = {
    "libibverbs.so.1": "libibverbs1",
    "librdmacm.so.1": "librdmacm1",
    "libnuma.so.1": "libnuma1",
    "liburing.so.2": "liburing2",
    "libcurl.so.4": "libcurl4",
}
# Programs that some tests run, and their Debian packages; the tests are skipped without them.
PROGRAMS = {"quilt": "quilt", "promtool": "prometheus"}

# In every environment: the release's packages before base's, this checkout, and the CPU host if
# its variable is set.
PATH_FILE = """\
{packages}
{base}
{checkout}
import os; "SGLANG_PD_CPU_HOST" in os.environ and \
__import__("pd_harness.cpu_host.startup", fromlist=["activate"]).activate()
"""


def is_done(folder: Path, key: str, stamp: str = ".ready") -> bool:
    file = folder / stamp
    return (folder / "bin" / "python").exists() and file.exists() and file.read_text() == key


def site_packages(environment: Path) -> Path:
    return environment / "lib" / "python3.11" / "site-packages"


def missing_libraries() -> list[str]:
    """Debian packages of the libraries that the dynamic linker cannot load."""
    missing = []
    for library, package in SYSTEM_LIBRARIES.items():
        try:
            ctypes.CDLL(library)
        except OSError:
            missing.append(package)
    return missing


def missing_programs() -> list[str]:
    """Debian packages of the programs that are not installed."""
    return [package for program, package in PROGRAMS.items() if not shutil.which(program)]


def system_packages(title: str, tests: bool) -> None:
    """Install missing packages if this user may; otherwise log their names and go on.

    Args:
        tests: Whether to install the programs that some tests run, too.
    """
    missing = [*missing_libraries(), *(missing_programs() if tests else ())]
    if not missing:
        return
    if os.geteuid() == 0 and shutil.which("apt-get"):
        with step(f"{title} ({' '.join(missing)})"):
            # A failure is not the end: what is missing then is named below.
            subprocess.run(["apt-get", "update", "-q"], stdout=sys.stderr)
            install = ["apt-get", "install", "-q", "-y", "--no-install-recommends"]
            subprocess.run([*install, *missing], stdout=sys.stderr)
    for consequence, still_missing in (
        ("Mooncake will not load; NIXL works without", missing_libraries()),
        ("Some tests will be skipped", missing_programs() if tests else []),
    ):
        if still_missing:
            log(
                f"{consequence}: system packages are missing. "
                f"Install them, e.g. `sudo apt-get install {' '.join(still_missing)}`."
            )


def base(title: str) -> None:
    """Create the environment with torch and the packages that all releases share."""
    chosen = os.environ.get("SGLANG_PD_TORCH")
    torch = chosen or DEFAULT_TORCH
    key = digest(COMMON, text=UV)
    # Without a choice now, keep the torch that was chosen when base was made.
    if is_done(BASE, key) and (not chosen or is_done(BASE, torch, ".torch")):
        return
    refuse_link(BASE)
    python = BASE / "bin" / "python"
    with step(f"{title} in .pd-env/base"):
        run(sys.executable, "-m", "venv", "--clear", BASE)
        pip = [python, "-m", "pip", "install", "--no-compile"]
        run(*pip, "--quiet", UV)
        uv_install(python, "-r", COMMON)
        if torch == "existing":
            (site_packages(BASE) / "existing_torch.pth").write_text(f"{existing_torch()}\n")
        else:
            run(*pip, *shlex.split(torch))
        compile_modules(site_packages(BASE))
        run(python, "-c", "import torch; print('torch', torch.__version__)")
        (BASE / ".torch").write_text(torch)
        (BASE / ".ready").write_text(key)


def compile_modules(folder: Path) -> None:
    log("compiling modules")
    run(BASE / "bin" / "python", "-m", "compileall", "-q", "-j", "0", "-x", NOT_COMPILED, folder)


def copy_compiled_modules(source: Path, target: Path) -> None:
    """Copy the bytecode of a wheel's modules to another copy of them, which has the same times."""
    for file in source.rglob("*.pyc"):
        copy = target / file.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(file, copy)


def existing_torch() -> Path:
    """The folder from which this Python imports torch."""
    ask = "import pathlib, torch; print(pathlib.Path(torch.__file__).parents[1])"
    found = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True)
    if found.returncode:
        sys.exit(
            f"setup: SGLANG_PD_TORCH=existing, but {sys.executable} has no torch:\n{found.stderr}"
        )
    return Path(found.stdout.strip())


def refuse_link(folder: Path) -> None:
    """Exit if a folder that is to be made anew is a link to another checkout's, which uses it."""
    if folder.is_symlink():
        sys.exit(
            f"setup: .pd-env/{folder.relative_to(PD_ENV)} is a link to {folder.resolve()}, which "
            "is not what this checkout needs; remove the link, or run scripts/setup.sh in the "
            "checkout that it leads to"
        )


def packages(title: str, release: str) -> None:
    """Install the packages of this release of the engine that differ from base's."""
    folder, wanted = PD_ENV / release / "packages", REQUIREMENTS / f"{release}.txt"
    stamp, key = folder / ".ready", digest(wanted, text=(BASE / ".ready").read_text())
    if stamp.exists() and stamp.read_text() == key:
        return
    refuse_link(folder)
    with step(f"{title} in .pd-env/{release}/packages"):
        shutil.rmtree(folder, ignore_errors=True)
        uv_install(BASE / "bin" / "python", "--target", folder, "-r", wanted)
        compile_modules(folder)
        stamp.write_text(key)


def engine(title: str, release: str, name: str, imports: bool = True) -> None:
    """Create an environment with just the published engine, which sees its packages and base's.

    ``imports``: whether to try its first import.
    """
    folder, others = PD_ENV / release / name, PD_ENV / release / "packages"
    path_file = PATH_FILE.format(packages=others, base=base_paths(), checkout=ROOT / "python")
    key = digest(text=f"{release}\0{path_file}\0{(others / '.ready').read_text()}")
    if is_done(folder, key):
        return
    refuse_link(folder)
    with step(f"{title} in .pd-env/{release}/{name}"):
        run(sys.executable, "-m", "venv", "--clear", "--without-pip", folder)
        uv_install(folder / "bin" / "python", f"sglang=={release}")
        stock = PD_ENV / release / "stock"
        if folder != stock and is_done(stock, key):
            copy_compiled_modules(site_packages(stock), site_packages(folder))
        (site_packages(folder) / "sglang_pd_env.pth").write_text(path_file)
        compile_modules(site_packages(folder))
        if imports:
            log("first import")
            on_cpu_host = ["SGLANG_PD_CPU_HOST=1", "SGLANG_USE_CPU_ENGINE=1", "TRITON_INTERPRET=1"]
            check = [folder / "bin" / "python", "-c", f"import {FIRST_IMPORT}"]
            run("env", *on_cpu_host, *check, quiet=True)
        (folder / ".ready").write_text(key)


def base_paths() -> str:
    """Lines for a path file: base, and the folder of an existing torch if base uses one."""
    existing = site_packages(BASE) / "existing_torch.pth"
    more = existing.read_text().strip() if existing.exists() else ""
    return "\n".join(filter(None, [str(site_packages(BASE)), more]))


def patch_set(title: str, release: str) -> None:
    """Apply this checkout's patch set to the engine in patched/, anew if the set has changed."""
    folder = PD_ENV / release / "patched"
    key = digest(
        *(ROOT / "python" / name for name in PATCH_SET),
        text=(folder / ".ready").read_text(),
    )
    if is_done(folder, key, ".applied"):
        return
    tool = [folder / "bin" / "python", "-m", "sglang_pd"]
    with step(title):
        if (folder / ".applied").exists():
            run(*tool, "revert")
        (folder / ".applied").write_text("under way")
        run(*tool, "apply", "--preview")
        compile_modules(site_packages(folder) / "sglang" / "srt")
        (folder / ".applied").write_text(key)


def other_nixl(title: str, version: str) -> None:
    """Install this release of NIXL alone, for use on the path before base's."""
    folder = PD_ENV / "nixl" / version
    if folder.exists():
        return
    unfinished = folder.with_name(f"{version}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    with step(f"{title} in .pd-env/nixl/{version}"):
        wanted = [f"nixl=={version}", f"nixl-cu12=={version}"]
        uv_install(BASE / "bin" / "python", "--target", unfinished, *wanted)
        if needs_cuda(unfinished) and shutil.which("cc"):
            (unfinished / "no_cuda").mkdir()
            link = ["-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", NO_CUDA]
            run("cc", "-o", unfinished / "no_cuda" / "libcuda.so.1", *link)
    unfinished.rename(folder)


def needs_cuda(nixl: Path) -> bool:
    """Whether NIXL's UCX plug-in is linked with CUDA's driver, which this machine lacks."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return any(b"libcuda.so.1" in file.read_bytes() for file in nixl.rglob("libplugin_UCX.so"))
    return False


def main() -> None:
    chosen = chosen_release()
    if chosen not in RELEASES:
        sys.exit(f"setup: {RELEASE_VARIABLE} is {chosen!r}, expected one of {', '.join(RELEASES)}")
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
        "engines", nargs="*", metavar="stock|patched", help="engines to prepare (default: both)"
    )
    ask.add_argument(
        "--release",
        action="append",
        choices=RELEASES,
        help=f"release of the engine; may be repeated (default: {chosen})",
    )
    only_named = "; without `stock` or `patched`, prepare no engine"
    ask.add_argument(
        "--tests", action="store_true", help=f"install {', '.join(PROGRAMS)}, which tests run, too"
    )
    ask.add_argument("--nixl", metavar="VERSION", help=f"prepare this release of NIXL{only_named}")
    ask.add_argument(
        "--memfabric",
        action="append",
        choices=MEMFABRICS,
        help=f"prepare this release of MemFabric{only_named}; may be repeated "
        f"(default: {chosen_memfabric()}, with each engine)",
    )
    asked = ask.parse_args()
    alone = asked.nixl or asked.memfabric
    wanted = asked.engines or ([] if alone else ["stock", "patched"])
    memfabrics = asked.memfabric or []
    releases = asked.release or [chosen]
    if wanted:
        memfabrics.append(chosen_memfabric())
    if "stock" in wanted and "0.5.9" in releases:
        memfabrics.append(FOR_STOCK_DECODE_0_5_9)
    if not set(wanted) <= {"stock", "patched"}:
        ask.error(f"unknown engine among {wanted}: choose stock or patched")
    PD_ENV.mkdir(exist_ok=True)
    with (PD_ENV / "setup.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log("waiting for another set-up to finish")
            fcntl.flock(lock, fcntl.LOCK_EX)
        prepare(releases, wanted, asked.nixl, list(dict.fromkeys(memfabrics)), asked.tests)


def prepare(
    releases: list[str],
    engines: list[str],
    nixl: str | None,
    memfabrics: list[str],
    tests: bool,
) -> None:
    """Run the steps in order."""
    steps: list[tuple[str, Callable[[str], None]]] = [
        ("system packages", partial(system_packages, tests=tests)),
        ("torch and packages", base),
    ]
    if nixl:
        steps.append((f"nixl=={nixl}", partial(other_nixl, version=nixl)))
    for version in memfabrics:
        steps.append((f"memfabric-hybrid=={version}", partial(memfabric, version=version)))
    for release in releases if engines else []:
        steps.append((f"packages for sglang=={release}", partial(packages, release=release)))
        for name in engines:
            # One trial import shows whether a system library is missing: releases need the same.
            first = release == releases[0] and name == engines[0]
            install = partial(engine, release=release, name=name, imports=first)
            steps.append((f"sglang=={release}", install))
        if "patched" in engines:
            steps.append(("applying the patch set", partial(patch_set, release=release)))
    for number, (title, do) in enumerate(steps, 1):
        do(f"[{number}/{len(steps)}] {title}")


if __name__ == "__main__":
    main()
