"""Apply, revert, status and diff on a toy engine; a refusal writes nothing."""

import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from toy import (
    ENGINE,
    TREE,
    VERSION,
    Toy,
    commit_all,
    git,
    snapshot,
    start_forked,
    wait_forked,
    write,
)

from sglang_pd.errors import ExitCode, Refusal
from sglang_pd.install import dist_record, operations, transaction
from sglang_pd.patchset import patches

POOL, CONN = ENGINE["srt/pool.py"], ENGINE["srt/net/conn.py"]


def patch_states(status: operations.Status) -> dict[str, str]:
    return {patch.id: state for patch, state in status.patches}


def diff(toy) -> bytes:
    return b"".join(operations.diff(toy.engine(), toy.release()))


def apply_diff(command: list[str], folder: Path, patch: bytes) -> None:
    ran = subprocess.run(command, cwd=folder, input=patch, capture_output=True)
    assert ran.returncode == 0, ran.stderr


def test_apply_and_revert(toy):
    before = toy.snapshot()
    assert toy.status().state == "absent"
    edits = toy.apply()
    assert [edit.path for edit in edits][-1].endswith("RECORD")
    assert (toy.root / "srt/net/plan.py").read_text() == TREE["srt/net/plan.py"]
    assert (toy.root / "srt/net/conn.py").read_text() == (
        "def send(x):\n    return [x]\n\n\ndef receive():\n    return None\n"
    )
    status = toy.status()
    assert status.state == "applied"
    assert patch_states(status) == {"net": "applied", "pools": "applied"}
    assert toy.revert()
    assert toy.snapshot() == before
    assert toy.status().state == "absent"
    assert not toy.revert()


def test_patched_engine_runs(toy):
    toy.apply()
    code = "from sglang.srt.pool import Pool, TABLE; print(Pool().nbytes(), Pool().free(), TABLE)"
    ran = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(toy.site)},
        capture_output=True,
        text=True,
    )
    assert ran.stdout == "8 None {}\n", ran.stderr


def test_file_modes_are_preserved(toy):
    (toy.root / "__init__.py").chmod(0o604)
    toy.root.chmod(0o750)
    toy.apply()
    assert (toy.root / "srt/pool.py").stat().st_mode & 0o777 == 0o640
    assert (toy.root / "srt/layout/deep/more.py").stat().st_mode & 0o777 == 0o604


def test_second_apply_and_dry_run_write_nothing(toy):
    before = toy.snapshot()
    planned = toy.apply(dry_run=True)
    assert toy.snapshot() == before
    assert toy.apply() == planned
    applied = toy.snapshot()
    assert toy.apply() == []
    assert toy.apply(dry_run=True) == []
    assert toy.snapshot() == applied


def test_apply_and_revert_in_source_checkout(toy, tmp_path):
    checkout = tmp_path / "checkout"
    write(checkout / ".git/HEAD", "ref: refs/heads/main\n")
    (checkout / "python").mkdir()
    toy.root.rename(checkout / "python/sglang")
    before, moved = snapshot(checkout), replace(toy, site=checkout / "python")
    assert moved.engine().dist_record is None
    assert b"+++ b/python/sglang/srt/pool.py\n" in diff(moved)
    moved.apply()
    assert moved.status().state == "applied"
    moved.revert()
    assert snapshot(checkout) == before


@pytest.fixture
def moved_checkout(toy, tmp_path):
    """A checkout that was moved to another tag, `two`, after `apply` at the first one."""
    checkout = tmp_path / "checkout"
    moved = toy.as_checkout(checkout)
    git(checkout, "tag", "one")
    for name, text in (("pool", f"{POOL}MORE = 1\n"), ("net/conn", f"{CONN}MORE = 1\n")):
        write(moved.root / f"srt/{name}.py", text)
    commit_all(checkout)
    git(checkout, "tag", "two")
    git(checkout, "checkout", "-q", "one")
    moved.apply()
    git(checkout, "checkout", "-q", "--force", "two")
    write(moved.root / "theirs.py", "THEIRS = 1\n")
    return moved


def git_status(toy) -> list[str]:
    return git(toy.root, "status", "--porcelain", "-uall").splitlines()


def test_revert_after_a_checkout_has_moved(moved_checkout):
    """Only what `apply` had added is left of it, and goes."""
    status = moved_checkout.status()
    assert (status.state, status.edited, status.drifts) == ("absent", [], [])
    assert "moved to another revision" in status.notes[0]
    assert len(git_status(moved_checkout)) == 4
    assert moved_checkout.revert() == transaction.REPLACED
    assert git_status(moved_checkout) == ["?? python/sglang/theirs.py"]
    assert not (moved_checkout.root / transaction.STATE_FOLDER).exists()
    assert not moved_checkout.revert()


def test_apply_after_a_checkout_has_moved(moved_checkout):
    moved_checkout.apply()
    status = moved_checkout.status()
    assert (status.state, status.notes) == ("applied", [])
    assert (moved_checkout.root / "srt/net/conn.py").read_text().endswith("MORE = 1\n")
    assert moved_checkout.revert() == transaction.RESTORED
    assert git_status(moved_checkout) == ["?? python/sglang/theirs.py"]


def test_file_of_the_other_tag_in_place_of_an_added_one_remains(moved_checkout):
    theirs = moved_checkout.root / "srt/net/plan.py"
    write(theirs, "THEIRS = 1\n")
    moved_checkout.assert_refused(Toy.apply, ExitCode.DRIFTED, "the engine has this file")
    assert moved_checkout.revert() == transaction.REPLACED
    assert theirs.read_text() == "THEIRS = 1\n"


def test_checkout_is_restored_by_git_where_a_file_is_edited(moved_checkout):
    """As the refusal advises."""
    git(moved_checkout.root, "checkout", "-q", "--force", "one")
    moved_checkout.apply()
    write(moved_checkout.root / "srt/pool.py", "mine")
    moved_checkout.assert_refused(Toy.revert, ExitCode.EDITED, "`git checkout --force`")
    git(moved_checkout.root, "checkout", "--force")
    assert moved_checkout.revert()
    assert git_status(moved_checkout) == ["?? python/sglang/theirs.py"]


def test_record_file_lists_all_files(toy):
    before = dist_record.read(toy.dist_record.read_bytes())
    toy.apply()
    after = dist_record.read(toy.dist_record.read_bytes())
    added = set(after) - set(before)
    new = {f"sglang/{path}" for path in set(TREE) - set(ENGINE)}
    state = {name for name in added if name.startswith("sglang/.sglang_pd/")}
    assert added == new | state
    there = {str(p.relative_to(toy.site)) for p in toy.root.rglob("*") if p.is_file()}
    assert there - set(after) == {"sglang/.sglang_pd/journal.json"}  # which survives an upgrade
    for name in new | {"sglang/srt/pool.py", "sglang/srt/net/conn.py"}:
        assert not dist_record.has_other_hash(
            toy.dist_record.read_bytes(), name, (toy.site / name).read_bytes()
        )


# Refusals


def test_drifted_symbol_is_refused(toy):
    pool = toy.root / "srt/pool.py"
    pool.write_text(pool.read_text().replace("self.pages  * 3", "self.pages * 3"))
    toy.write_record()
    words = ("srt/pool.py::Pool.nbytes", "expected sha256", "engine has sha256")
    toy.assert_refused(Toy.apply, ExitCode.DRIFTED, *words)
    status = toy.status()
    assert status.state == "drifted"
    assert patch_states(status) == {"net": "absent", "pools": "drifted"}
    assert [drift.symbol for drift in status.drifts] == ["Pool.nbytes"]


@pytest.mark.parametrize(
    ("path", "text", "words"),
    [
        ("srt/net/conn.py", None, ["srt/net/conn.py", "no such file"]),
        ("srt/net/conn.py", "def receive(): 1\n", ["srt/net/conn.py::send", "no such symbol"]),
        ("srt/net/conn.py", "def send(", ["srt/net/conn.py", "not Python"]),
        ("srt/net/conn.py", CONN * 2, ["srt/net/conn.py::send", "2 times"]),
        ("srt/net/plan.py", "THEIRS = 1\n", ["srt/net/plan.py", "the engine has this file"]),
        ("srt/pool.py", f"{POOL}TABLE = 1\n", ["srt/pool.py::TABLE", "no such symbol"]),
        ("srt/pool.py", f"{POOL}describe = 1\n", ["sglang.srt.layout.describe"]),
    ],
)
def test_every_kind_of_drift_is_refused(toy, path, text, words):
    (toy.root / path).unlink() if text is None else write(toy.root / path, text)
    toy.write_record()
    toy.assert_refused(Toy.apply, ExitCode.DRIFTED, *words)
    assert toy.status().state == "drifted"


def test_edited_symbol_is_distinguished_from_drift(toy):
    (toy.root / "srt/net/conn.py").write_text("def send(x):\n    return x + 1\n")
    words = ("was installed: srt/net/conn.py", "srt/net/conn.py::send")
    toy.assert_refused(Toy.apply, ExitCode.EDITED, *words)


def test_unrelated_edits_are_preserved(toy):
    conn = toy.root / "srt/net/conn.py"
    conn.write_text(conn.read_text() + "\n\ndef vendors(): return 1\n")
    before = toy.snapshot()
    toy.apply()
    assert "def vendors(): return 1" in conn.read_text()
    toy.revert()
    assert toy.snapshot() == before


@pytest.mark.parametrize("path", ["srt/pool.py", "srt/layout/__init__.py"])
def test_file_edited_after_apply_is_refused(toy, path):
    start = toy.snapshot()
    toy.apply()
    file = toy.root / path
    applied = file.read_text()
    file.write_text(applied + "# mine\n")
    for work in (Toy.apply, Toy.revert):
        toy.assert_refused(work, ExitCode.EDITED, path, "edited since")
    assert toy.status().edited == [path]
    file.write_text(applied)
    toy.revert()
    assert toy.snapshot() == start


def test_deleted_file_counts_as_edited(toy):
    toy.apply()
    (toy.root / "srt/pool.py").unlink()
    toy.assert_refused(Toy.revert, ExitCode.EDITED, "srt/pool.py")


def test_damaged_backup_is_not_restored(toy):
    toy.apply()
    (saved,) = (toy.root / ".sglang_pd/old").glob("*-pool.py.txt")
    saved.write_text("damaged")
    for work in (Toy.revert, Toy.apply):
        toy.assert_refused(work, ExitCode.IO, "missing or damaged", "pool.py")


def test_foreign_files_in_added_folders_remain(toy):
    toy.apply()
    write(toy.root / "srt/layout/theirs.txt", "data")
    assert toy.revert()
    assert [path.name for path in (toy.root / "srt/layout").iterdir()] == ["theirs.txt"]


def test_patches_applied_by_git_are_recognized(toy):
    apply_diff(["git", "apply", "-p1"], toy.site, diff(toy))
    before = toy.snapshot()
    status = toy.status()
    assert (status.state, status.drifts) == ("applied", [])
    assert "not applied by sglang-pd" in status.notes[0]
    assert toy.apply() == []
    assert not toy.revert()
    assert toy.snapshot() == before


@pytest.mark.parametrize(
    ("path", "ours", "differing"),
    [
        ("srt/net/unknown.py", "A = 1\n", "srt/net/unknown.py"),
        ("srt/net/conn.py", "def receive():\n    return 1\n", "receive, send"),
    ],
)
def test_patch_set_without_matching_fingerprints_is_refused(toy, path, ours, differing):
    write(toy.trees / "sglang" / path, ours)
    toy.assert_refused(Toy.apply, ExitCode.PATCH_SET, differing, "sglang_pd.dev.fingerprints")


# Source folders that releases share


def test_releases_share_a_folder_and_replace_files_of_it(toy):
    """The shared folder is no release; a release's own folder, which comes later, wins."""
    shared, later = "releases/from_9.9/sglang", f"releases/{VERSION}/sglang"
    (toy.trees / "sglang/srt/net/plan.py").unlink()
    write(toy.trees / shared / "srt/net/plan.py", "PLAN = 2\n")
    (toy.releases / "8.8").mkdir()
    for version, trees in (("8.8", ["sglang", shared]), (VERSION, ["sglang", shared, later])):
        write(toy.releases / version / "release.toml", f"trees = {trees}\n")
    write(toy.trees / later / "srt/net/plan.py", "PLAN = 3\n")
    plans = {
        version: patches.load_release(version, toy.releases, toy.trees, False).tree
        for version in patches.supported_releases(toy.releases)
    }
    assert {version: tree["srt/net/plan.py"] for version, tree in plans.items()} == {
        "8.8": b"PLAN = 2\n",
        VERSION: b"PLAN = 3\n",
    }
    assert set(plans["8.8"]) == set(plans[VERSION])
    toy.make_fingerprints()
    toy.apply()
    assert (toy.root / "srt/net/plan.py").read_text() == "PLAN = 3\n"
    assert toy.revert()
    assert not (toy.root / "srt/net/plan.py").exists()


# Permissions and other processes


def run_unprivileged(work) -> int:
    """Runs `work` in a process that may write only its own files; returns the exit code."""

    def child() -> int:
        if os.geteuid() == 0:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
        try:
            work()
        except Refusal as refusal:
            print(refusal, file=sys.stderr)
            return refusal.code
        return 0

    return wait_forked(start_forked(child))


def set_modes(site: Path, folder_mode: int, file_mode: int) -> None:
    for path in (site, *site.rglob("*")):
        path.chmod(folder_mode if path.is_dir() else file_mode)


@pytest.fixture
def public_toy(toy):
    """A copy of the toy in a folder that all users can read."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        branch = toy.branch(Path(folder) / "site")
        yield branch
        set_modes(branch.site, 0o755, 0o644)


@pytest.mark.parametrize("is_applied", [False, True], ids=["absent", "applied"])
def test_read_only_engine_is_refused(public_toy, is_applied):
    engine, release = public_toy.engine(), public_toy.release()
    work = [
        lambda: operations.apply(engine, release),
        lambda: operations.apply(engine, release, dry_run=True),
    ]
    if is_applied:
        public_toy.apply()
        work = [lambda: operations.revert(engine)]
    set_modes(public_toy.site, 0o555, 0o444)
    before = public_toy.snapshot()
    for one in work:
        assert run_unprivileged(one) == ExitCode.NO_PERMISSION
    assert public_toy.snapshot() == before
    assert public_toy.status().state == ("applied" if is_applied else "absent")


@pytest.mark.parametrize("path", ["srt/net/conn.py", "srt/net", "."])
def test_immutable_file_is_refused_even_for_root(toy, path):
    target = toy.root / path
    if subprocess.run(["chattr", "+i", target], capture_output=True).returncode:
        pytest.skip("chattr +i needs root and a file system that has it")
    try:
        toy.assert_refused(Toy.apply, ExitCode.NO_PERMISSION, str(target), "no permission")
    finally:
        subprocess.run(["chattr", "-i", target], check=True)
    toy.apply()


def test_symbolic_link_is_refused(toy, tmp_path):
    target = toy.root / "srt/pool.py"
    target.symlink_to(target.rename(tmp_path / "cached.py"))
    toy.assert_refused(Toy.apply, ExitCode.NO_PERMISSION, "symbolic link", str(target))


@pytest.mark.parametrize("applied_in_image", [True, False])
def test_apply_and_revert_on_overlay_file_system(toy, tmp_path, applied_in_image):
    """The image's files are the lower layer of an overlay, whose folders cannot be renamed."""
    start = toy.snapshot()
    if applied_in_image:
        toy.apply()
    for name in ("upper", "work", "merged"):
        (tmp_path / name).mkdir()
    layers = f"lowerdir={toy.site},upperdir={tmp_path}/upper,workdir={tmp_path}/work"
    mount = ["mount", "-t", "overlay", "overlay", "-o", layers, tmp_path / "merged"]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting an overlay needs root, and a kernel that allows it")
    try:
        container = Toy(tmp_path / "merged", toy.releases, toy.trees)
        container.apply()
        assert container.status().state == "applied"
        assert container.revert()
        assert container.status().state == "absent"
        assert container.snapshot() == start
    finally:
        subprocess.run(["umount", tmp_path / "merged"], check=True)


def test_concurrent_apply_is_refused(toy):
    """The first apply, in another process, pauses halfway; the second is refused at once."""
    go, stop = os.pipe(), os.pipe()

    def first() -> int:
        def pause(event, args):
            if event == "os.rename" and str(args[1]).endswith("/.sglang_pd"):
                os.write(go[1], b"x")
                os.read(stop[0], 1)

        sys.addaudithook(pause)
        toy.apply()
        return 0

    pid = start_forked(first)
    try:
        os.read(go[0], 1)
        for work in (Toy.apply, Toy.revert):
            toy.assert_refused(work, ExitCode.BUSY, "under way", str(toy.root))
        assert toy.status().state == "absent"
    finally:
        os.write(stop[1], b"x")
        code = wait_forked(pid)
    assert code == 0
    assert toy.status().state == "applied"


# Diff


def test_diff_makes_the_same_changes_as_apply(toy, tmp_path):
    pool = toy.root / "srt/pool.py"
    pool.write_bytes(pool.read_bytes().rstrip(b"\n"))  # no final newline; below, a form feed
    conn = toy.root / "srt/net/conn.py"
    conn.write_bytes(conn.read_bytes().replace(b"\n\n\n", b"\n\n\x0c\n"))
    other = toy.branch(tmp_path / "other")
    patch = diff(toy)
    toy.apply()
    assert diff(toy) == patch
    for command in (["git", "apply"], ["patch", "-p1", "-s"]):
        target = other.branch(tmp_path / command[0])
        apply_diff(command, target.site, patch)
        for path in toy.root.rglob("*.py"):
            assert (target.root / path.relative_to(toy.root)).read_bytes() == path.read_bytes()


def test_state_folder_contains_journal_and_backups(toy):
    toy.apply()
    folder = toy.root / transaction.STATE_FOLDER
    assert sorted(path.name for path in folder.iterdir()) == [
        ".gitignore",
        "journal.json",
        "old",
    ]
    assert VERSION in (folder / "journal.json").read_text()
