"""The patch set as a series of patches, one for each record."""

import hashlib
import os
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from toy import ENGINE, VERSION, Toy, commit_all, git, snapshot, write

from sglang_pd.errors import ExitCode
from sglang_pd.install.export import export
from sglang_pd.install.release_detection import detect_release
from sglang_pd.patchset.patches import Patch, supported_releases
from sglang_pd.patchset.series import split_by_record

NAMES = ["0001-net.patch", "0002-pools.patch"]
needs_quilt = pytest.mark.skipif(not shutil.which("quilt"), reason="no quilt here")
# The number of each command's block in README.
COMMANDS = {"git": 0, "patch": 1, "quilt": 2}
EVERY_COMMAND = [pytest.param("quilt", marks=needs_quilt), "git", "patch"]


@pytest.fixture
def series(toy, toy_patch_set, tmp_path):
    """The folder of the toy's series."""
    folder = tmp_path / "series"
    assert export(toy.engine(), toy.release(), folder) == NAMES
    return folder


def run_readme(
    series: Path, command: str, folder: Path, check: bool = False
) -> subprocess.CompletedProcess:
    """Runs README's lines for `git`, `patch` or `quilt` in a folder; `check`: only checks."""
    readme = (series / "README.md").read_text()
    blocks = [block.split("```")[0] for block in readme.split("```sh\n")[1:]]
    first = re.sub("PATCHES=.*", f"PATCHES={series}", blocks[0])
    lines = [line for line in first.splitlines() if line.startswith("PATCHES=")]
    script = first if command == "git" else "\n".join([*lines, blocks[COMMANDS[command]]])
    if check:
        script = script.replace("git apply", "git apply --check").rsplit(" &&\n", 1)[0]
    return subprocess.run(["bash", "-c", script], cwd=folder, capture_output=True, text=True)


def engine_files(toy) -> dict[str, bytes]:
    """The engine's files, without the tool's own and RECORD."""
    return {
        path.relative_to(toy.root).as_posix(): path.read_bytes()
        for path in toy.root.rglob("*.py")
        if ".sglang_pd" not in path.parts
    }


@pytest.fixture(params=["plain folder", "another project's work tree", "folder by a link"])
def by_hand(request, toy, tmp_path):
    """A copy of the toy, to apply the series to."""
    project = tmp_path / "project"
    copy = toy.branch(project / "venv/site")
    if "link" in request.param:
        (tmp_path / "elsewhere").mkdir()
        (tmp_path / "elsewhere/site").symlink_to(copy.site)
        copy = replace(copy, site=tmp_path / "elsewhere/site")
    if "plain" not in request.param:
        git(project, "init", "-q")
    return copy


@pytest.mark.parametrize("command", EVERY_COMMAND)
def test_commands_of_readme_write_what_apply_writes(toy, series, by_hand, command):
    ran = run_readme(series, command, by_hand.site)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    toy.apply()
    assert engine_files(by_hand) == engine_files(toy)
    assert by_hand.status().state == "applied"


def test_series_is_only_checked(series, by_hand):
    before = engine_files(by_hand)
    assert run_readme(series, "git", by_hand.site, check=True).returncode == 0
    assert engine_files(by_hand) == before
    (by_hand.root / "srt/pool.py").write_text("SIZE = 5\n")
    ran = run_readme(series, "git", by_hand.site, check=True)
    assert ran.returncode != 0 and "sglang/srt/pool.py: patch does not apply" in ran.stderr


@pytest.mark.parametrize("command", EVERY_COMMAND)
@pytest.mark.parametrize("path", ["srt/net/conn.py", "srt/pool.py"])
def test_commands_of_readme_stop_where_a_patch_does_not_apply(series, by_hand, command, path):
    """The first patch changes the first file, the second one the other.

    `patch` writes what it can of a patch.
    """
    file = by_hand.root / path
    file.write_text(file.read_text().replace("def ", "async def "))
    before = engine_files(by_hand)
    ran = run_readme(series, command, by_hand.site)
    assert ran.returncode != 0
    assert f"sglang/{path}" in ran.stdout + ran.stderr
    after = engine_files(by_hand)
    assert path == "srt/pool.py" or "srt/layout/__init__.py" not in after  # of the second patch
    assert command == "patch" or after[path] == before[path]
    assert command != "git" or after == before


@pytest.mark.parametrize("command", EVERY_COMMAND)
def test_commands_of_readme_compare_the_result(series, by_hand, command):
    """A change beside the patches' own lines is not in the way of a patch."""
    pool = by_hand.root / "srt/pool.py"
    pool.write_text(pool.read_text() + "\n\n\nMORE = 1\n")
    ran = run_readme(series, command, by_hand.site)
    assert ran.returncode != 0 and "sglang/srt/pool.py: FAILED" in ran.stdout


def test_damaged_series_is_not_applied(series, by_hand):
    file = series / NAMES[1]
    file.write_text(file.read_text().replace("title of", "title  of"))
    before = engine_files(by_hand)
    assert run_readme(series, "git", by_hand.site).returncode != 0
    assert engine_files(by_hand) == before


@pytest.mark.parametrize("command", EVERY_COMMAND)
def test_odd_files_are_patched_as_apply_does(toy, toy_patch_set, tmp_path, command):
    """One ends its lines as on Windows, one ends without a line end, and is executable."""
    conn, pool = toy.root / "srt/net/conn.py", toy.root / "srt/pool.py"
    conn.write_bytes(conn.read_bytes().replace(b"\n", b"\r\n"))
    pool.write_bytes(pool.read_bytes().rstrip(b"\n"))
    pool.chmod(0o755)
    toy.write_record()
    toy.make_fingerprints()
    export(toy.engine(), toy.release(), tmp_path / "series")
    by_hand = toy.branch(tmp_path / "by_hand")
    ran = run_readme(tmp_path / "series", command, by_hand.site)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    toy.apply()
    assert b"\r\n" in (toy.root / "srt/net/conn.py").read_bytes()
    assert engine_files(by_hand) == engine_files(toy)
    for one in (by_hand, toy):
        assert (one.root / "srt/pool.py").stat().st_mode & 0o777 == 0o755


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
        [*NAMES, "series", "PATCHED.SHA256SUMS", "README.md", "SHA256SUMS"]
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


def test_commands_of_readme_for_a_checkout(toy, toy_patch_set, tmp_path):
    checkout, series = tmp_path / "checkout", tmp_path / "series"
    moved = toy.as_checkout(checkout)
    export(moved.engine(), moved.release(), series)
    revision = git(checkout, "rev-parse", "HEAD").strip()
    assert f"SGLang {VERSION}, revision {revision}. The" in (series / "README.md").read_text()
    os.utime(moved.root / "srt/pool.py", (1, 1))  # as in a copy
    ran = run_readme(series, "git", checkout)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert moved.status().state == "applied"
    assert all(line[:2] in ("A ", "M ") for line in git(checkout, "status", "-s").splitlines())


def test_checkout_that_differs_from_its_revision_is_named(toy, toy_patch_set, tmp_path):
    """Also if the patch set is applied, whose own changes do not count."""
    moved = toy.as_checkout(tmp_path / "checkout")
    conn = moved.root / "srt/net/conn.py"
    conn.write_text(conn.read_text() + "MORE = 1\n")
    for name in ("before", "after"):
        export(moved.engine(), moved.release(), tmp_path / name)
        text = (tmp_path / name / "README.md").read_text()
        assert "with uncommitted changes to `srt/net/conn.py`. The patches" in text
        moved.apply()


def test_checkout_that_git_does_not_read_is_named(toy, toy_patch_set, tmp_path, monkeypatch):
    """As one of another user."""
    moved = toy.as_checkout(tmp_path / "checkout")
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    export(moved.engine(), moved.release(), tmp_path / "series")
    text = (tmp_path / "series/README.md").read_text()
    assert "a checkout whose revision git does not tell (fatal: detected dubious" in text


def test_git_status_of_a_checkout_shows_our_files_alone(toy, tmp_path):
    checkout = tmp_path / "checkout"
    moved = toy.as_checkout(checkout)
    before = snapshot(checkout / "python")
    changed = {f"python/sglang/{edit.path}" for edit in moved.apply()}
    shown = git(checkout, "status", "--porcelain", "-uall").splitlines()
    assert {line[3:] for line in shown} == changed
    assert moved.revert() and snapshot(checkout / "python") == before
    assert not git(checkout, "status", "--porcelain")


def test_folder_with_files_is_refused(toy, series):
    write(series / "other", "mine")

    def again(toy: Toy) -> None:
        export(toy.engine(), toy.release(), series)

    toy.assert_refused(again, ExitCode.IO, "is not empty; give --output a new folder")


def test_empty_folder_is_kept(toy, toy_patch_set, tmp_path):
    """As of a volume that is mounted there."""
    folder = tmp_path / "volume"
    folder.mkdir(0o700)
    before = folder.stat()
    export(toy.engine(), toy.release(), folder)
    assert (folder / "SHA256SUMS").exists()
    assert (folder.stat().st_ino, folder.stat().st_mode) == (before.st_ino, before.st_mode)


@pytest.mark.parametrize("is_there", [False, True])
def test_failure_leaves_no_file(toy, toy_patch_set, tmp_path, monkeypatch, is_there):
    folder = tmp_path / "series"
    if is_there:
        folder.mkdir()
    write_bytes = Path.write_bytes

    def fail(path, text):
        if path.name == "README.md":
            raise OSError("No space left on device")
        return write_bytes(path, text)

    monkeypatch.setattr(Path, "write_bytes", fail)
    with pytest.raises(OSError, match="No space"):
        export(toy.engine(), toy.release(), folder)
    assert folder.exists() == is_there and not [*folder.glob("*")]


def test_drifted_engine_is_refused(toy, toy_patch_set, tmp_path):
    path = toy.root / "srt/net/conn.py"
    path.write_text(path.read_text().replace("return x", "return (x,)"))

    def work(toy: Toy) -> None:
        export(toy.engine(), toy.release(), tmp_path / "series")

    toy.assert_refused(work, ExitCode.EDITED, "srt/net/conn.py")
    assert not (tmp_path / "series").exists()


def test_engine_patched_by_others_is_refused(toy, series, tmp_path):
    """Its originals are lost."""
    assert run_readme(series, "git", toy.site).returncode == 0

    def work(toy: Toy) -> None:
        export(toy.engine(), toy.release(), tmp_path / "again")

    toy.assert_refused(work, ExitCode.EDITED, "give --engine an unmodified SGLang")


def test_command(call, tmp_path):
    code, text, _ = call("export", "--format", "git", "--output", str(tmp_path / "series"))
    assert (code, text) == (0, f"2 patches for SGLang {VERSION} in {tmp_path / 'series'}\n")


@pytest.mark.engine
@pytest.mark.parametrize("version", supported_releases())  # in every run
def test_series_of_the_published_engine(published_at, version, tmp_path):
    """It writes byte for byte what `apply` writes, by each command."""
    toy = Toy.from_published(published_at(version), version, tmp_path / "site")
    names = export(toy.engine(), toy.release(), tmp_path / "series")
    assert (tmp_path / "series/series").read_text().split() == names
    ids = [re.fullmatch(r"\d{4}-(.+)\.patch", name)[1] for name in names]
    assert ids == [patch.id for patch in toy.release().patches if patch.id in ids]
    by_hand = {
        command: toy.branch(tmp_path / command)
        for command in COMMANDS
        if command != "quilt" or shutil.which("quilt")
    }
    for command, copy in by_hand.items():
        ran = run_readme(tmp_path / "series", command, copy.site)
        assert ran.returncode == 0, ran.stdout + ran.stderr
    toy.apply(preview=True)
    for copy in by_hand.values():
        assert engine_files(copy) == engine_files(toy)


@pytest.mark.engine
def test_published_engine_as_an_editable_clone(published, version, tmp_path):
    """As in Ascend's images: a clone, with what an editable install leaves and git ignores."""
    origin, clone = tmp_path / "origin", tmp_path / "clone"
    toy = Toy.from_published(published, version, tmp_path / "site")
    write(tmp_path / "site/sglang/version.py", "")
    made = toy.as_checkout(origin)
    (made.root / "_version.py").unlink(missing_ok=True)
    write(origin / ".gitignore", "__pycache__/\n*.egg-info/\npython/sglang/_version.py\n")
    commit_all(origin)
    git(tmp_path, "clone", "-q", str(origin), str(clone))
    moved, series = replace(toy, site=clone / "python"), tmp_path / "series"
    egg = clone / "python/sglang.egg-info"
    write(egg / "SOURCES.txt", "pyproject.toml\nsglang/__init__.py\n")
    for at, suffix in enumerate(("", ".dev3+g0123abc", "+vendor.1")):
        info = f"Metadata-Version: 2.1\nName: sglang\nVersion: {version}{suffix}\n"
        write(egg / "PKG-INFO", info)
        if at:
            write(moved.root / "_version.py", f'__version__ = "{version}{suffix}"\n')
        engine = moved.engine()
        assert (engine.version, engine.dist_record) == (f"{version}{suffix}", None)
        assert detect_release(engine).name == version
    assert not git(clone, "status", "--porcelain", "-uall")
    before = snapshot(clone / "python")
    changed = {f"python/sglang/{edit.path}" for edit in moved.apply(preview=True)}
    assert moved.status().state == "applied"
    shown = git(clone, "status", "--porcelain", "-uall").splitlines()
    assert {line[3:] for line in shown} == changed
    applied = engine_files(moved)
    assert moved.revert() and snapshot(clone / "python") == before
    export(moved.engine(), moved.release(), series)
    revision = git(clone, "rev-parse", "HEAD").strip()
    assert f", revision {revision}. The" in (series / "README.md").read_text()
    ran = run_readme(series, "git", clone)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert engine_files(moved) == applied
