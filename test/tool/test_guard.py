"""A server whose engine was changed after `apply` does not start."""

import os
import subprocess
import sys

import pytest
from toy import ROOT, write

from sglang_pd import guard
from sglang_pd.install import engine as engines

CHANGED = "srt/pool.py"


@pytest.fixture
def applied(toy, monkeypatch):
    """A toy with its patch set, as the engine that this process imports."""
    toy.apply()
    monkeypatch.setattr(engines, "_package_folders", lambda: [toy.root])
    return toy


def change(toy) -> None:
    (toy.root / CHANGED).write_text("SIZE = 5\n")


def test_unchanged_engine_starts(applied):
    guard.check_engine()


def test_changed_engine_does_not_start(applied, caplog):
    change(applied)
    with pytest.raises(SystemExit, match=f"by an upgrade or by hand: {CHANGED}. ") as exit:
        guard.check_engine()
    assert "SGLANG_PD_GUARD=0 starts nevertheless" in str(exit.value)
    assert str(applied.root) in caplog.text


def test_missing_file_counts_as_changed(applied):
    (applied.root / CHANGED).unlink()
    with pytest.raises(SystemExit, match=CHANGED):
        guard.check_engine()


def test_many_changed_files_are_counted(applied):
    for path in applied.root.rglob("*.py"):
        if ".sglang_pd" not in path.parts:
            path.write_text("\n")
    with pytest.raises(SystemExit, match=" and [0-9]+ more"):
        guard.check_engine()


def test_variable_lets_a_changed_engine_start(applied, monkeypatch):
    change(applied)
    monkeypatch.setenv("SGLANG_PD_GUARD", "0")
    guard.check_engine()


@pytest.mark.parametrize("revert", [True, False])
def test_engine_without_a_journal_starts(toy, monkeypatch, revert):
    """As one that was reverted, or that the tool has never seen."""
    monkeypatch.setattr(engines, "_package_folders", lambda: [toy.root])
    if revert:
        toy.apply()
        toy.revert()
    change(toy)
    guard.check_engine()


@pytest.mark.parametrize("text", ["{", "{}", '{"entries": [{}]}'])
def test_unreadable_journal_is_only_logged(applied, caplog, text):
    (applied.root / ".sglang_pd/journal.json").write_text(text)
    guard.check_engine()
    assert "could not check SGLang's files" in caplog.text


def test_missing_engine_is_only_logged(monkeypatch, caplog):
    monkeypatch.setattr(engines, "_package_folders", lambda: [])
    guard.check_engine()
    assert "could not check SGLang's files: Refusal" in caplog.text


PLUGINS = """
import importlib.metadata, logging
for point in importlib.metadata.entry_points(group="sglang.srt.plugins"):
    try:
        point.load()()
    except Exception:  # as SGLang does
        logging.exception("Failed to execute a plugin")
print("started")
"""


@pytest.mark.parametrize("is_changed", [False, True])
def test_plugin_ends_the_process(toy, tmp_path, is_changed):
    """SGLang logs a plugin's exceptions, and goes on."""
    toy.apply()
    if is_changed:
        change(toy)
    write(
        tmp_path / "plugins/sglang_pd-1.dist-info/entry_points.txt",
        "[sglang.srt.plugins]\nsglang_pd_guard = sglang_pd.guard:check_engine\n",
    )
    write(tmp_path / "plugins/sglang_pd-1.dist-info/METADATA", "Name: sglang-pd\nVersion: 1\n")
    paths = [str(toy.site), str(ROOT / "python"), str(tmp_path / "plugins")]
    ran = subprocess.run(
        [sys.executable, "-c", PLUGINS],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
    )
    assert (ran.returncode, "started" in ran.stdout) == ((1, False) if is_changed else (0, True))
    assert ("was changed after `sglang-pd apply`" in ran.stderr) == is_changed


def test_wheel_declares_the_plugin():
    assert (
        '[project.entry-points."sglang.srt.plugins"]\n'
        'sglang_pd_guard = "sglang_pd.guard:check_engine"\n'
    ) in (ROOT / "pyproject.toml").read_text()
