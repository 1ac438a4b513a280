"""The scripts' own behaviour: usage, refused arguments, and a second run that does nothing."""

import importlib.metadata
import shutil
import subprocess
from pathlib import Path

import pytest

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
    ("arguments", "reason"),
    [
        (["--engine", "mine", "true"], "--engine is 'mine'"),
        (["--engine"], "--engine is ''"),
        ([], "usage:"),
    ],
)
def test_cpu_host_script_refuses_unknown_engine(arguments, reason):
    found = run(SCRIPTS / "cpu_host.sh", *arguments)
    assert found.returncode == 2
    assert reason in found.stderr


@pytest.mark.parametrize("words", [["hccl"], ["ascend", "--patched"], ["--stock", "mooncake"]])
def test_demo_refuses_unknown_arguments(words):
    found = run(SCRIPTS / "demo.sh", *words)
    assert found.returncode == 2
    assert f"'{words[-1]}' is not nixl, ascend or --stock" in found.stderr


def test_setup_refuses_unknown_engine():
    found = run(SCRIPTS / "setup.sh", "newest")
    assert found.returncode == 2
    assert "newest" in found.stderr


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


def test_second_setup_does_nothing():
    assert run(SCRIPTS / "setup.sh", "stock").returncode == 0
    assert run(SCRIPTS / "setup.sh", "stock").stderr == ""


@pytest.mark.parametrize("script", SCRIPTS_WITH_RELEASE)
@pytest.mark.parametrize("words", [["--release", "0.5.8"], ["--release=common"], ["--release"]])
def test_scripts_refuse_unsupported_release(script, words):
    found = run(SCRIPTS / f"{script}.sh", *words)
    assert found.returncode == 2
    given = words[-1].partition("=")[2] or (words[1:] or [""])[0]
    assert f"--release is '{given}', expected one of: " in found.stderr
    assert "0.5.9" in found.stderr


def test_setup_refuses_unsupported_release():
    found = run(SCRIPTS / "setup.sh", "--release", "0.5.8")
    assert found.returncode == 2
    assert "0.5.8" in found.stderr


def test_release_follows_installed_engine(monkeypatch):
    def nothing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.5.23+npu")
    assert releases.release() == "0.5.23"
    monkeypatch.setattr(importlib.metadata, "version", nothing)
    assert releases.release() == releases.DEFAULT_RELEASE_FILE.read_text().strip()
    monkeypatch.setenv(releases.RELEASE_VARIABLE, "0.5.10")
    assert releases.release() == "0.5.10"


@pytest.mark.parametrize(
    "version, taken",
    [
        ("0.5.9", "0.5.9"),
        ("0.5.9.post1", "0.5.9"),
        ("0.5.9.post1+gdb4e49b.d20260401", "0.5.9"),
        ("0.5.10.dev17+g0123456", "0.5.9"),
        ("0.5.22", "0.5.9"),
        ("0.5.23.dev4", "0.5.23"),
        ("0.5.24.dev12+g0123456", "0.5.23"),
        ("0.0.0", releases.default_release()),
        ("0.5.8", releases.default_release()),
    ],
)
def test_version_between_releases_maps_to_supported_one(version, taken, monkeypatch):
    """Images may be built from commits, but the tests' tables have supported releases only."""
    monkeypatch.delenv(releases.RELEASE_VARIABLE, raising=False)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    assert releases.release() == taken
