"""The scripts' own behaviour: usage, refused arguments, and a second run that does nothing."""

import importlib.metadata
import shutil
import subprocess
from pathlib import Path

import pytest
import setup_env

from pd_harness import releases

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
SCRIPTS_WITH_RELEASE = ("bench", "cpu_host", "demo", "evidence", "mutants", "test")


def run(*command, **options) -> subprocess.CompletedProcess:
    return subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, **options
    )


@pytest.mark.parametrize("script", ["setup", *SCRIPTS_WITH_RELEASE])
def test_scripts_print_usage(script):
    found = run(SCRIPTS / f"{script}.sh", "--help")
    assert found.returncode == 0, found.stderr
    assert "usage" in found.stdout.lower()


@pytest.mark.parametrize(
    "script, words, said",
    [
        ("cpu_host", ["--engine", "mine", "true"], "--engine is 'mine'"),
        ("cpu_host", ["--engine"], "--engine is ''"),
        ("cpu_host", [], "usage:"),
        ("demo", ["hccl"], "'hccl' is not nixl, ascend or --stock"),
        ("demo", ["ascend", "--patched"], "'--patched' is not nixl, ascend or --stock"),
        ("demo", ["--stock", "mooncake"], "'mooncake' is not nixl, ascend or --stock"),
        ("setup", ["newest"], "newest"),
        ("setup", ["--release", "0.5.8"], "0.5.8"),
    ],
    ids=str,
)
def test_scripts_refuse_unknown_arguments(script, words, said):
    found = run(SCRIPTS / f"{script}.sh", *words)
    assert found.returncode == 2
    assert said in found.stderr


@pytest.mark.parametrize("script", SCRIPTS_WITH_RELEASE)
@pytest.mark.parametrize("words", [["--release", "0.5.8"], ["--release=common"], ["--release"]])
def test_scripts_refuse_unsupported_release(script, words):
    found = run(SCRIPTS / f"{script}.sh", *words)
    assert found.returncode == 2
    given = words[-1].partition("=")[2] or (words[1:] or [""])[0]
    assert f"--release is '{given}', expected one of: " in found.stderr
    assert "0.5.9" in found.stderr


def test_setup_reports_missing_python_3_11(tmp_path):
    for tool in ("bash", "dirname", "awk"):
        (tmp_path / tool).symlink_to(shutil.which(tool))
    found = run(SCRIPTS / "setup.sh", env={"PATH": str(tmp_path)})
    assert found.returncode == 1
    assert "no Python 3.11" in found.stderr


def test_cpu_host_script_returns_status_of_command():
    ask = "import os, sys, sglang; print(os.environ['SGLANG_PD_CPU_HOST']); sys.exit(7)"
    found = run(SCRIPTS / "cpu_host.sh", "--engine", "stock", "python", "-c", ask)
    assert found.returncode == 7, found.stderr
    assert found.stdout == "1\n"


@pytest.mark.parametrize("name", ["base", "0.5.23/packages", "0.5.23/stock", "0.5.23/patched"])
def test_setup_leaves_linked_folders_alone(name, tmp_path, monkeypatch):
    """A worktree may link to another checkout's environment, which is in use there."""
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    for folder in (theirs / name, ours / "base", ours / "0.5.23" / "packages"):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ".ready").write_text("made for other sources")
    shutil.rmtree(ours / name, ignore_errors=True)
    (ours / name).symlink_to(theirs / name)
    monkeypatch.setattr(setup_env, "PD_ENV", ours)
    monkeypatch.setattr(setup_env, "BASE", ours / "base")
    monkeypatch.setattr(setup_env, "run", None)
    make = {"base": setup_env.base, "packages": setup_env.packages}.get(Path(name).name)
    given = {"base": (), "packages": ("0.5.23",)}.get(Path(name).name, ("0.5.23", Path(name).name))
    with pytest.raises(SystemExit, match=f"setup: .pd-env/{name} is a link to {theirs}"):
        (make or setup_env.engine)("step", *given)
    assert (theirs / name / ".ready").exists()


def test_second_setup_does_nothing():
    assert run(SCRIPTS / "setup.sh", "stock").returncode == 0
    assert run(SCRIPTS / "setup.sh", "stock").stderr == ""


@pytest.mark.parametrize(
    "version, taken",
    [
        (None, None),  # no engine
        ("0.5.23+npu", "0.5.23"),
        ("0.5.9", "0.5.9"),
        ("0.5.9.post1", "0.5.9"),
        ("0.5.9.post1+gdb4e49b.d20260401", "0.5.9"),
        ("0.5.10.dev17+g0123456", "0.5.9"),
        ("0.5.17", "0.5.9"),
        ("0.5.22", "0.5.18"),
        ("0.5.23.dev4", "0.5.23"),
        ("0.5.24.dev12+g0123456", "0.5.23"),
        ("0.0.0", None),
        ("0.5.8", None),
    ],
)
def test_release_follows_installed_engine(version, taken, monkeypatch):
    """Images may be built from commits, but the tests' tables have supported releases only.

    Without an engine of a supported release, the variable counts, then the default.
    """

    def installed(name):
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", installed)
    uncached = releases.installed_release.__wrapped__
    monkeypatch.setattr(releases, "installed_release", uncached)
    monkeypatch.delenv(releases.RELEASE_VARIABLE, raising=False)
    assert releases.release() == (taken or releases.default_release())
    monkeypatch.setenv(releases.RELEASE_VARIABLE, "0.5.10")
    assert releases.release() == (taken or "0.5.10")
