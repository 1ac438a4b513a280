"""Our wheel has the patch set and no engine; pip uninstalls a patched engine completely."""

import json
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
from hf_configs import QWEN3
from toy import ROOT, VERSION, WHEEL_SOURCES

from sglang_pd.install import operations
from sglang_pd.install.engine import find_engine
from sglang_pd.patchset import patches


def pip(*words) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *map(str, words)]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran


@pytest.fixture
def environment(tmp_path):
    """(interpreter, site-packages) of a new virtual environment."""
    venv.create(tmp_path / "venv", with_pip=False)
    (site,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    return tmp_path / "venv/bin/python", site


def toy_wheel(toy, folder: Path) -> Path:
    toy.dist_record.with_name("WHEEL").write_text(
        "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    )
    metadata = toy.dist_record.with_name("METADATA")
    metadata.write_text("Metadata-Version: 2.1\n" + metadata.read_text())
    wheel = folder / f"sglang-{VERSION}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path in toy.site.rglob("*"):
            archive.write(path, path.relative_to(toy.site))
    return wheel


def test_pip_uninstall_removes_patched_engine_completely(toy, environment, tmp_path):
    python, site = environment
    before = set(site.rglob("*"))
    pip("--python", python, "install", "--no-index", toy_wheel(toy, tmp_path))
    engine = find_engine(site)
    assert operations.apply(engine, toy.release())
    code = "import sglang.srt.layout.deep.more, sglang.srt.pool"
    ran = subprocess.run([python, "-c", code], env={})  # it may write compiled files
    assert ran.returncode == 0
    assert list(site.glob("sglang/srt/layout/__pycache__/*.pyc"))
    pip("--python", python, "uninstall", "--yes", "sglang")
    assert set(site.rglob("*")) == before


def test_pip_reinstalls_over_a_patched_engine(toy, environment, tmp_path):
    python, site = environment
    wheel = toy_wheel(toy, tmp_path)
    pip("--python", python, "install", "--no-index", wheel)
    operations.apply(find_engine(site), toy.release())
    pip("--python", python, "install", "--no-index", "--force-reinstall", wheel)
    status = operations.status(find_engine(site), toy.release())
    assert (status.state, status.notes) == ("absent", [])


@pytest.fixture
def run_installed(environment, tmp_path):
    """A function that runs the wheel's tool in its own environment and checks the exit code."""
    source = tmp_path / "source"
    source.mkdir()
    for path in (ROOT / name for name in WHEEL_SOURCES):
        if path.is_dir():
            skip = shutil.ignore_patterns("__pycache__")
            shutil.copytree(path, source / path.name, ignore=skip)
        else:
            shutil.copy(path, source)
    pip("wheel", "--no-deps", "--quiet", "-w", tmp_path, source)
    (wheel,) = tmp_path.glob("sglang_pd-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"sglang_pd"}
    assert not any("pd_harness" in name for name in names)
    data = {name.removeprefix("sglang_pd/data/") for name in names if "/data/" in name}
    ours = {
        str(path.relative_to(ROOT / "python"))
        for tree in ("sglang", "engines")
        for path in (ROOT / "python" / tree).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert data == ours

    python, site = environment
    pip("--python", python, "install", "--no-deps", "--no-index", wheel)
    assert not (site / "sglang").exists()
    others = [path for path in sys.path if path.endswith("site-packages")]
    tool, without_ours = python.with_name("sglang-pd"), {"PYTHONPATH": ":".join(others)}

    def run(*words, code: int = 0) -> None:
        ran = subprocess.run([tool, *words], env=without_ours, capture_output=True, text=True)
        assert ran.returncode == code, ran.stdout + ran.stderr

    return run


def test_wheel_contains_patch_set_but_no_engine(run_installed, tmp_path):
    config = tmp_path / "config.json"
    config.write_text(json.dumps(QWEN3))
    run_installed("plan", "--model", config, "--prefill", "tp=2", "--decode", "tp=1")
    assert patches.TREES == ROOT / "python"


@pytest.mark.nightly  # every run applies to the same engine from the checkout
def test_wheel_applies_and_reverts_patch_set(run_installed, engine_copy):
    for command, code in (("status", 10), ("apply", 0), ("status", 0), ("revert", 0)):
        run_installed(command, "--engine", engine_copy, code=code)


@pytest.mark.nightly
def test_editable_install_has_harness_of_checkout(environment):
    """As npu.yml installs it; the checkout's `sglang` must not hide an engine."""
    python, site = environment
    pip("--python", python, "install", "--no-deps", "--quiet", "--editable", ROOT)
    pip("--python", python, "install", "--quiet", "editables")
    code = "import importlib.util, pd_harness.ports, sglang_pd; print(pd_harness.ports.__file__); "
    code += "print(sglang_pd.__file__, importlib.util.find_spec('sglang'))"
    ran = subprocess.run([python, "-c", code], cwd=site, capture_output=True, text=True)
    files = [
        str(ROOT / "python" / name) for name in ("pd_harness/ports.py", "sglang_pd/__init__.py")
    ]
    assert ran.stdout.split() == [*files, "None"], ran.stderr


@pytest.mark.nightly
def test_npu_tests_are_collected_without_pythonpath():
    """On NPUs they start so, as `python/` on the path would hide an editable engine."""
    command = [sys.executable, "-m", "pytest", "-o", "pythonpath=", "--collect-only", "-q"]
    paths = [ROOT / "test" / ring for ring in ("engine", "transport", "serving", "npu")]
    ran = subprocess.run([*command, *paths], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout[-2000:]
