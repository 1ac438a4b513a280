"""Our wheel has the patch set and no engine; what pip does with a patched engine."""

import json
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
from hf_configs import QWEN3
from toy import ENGINE, ROOT, VERSION, WHEEL_SOURCES, Toy, snapshot, write

from sglang_pd import guard
from sglang_pd.install import engine as engines
from sglang_pd.install import operations, transaction
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


def toy_wheel(toy, folder: Path, version: str = VERSION) -> Path:
    toy.dist_record.with_name("WHEEL").write_text(
        "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    )
    metadata = toy.dist_record.with_name("METADATA")
    metadata.write_text(f"Metadata-Version: 2.1\nName: sglang\nVersion: {version}\n")
    wheel = folder / f"sglang-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path in toy.site.rglob("*"):
            name = str(path.relative_to(toy.site)).replace(f"-{VERSION}.dist", f"-{version}.dist")
            archive.write(path, name)
    return wheel


def test_pip_uninstall_leaves_only_the_journal_of_a_patched_engine(toy, environment, tmp_path):
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
    journal = site / "sglang" / transaction.JOURNAL
    assert set(site.rglob("*")) == before | {journal, journal.parent, site / "sglang"}


def test_pip_reinstalls_over_a_patched_engine(toy, environment, tmp_path):
    python, site = environment
    wheel = toy_wheel(toy, tmp_path)
    pip("--python", python, "install", "--no-index", wheel)
    operations.apply(find_engine(site), toy.release())
    pip("--python", python, "install", "--no-index", "--force-reinstall", wheel)
    status = operations.status(find_engine(site), toy.release())
    assert status.state == "absent" and "SGLang was reinstalled" in status.notes[0]
    assert operations.apply(find_engine(site), toy.release())
    status = operations.status(find_engine(site), toy.release())
    assert (status.state, status.notes) == ("applied", [])


@pytest.fixture
def upgraded(toy, environment, tmp_path, monkeypatch):
    """A patched engine that pip has then upgraded, as Toy, and its files without a patch set."""
    python, site = environment
    pip("--python", python, "install", "--no-index", toy_wheel(toy, tmp_path))
    operations.apply(find_engine(site), toy.release())
    for path in ("srt/pool.py", "srt/net/conn.py"):
        write(toy.root / path, f"{ENGINE[path]}MORE = 1\n")
    write(toy.root / "version.py", "__version__ = '9.10'\n")
    toy.write_record()
    wheel = toy_wheel(toy, tmp_path, "9.10")
    pip("--python", python, "install", "--no-index", "--upgrade", wheel)
    monkeypatch.setattr(engines, "_package_folders", lambda: [site / "sglang"])
    files = {path: entry for path, entry in snapshot(site / "sglang").items() if path[0] != "."}
    return Toy(site, toy.releases, toy.trees), files


def test_server_of_an_upgraded_engine_does_not_start(upgraded, toy_patch_set):
    engine, _ = upgraded
    with pytest.raises(SystemExit, match="by an upgrade or by hand"):
        guard.check_engine()
    status = engine.status()
    assert (status.state, status.edited, status.drifts) == ("absent", [], [])
    assert "SGLang was reinstalled, upgraded or" in status.notes[-1]


@pytest.mark.parametrize("work", [Toy.revert, Toy.apply])
def test_upgraded_engine_is_reverted_or_patched(upgraded, toy_patch_set, work):
    engine, files = upgraded
    assert work(engine)
    guard.check_engine()
    assert engine.status().state == ("applied" if work is Toy.apply else "absent")
    if work is Toy.apply:
        assert engine.revert() == transaction.RESTORED
    assert snapshot(engine.root) == files


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
