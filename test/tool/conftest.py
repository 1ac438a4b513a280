"""Engines for the tool's tests: toys, and the published engine."""

import shutil
import subprocess
import sys
import zipfile
from functools import cache
from pathlib import Path

import pytest
from typer.testing import CliRunner

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE))
pytest.register_assert_rewrite("toy")


from toy import ROOT, Toy  # noqa: E402

from sglang_pd.cli import app  # noqa: E402
from sglang_pd.patchset import patches  # noqa: E402


@pytest.fixture(scope="session")
def toy_template(tmp_path_factory):
    return Toy.make(tmp_path_factory.mktemp("toy"))


@pytest.fixture
def toy(toy_template, tmp_path):
    """A small engine as pip installs it, and a patch set for it."""
    return toy_template.copy(tmp_path / "toy")


@pytest.fixture
def toy_patch_set(toy, monkeypatch):
    """Gives the tool the toy's patch set in place of the real one."""
    monkeypatch.setattr(patches, "RELEASES", toy.releases)
    monkeypatch.setattr(patches, "TREES", toy.trees)


@pytest.fixture
def call(toy, toy_patch_set):
    """A function that runs a command on the toy; returns exit code, stdout and stderr."""

    def run(*words, engine=toy.site):
        where = [] if engine is None else ["--engine", str(engine)]
        got = CliRunner().invoke(app, [*words, *where])
        return got.exit_code, got.stdout, got.stderr

    return run


def releases() -> list:
    """All supported releases; the older ones nightly, as every run's set-up patches them anyway."""
    *older, newest = patches.supported_releases()
    return [*(pytest.param(name, marks=pytest.mark.nightly) for name in older), newest]


@pytest.fixture(scope="session", params=releases())
def version(request):
    """The published engine's release."""
    return request.param


@pytest.fixture(scope="session")
def published(published_at, version):
    """Site-packages folder with the unmodified published engine; do not write to it."""
    return published_at(version)


@pytest.fixture(scope="session")
def published_at(tmp_path_factory):
    """A function from a release to the site-packages folder with that published engine."""
    return cache(lambda version: find_or_download_engine(version, tmp_path_factory))


def find_or_download_engine(version: str, tmp_path_factory) -> Path:
    prepared = ROOT / ".pd-env" / version / "stock" / "lib" / "python3.11" / "site-packages"
    if (prepared / "sglang" / "srt").is_dir():
        return prepared
    folder = tmp_path_factory.mktemp("published")
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "-d", folder]
    got = subprocess.run([*pip, f"sglang=={version}"], capture_output=True, text=True)
    if got.returncode:
        pytest.skip(
            f"no engine in .pd-env/{version}/stock, and none to download: {got.stderr[-300:]}"
        )
    (wheel,) = folder.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(folder / "site")
    return folder / "site"


@pytest.fixture
def engine_copy(published, tmp_path):
    """A writable copy of the published engine."""
    site = tmp_path / "site-packages"
    for folder in (published / "sglang", *published.glob("sglang-*.dist-info")):
        skip = shutil.ignore_patterns("__pycache__")
        shutil.copytree(folder, site / folder.name, ignore=skip)
    return site


@pytest.fixture(autouse=True)
def _skip_fsync(monkeypatch):
    """Skips fsync: what a killed process has written survives; only a power failure needs it."""
    monkeypatch.setattr("os.fsync", lambda fd: None)
