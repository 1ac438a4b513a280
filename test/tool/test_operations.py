"""Apply, revert, status and diff on a toy engine; a refusal writes nothing."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from toy import ENGINE, TREE, VERSION, Toy, run_forked, snapshot, write

from sglang_pd.errors import ExitCode, Refusal
from sglang_pd.install import dist_record, operations, transaction
from sglang_pd.install.engine import find_engine


def apply(toy, **options):
    return operations.apply(toy.engine(), toy.release(), **options)


def revert(toy) -> bool:
    return operations.revert(toy.engine())


def status(toy) -> operations.Status:
    return operations.status(toy.engine(), toy.release())


def assert_refused(toy, work, code: ExitCode, *words: str) -> None:
    """Checks that `work` is refused with this code and these words, and changes nothing."""
    before = toy.snapshot()
    with pytest.raises(Refusal) as error:
        work(toy)
    assert error.value.code == code
    for word in words:
        assert word in str(error.value)
    assert toy.snapshot() == before


def test_apply_and_revert(toy):
    before = toy.snapshot()
    assert status(toy).state == "absent"
    edits = apply(toy)
    assert [edit.path for edit in edits][-1].endswith("RECORD")
    assert (toy.root / "srt/net/plan.py").read_text() == TREE["srt/net/plan.py"]
    assert (toy.root / "srt/net/conn.py").read_text() == (
        "def send(x):\n    return [x]\n\n\ndef receive():\n    return None\n"
    )
    told = status(toy)
    assert told.state == "applied"
    assert {patch.id: state for patch, state in told.patches} == {
        "net": "applied",
        "pools": "applied",
    }
    assert revert(toy)
    assert toy.snapshot() == before
    assert status(toy).state == "absent"
    assert not revert(toy)


def test_patched_engine_runs(toy):
    apply(toy)
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
    apply(toy)
    assert (toy.root / "srt/pool.py").stat().st_mode & 0o777 == 0o640
    assert (toy.root / "srt/layout/deep/more.py").stat().st_mode & 0o777 == 0o604


def test_second_apply_and_dry_run_write_nothing(toy):
    before = toy.snapshot()
    planned = apply(toy, dry_run=True)
    assert toy.snapshot() == before
    assert apply(toy) == planned
    applied = toy.snapshot()
    assert apply(toy) == []
    assert apply(toy, dry_run=True) == []
    assert toy.snapshot() == applied


def test_apply_and_revert_in_source_checkout(toy, tmp_path):
    checkout = tmp_path / "checkout"
    write(checkout / ".git/HEAD", "ref: refs/heads/main\n")
    (checkout / "python").mkdir()
    toy.root.rename(checkout / "python/sglang")
    before, engine = snapshot(checkout), find_engine(checkout)
    assert engine.dist_record is None
    patch = b"".join(operations.diff(engine, toy.release()))
    assert b"+++ b/python/sglang/srt/pool.py\n" in patch
    operations.apply(engine, toy.release())
    assert operations.status(engine, toy.release()).state == "applied"
    operations.revert(engine)
    assert snapshot(checkout) == before


def test_record_file_lists_all_files(toy):
    before = dist_record.read(toy.dist_record.read_bytes())
    apply(toy)
    after = dist_record.read(toy.dist_record.read_bytes())
    added = set(after) - set(before)
    new = {f"sglang/{path}" for path in set(TREE) - set(ENGINE)}
    state = {name for name in added if name.startswith("sglang/.sglang_pd/")}
    assert added == new | state
    there = {str(p.relative_to(toy.site)) for p in toy.root.rglob("*") if p.is_file()}
    assert there <= set(after)
    for name in new | {"sglang/srt/pool.py", "sglang/srt/net/conn.py"}:
        assert not dist_record.has_other_hash(
            toy.dist_record.read_bytes(), name, (toy.site / name).read_bytes()
        )


# Refusals


def test_drifted_symbol_is_refused(toy):
    pool = toy.root / "srt/pool.py"
    pool.write_text(pool.read_text().replace("self.pages  * 3", "self.pages * 3"))
    toy.write_record()
    assert_refused(
        toy,
        apply,
        ExitCode.DRIFTED,
        "srt/pool.py::Pool.nbytes",
        "expected sha256",
        "engine has sha256",
    )
    told = status(toy)
    assert told.state == "drifted"
    assert {patch.id: state for patch, state in told.patches} == {
        "net": "absent",
        "pools": "drifted",
    }
    assert [drift.symbol for drift in told.drifts] == ["Pool.nbytes"]


@pytest.mark.parametrize(
    ("path", "text", "words"),
    [
        ("srt/net/conn.py", None, ["srt/net/conn.py", "no such file"]),
        ("srt/net/conn.py", "def receive(): 1\n", ["srt/net/conn.py::send", "no such symbol"]),
        ("srt/net/conn.py", "def send(", ["srt/net/conn.py", "not Python"]),
        ("srt/net/conn.py", ENGINE["srt/net/conn.py"] * 2, ["srt/net/conn.py::send", "2 times"]),
        ("srt/net/plan.py", "THEIRS = 1\n", ["srt/net/plan.py", "the engine has this file"]),
        (
            "srt/pool.py",
            ENGINE["srt/pool.py"] + "TABLE = 1\n",
            ["srt/pool.py::TABLE", "no such symbol"],
        ),
        ("srt/pool.py", ENGINE["srt/pool.py"] + "describe = 1\n", ["sglang.srt.layout.describe"]),
    ],
)
def test_every_kind_of_drift_is_refused(toy, path, text, words):
    if text is None:
        (toy.root / path).unlink()
    else:
        (toy.root / path).write_text(text)
    toy.write_record()
    assert_refused(toy, apply, ExitCode.DRIFTED, *words)
    assert status(toy).state == "drifted"


def test_edited_symbol_is_distinguished_from_drift(toy):
    (toy.root / "srt/net/conn.py").write_text("def send(x):\n    return x + 1\n")
    assert_refused(
        toy, apply, ExitCode.EDITED, "was installed: srt/net/conn.py", "srt/net/conn.py::send"
    )


def test_unrelated_edits_are_preserved(toy):
    conn = toy.root / "srt/net/conn.py"
    conn.write_text(conn.read_text() + "\n\ndef vendors(): return 1\n")
    before = toy.snapshot()
    apply(toy)
    assert "def vendors(): return 1" in conn.read_text()
    revert(toy)
    assert toy.snapshot() == before


@pytest.mark.parametrize("path", ["srt/pool.py", "srt/layout/__init__.py"])
def test_file_edited_after_apply_is_refused(toy, path):
    start = toy.snapshot()
    apply(toy)
    file = toy.root / path
    applied = file.read_text()
    file.write_text(applied + "# mine\n")
    for work in (apply, revert):
        assert_refused(toy, work, ExitCode.EDITED, path, "edited since")
    assert status(toy).edited == [path]
    file.write_text(applied)
    revert(toy)
    assert toy.snapshot() == start


def test_deleted_file_counts_as_edited(toy):
    apply(toy)
    (toy.root / "srt/pool.py").unlink()
    assert_refused(toy, revert, ExitCode.EDITED, "srt/pool.py")


def test_damaged_backup_is_not_restored(toy):
    apply(toy)
    (saved,) = (toy.root / ".sglang_pd/old").glob("*-pool.py.txt")
    saved.write_text("damaged")
    for work in (revert, apply):
        assert_refused(toy, work, ExitCode.IO, "missing or damaged", "pool.py")


def test_foreign_files_in_added_folders_remain(toy):
    apply(toy)
    write(toy.root / "srt/layout/theirs.txt", "data")
    assert revert(toy)
    assert [path.name for path in (toy.root / "srt/layout").iterdir()] == ["theirs.txt"]


def test_patches_applied_by_git_are_recognized(toy, tmp_path):
    patch = b"".join(operations.diff(toy.engine(), toy.release()))
    run = subprocess.run(["git", "apply", "-p1"], cwd=toy.site, input=patch, capture_output=True)
    assert run.returncode == 0, run.stderr
    before = toy.snapshot()
    told = status(toy)
    assert (told.state, told.drifts) == ("applied", [])
    assert "not applied by sglang-pd" in told.notes[0]
    assert apply(toy) == []
    assert not revert(toy)
    assert toy.snapshot() == before


def test_inconsistent_patch_set_is_refused(toy):
    write(toy.trees / "sglang/srt/net/unknown.py", "A = 1\n")
    assert_refused(
        toy, apply, ExitCode.PATCH_SET, "srt/net/unknown.py", "sglang_pd.patchset.fingerprints"
    )


def test_symbol_without_fingerprint_is_refused(toy):
    write(toy.trees / "sglang/srt/net/conn.py", "def receive():\n    return 1\n")
    assert_refused(
        toy, apply, ExitCode.PATCH_SET, "receive, send", "sglang_pd.patchset.fingerprints"
    )


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

    return run_forked(child)


@pytest.fixture
def read_only_toy(toy):
    """A copy of the toy that all users can read and none can write."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        branch = toy.branch(Path(folder) / "site")
        for path in (branch.site, *branch.site.rglob("*")):
            path.chmod(0o555 if path.is_dir() else 0o444)
        yield branch
        for path in (branch.site, *branch.site.rglob("*")):
            path.chmod(0o755)


def test_apply_to_read_only_engine_is_refused(read_only_toy, toy):
    engine, release = read_only_toy.engine(), toy.release()
    before = read_only_toy.snapshot()
    assert run_unprivileged(lambda: operations.apply(engine, release)) == ExitCode.NO_PERMISSION
    assert (
        run_unprivileged(lambda: operations.apply(engine, release, dry_run=True))
        == ExitCode.NO_PERMISSION
    )
    assert read_only_toy.snapshot() == before
    assert operations.status(engine, release).state == "absent"


def test_revert_of_read_only_engine_is_refused(read_only_toy, toy):
    engine, release = read_only_toy.engine(), toy.release()
    for path in (read_only_toy.site, *read_only_toy.site.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    operations.apply(engine, release)
    for path in (read_only_toy.site, *read_only_toy.site.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    before = read_only_toy.snapshot()
    assert run_unprivileged(lambda: operations.revert(engine)) == ExitCode.NO_PERMISSION
    assert read_only_toy.snapshot() == before


@pytest.mark.parametrize("path", ["srt/net/conn.py", "srt/net", "."])
def test_immutable_file_is_refused_even_for_root(toy, path):
    target = toy.root / path
    if subprocess.run(["chattr", "+i", target], capture_output=True).returncode:
        pytest.skip("chattr +i needs root and a file system that has it")
    try:
        assert_refused(toy, apply, ExitCode.NO_PERMISSION, str(target), "no permission")
    finally:
        subprocess.run(["chattr", "-i", target], check=True)
    apply(toy)


def test_symbolic_link_is_refused(toy, tmp_path):
    target = toy.root / "srt/pool.py"
    cached = target.rename(tmp_path / "cached.py")
    target.symlink_to(cached)
    assert_refused(toy, apply, ExitCode.NO_PERMISSION, "symbolic link", str(target))


@pytest.mark.parametrize("applied_in_image", [True, False])
def test_apply_and_revert_on_overlay_file_system(toy, tmp_path, applied_in_image):
    """The image's files are the lower layer of an overlay, whose folders cannot be renamed."""
    start = toy.snapshot()
    if applied_in_image:
        apply(toy)
    for name in ("upper", "work", "merged"):
        (tmp_path / name).mkdir()
    layers = f"lowerdir={toy.site},upperdir={tmp_path}/upper,workdir={tmp_path}/work"
    mount = ["mount", "-t", "overlay", "overlay", "-o", layers, tmp_path / "merged"]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting an overlay needs root, and a kernel that allows it")
    try:
        container = Toy(tmp_path / "merged", toy.releases, toy.trees)
        apply(container)
        assert status(container).state == "applied"
        assert revert(container)
        assert status(container).state == "absent"
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
        apply(toy)
        return 0

    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            code = first()
        finally:
            os._exit(code)
    try:
        os.read(go[0], 1)
        for work in (apply, revert):
            assert_refused(toy, work, ExitCode.BUSY, "under way", str(toy.root))
        assert status(toy).state == "absent"
    finally:
        os.write(stop[1], b"x")
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code == 0
    assert status(toy).state == "applied"


# Diff


def test_diff_makes_the_same_changes_as_apply(toy, tmp_path):
    pool = toy.root / "srt/pool.py"
    pool.write_bytes(pool.read_bytes().rstrip(b"\n"))  # no final newline; below, a form feed
    conn = toy.root / "srt/net/conn.py"
    conn.write_bytes(conn.read_bytes().replace(b"\n\n\n", b"\n\n\x0c\n"))
    other = toy.branch(tmp_path / "other")
    patch = b"".join(operations.diff(toy.engine(), toy.release()))
    apply(toy)
    assert b"".join(operations.diff(toy.engine(), toy.release())) == patch
    for command in (["git", "apply"], ["patch", "-p1", "-s"]):
        target = other.branch(tmp_path / command[0])
        run = subprocess.run(command, cwd=target.site, input=patch, capture_output=True)
        assert run.returncode == 0, run.stderr
        for path in toy.root.rglob("*.py"):
            assert (target.root / path.relative_to(toy.root)).read_bytes() == path.read_bytes()


def test_state_folder_contains_journal_and_backups(toy):
    apply(toy)
    assert sorted(p.name for p in (toy.root / transaction.STATE_FOLDER).iterdir()) == [
        "journal.json",
        "old",
    ]
    assert VERSION in (toy.root / transaction.STATE_FOLDER / "journal.json").read_text()
