"""The patch set as a series of patches, one for each record."""

import hashlib
import subprocess
from dataclasses import replace

import pytest
from toy import ENGINE, VERSION, Toy, snapshot, write

from sglang_pd.errors import ExitCode
from sglang_pd.install import export as exporting
from sglang_pd.install.export import export
from sglang_pd.install.release_detection import detect_release
from sglang_pd.patchset import patches
from sglang_pd.patchset.patches import Patch
from sglang_pd.patchset.series import split_by_record

NAMES = ["0001-net.patch", "0002-pools.patch"]
GIT, PATCH = ["git", "apply"], ["patch", "-p1", "--silent", "--input"]


@pytest.fixture
def series(toy, toy_patch_set, tmp_path):
    """The folder of the toy's series."""
    folder = tmp_path / "series"
    assert export(toy.engine(), toy.release(), folder) == NAMES
    return folder


def engine_files(toy) -> dict[str, bytes]:
    """The engine's files, without the tool's own and RECORD."""
    return {
        path.relative_to(toy.root).as_posix(): path.read_bytes()
        for path in toy.root.rglob("*.py")
        if ".sglang_pd" not in path.parts
    }


def run(command: list, folder) -> subprocess.CompletedProcess:
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


@pytest.mark.parametrize("command", [GIT, PATCH])
def test_series_writes_what_apply_writes(toy, series, tmp_path, command):
    by_hand = toy.branch(tmp_path / "by_hand")
    for name in (series / "series").read_text().split():
        ran = run([*command, str(series / name)], by_hand.site)
        assert ran.returncode == 0, ran.stderr
    toy.apply()
    assert engine_files(by_hand) == engine_files(toy)
    assert by_hand.status().state == "applied"


def test_patch_has_the_symbols_of_its_record(toy, series):
    first, second = ((series / name).read_text() for name in NAMES)
    assert first.count("diff --git") == 2 and second.count("diff --git") == 3
    for text, paths in (
        (first, ["srt/net/conn.py", "srt/net/plan.py"]),
        (second, ["srt/pool.py", "srt/layout/__init__.py", "srt/layout/deep/more.py"]),
    ):
        assert [f"diff --git a/sglang/{path} b/" in text for path in paths] == [True] * len(paths)
    assert second.startswith("Subject: title of pools\n\nWhy: symptom of pools cause of pools\n")


def test_file_of_two_records_is_in_both_patches(toy, toy_patch_set):
    """A class goes with the first record that owns one of its members."""
    release = toy.release()
    (edit,) = (one for one in toy.apply() if one.path == "srt/pool.py")
    owners = [("members", ["*::Pool.*"]), ("tables", ["*::TABLE"])]
    records = [Patch(name, name, "mission", "", "needed", "", list(of)) for name, of in owners]
    first, second = split_by_record([edit], replace(release, all_patches=records))
    ((one,), (two,)) = first.edits, second.edits
    assert one.old.decode() == ENGINE["srt/pool.py"] and two.new == edit.new
    assert one.new == two.old and b"width: int = 2" in one.new and b"TABLE" not in one.new
    assert b"from typing import Dict" in one.new  # what the file imports goes with the first


def test_checksums_are_right(series):
    for line in (series / "SHA256SUMS").read_text().splitlines():
        digest, name = line.split("  ")
        assert hashlib.sha256((series / name).read_bytes()).hexdigest() == digest
    assert sorted(path.name for path in series.iterdir()) == sorted(
        [*NAMES, "series", "README.md", "SHA256SUMS"]
    )
    readme = (series / "README.md").read_text()
    assert f"Made from SGLang {VERSION}. " in readme
    assert "## 0002-pools.patch" in readme and "**Drop when:** drop_when of pools" in readme


def test_applied_engine_exports_the_same_series(toy, series, tmp_path):
    toy.apply()
    export(toy.engine(), toy.release(), tmp_path / "again")
    assert snapshot_of(tmp_path / "again") == snapshot_of(series)


def snapshot_of(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_checkout_is_named_with_its_revision(toy, toy_patch_set, tmp_path):
    checkout = tmp_path / "checkout"
    moved = toy.as_checkout(checkout)
    export(moved.engine(), moved.release(), tmp_path / "series")
    revision = run(["git", "rev-parse", "HEAD"], checkout).stdout.strip()
    assert f"revision {revision}" in (tmp_path / "series/README.md").read_text()
    for name in NAMES:
        ran = run([*GIT, "--index", str(tmp_path / "series" / name)], checkout)
        assert ran.returncode == 0, ran.stderr
    assert moved.status().state == "applied"


def test_git_status_of_a_checkout_shows_our_files_alone(toy, tmp_path):
    checkout = tmp_path / "checkout"
    moved = toy.as_checkout(checkout)
    before = snapshot(checkout / "python")
    changed = {f"python/sglang/{edit.path}" for edit in moved.apply()}
    shown = run(["git", "status", "--porcelain", "-uall"], checkout).stdout.splitlines()
    assert {line[3:] for line in shown} == changed
    assert moved.revert() and snapshot(checkout / "python") == before
    assert not run(["git", "status", "--porcelain"], checkout).stdout


def test_folder_with_files_is_refused(toy, series):
    write(series / "other", "mine")

    def again(toy: Toy) -> None:
        export(toy.engine(), toy.release(), series)

    toy.assert_refused(again, ExitCode.IO, "is not empty; give --output a new folder")


def test_failure_leaves_no_folder(toy, toy_patch_set, tmp_path, monkeypatch):
    monkeypatch.setattr(exporting.Path, "rename", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        export(toy.engine(), toy.release(), tmp_path / "out/series")
    assert not list((tmp_path / "out").iterdir())


def test_drifted_engine_is_refused(toy, toy_patch_set, tmp_path):
    path = toy.root / "srt/net/conn.py"
    path.write_text(path.read_text().replace("return x", "return (x,)"))

    def work(toy: Toy) -> None:
        export(toy.engine(), toy.release(), tmp_path / "series")

    toy.assert_refused(work, ExitCode.EDITED, "srt/net/conn.py")
    assert not (tmp_path / "series").exists()


def test_engine_patched_by_others_is_refused(toy, series, tmp_path):
    """Its originals are lost."""
    for name in NAMES:
        assert run([*GIT, str(series / name)], toy.site).returncode == 0

    def work(toy: Toy) -> None:
        export(toy.engine(), toy.release(), tmp_path / "again")

    toy.assert_refused(work, ExitCode.EDITED, "give --engine an unmodified SGLang")


def test_command(call, tmp_path):
    code, text, _ = call("export", "--format", "git", "--output", str(tmp_path / "series"))
    assert (code, text) == (0, f"2 patches for SGLang {VERSION} in {tmp_path / 'series'}\n")


@pytest.mark.engine
@pytest.mark.parametrize("command", [GIT, PATCH])
def test_series_of_the_published_engine(published, version, tmp_path, command):
    """It writes byte for byte what `apply` writes."""
    toy = Toy.from_published(published, version, tmp_path / "site")
    by_hand = toy.branch(tmp_path / "by_hand")
    names = export(toy.engine(), toy.release(), tmp_path / "series")
    assert [name[5:-6] for name in names] == [
        patch.id for patch in patches.load_release(version).patches if patch.id in "".join(names)
    ]
    for name in names:
        ran = run([*command, str(tmp_path / "series" / name)], by_hand.site)
        assert ran.returncode == 0, ran.stderr
    toy.apply(preview=True)
    assert engine_files(by_hand) == engine_files(toy)


@pytest.mark.engine
@pytest.mark.parametrize("suffix", ["", ".dev3+g0123abc", "+vendor.1"])
def test_published_engine_as_an_editable_git_checkout(published, version, tmp_path, suffix):
    """As in Ascend's images; made from the wheel's files, which upstream builds from a checkout."""
    toy = Toy.from_published(published, version, tmp_path / "site")
    checkout = tmp_path / "checkout"
    (checkout / "python").mkdir(parents=True)
    toy.root.rename(checkout / "python/sglang")
    write(checkout / "python/sglang/_version.py", f'__version__ = "{version}{suffix}"\n')
    commit_all(checkout)
    moved = replace(toy, site=checkout / "python")
    before = snapshot(checkout / "python")
    assert detect_release(moved.engine()).name == version
    assert moved.engine().dist_record is None
    changed = {f"python/sglang/{edit.path}" for edit in moved.apply(preview=True)}
    assert moved.status().state == "applied"
    shown = run(["git", "status", "--porcelain", "-uall"], checkout).stdout.splitlines()
    assert {line[3:] for line in shown} == changed
    assert moved.revert() and snapshot(checkout / "python") == before
