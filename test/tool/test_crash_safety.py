"""Killed or failing at any write: status is correct, and revert restores every byte.

At night also on the files that the patch set changes in each published engine, of which each write
takes a copy: at every fifth write of the default release, at every eleventh of the others. A file
takes three writes: every third would always be the same one of them.
"""

import errno
import functools
import os
import shutil
import signal
import stat
import sys
from pathlib import Path

import pytest
from toy import VERSION, Toy, start_forked, wait_forked, write

from pd_harness.releases import default_release
from sglang_pd.errors import ExitCode, Refusal
from sglang_pd.grafting.graft import graft
from sglang_pd.patchset import edits, patches

PUBLISHED = [
    pytest.param(name, marks=[pytest.mark.nightly, pytest.mark.engine, pytest.mark.timeout(3600)])
    for name in patches.supported_releases()
]
# The audit events of changes to a file system, beside `open`.
CHANGES = {
    *("os.rename", "os.mkdir", "os.rmdir", "os.remove", "os.utime", "os.chmod", "os.chown"),
    *("os.link", "os.symlink", "os.truncate"),
}


@pytest.fixture(params=["toy", *PUBLISHED])
def toy(request, toy, published_at, tmp_path, monkeypatch):
    """An engine and its patch set.

    For a published engine, slow work whose result is constant is done here, not in each process.
    """
    if request.param == "toy":
        return toy
    monkeypatch.setattr(edits, "graft", functools.cache(graft))
    fingerprints = functools.cache(edits._fingerprints)
    monkeypatch.setattr(edits, "_fingerprints", lambda at, of, text: fingerprints(at, (*of,), text))
    for name in ("release", "engine"):
        monkeypatch.setattr(Toy, name, functools.cache(getattr(Toy, name)))
    made = Toy.from_published(published_at(request.param), request.param, tmp_path / "published")
    grafted = made.branch(tmp_path / "grafted")
    apply(grafted)
    assert grafted.status().state == "applied"
    release = made.release()
    owned = {patch.id: files_of(release, patch) for patch in release.patches}
    monkeypatch.setitem(globals(), "files_of", lambda _, patch: owned[patch.id])
    return made


only_toy = pytest.mark.parametrize("toy", ["toy"], indirect=True)


def act_at_change(n: int, act) -> None:
    """Calls `act` in place of this process's n-th change to the file system (counted from 0).

    An fsync counts, too; before `act`, its file is cut in half, as a crash may leave it unsynced.
    """
    seen = 0

    def count() -> bool:
        nonlocal seen
        seen += 1
        return seen == n + 1

    def hook(event, args):
        is_write = event == "open" and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        if (is_write or event in CHANGES) and count():
            act()

    sync = os.fsync

    def fsync(fd):
        if count():
            if stat.S_ISREG(os.fstat(fd).st_mode):
                os.ftruncate(fd, os.fstat(fd).st_size // 2)
            act()
        sync(fd)

    os.fsync = fsync
    sys.addaudithook(hook)


def was_killed_at(n: int, work) -> bool:
    """Whether a child that does `work` was killed at its n-th change; False if it made fewer."""

    def child() -> int:
        act_at_change(n, lambda: os.kill(os.getpid(), signal.SIGKILL))
        work()
        return 0

    code = wait_forked(start_forked(child))
    assert code in (0, -signal.SIGKILL)
    return code != 0


def apply(toy) -> None:
    toy.apply(preview=True)


def contents(toy) -> dict[str, bytes]:
    """The engine's files and RECORD, without the tool's own folders."""
    return {
        path: content
        for path, (_, content, _) in toy.snapshot().items()
        if content is not None and ".sglang_pd" not in path
    }


def files_of(release: patches.Release, patch: patches.Patch) -> set[str]:
    """The files that contain a patch's symbols."""
    symbols = patches.symbol_ids(edits.changed(release.tree, release.fingerprints))
    return {f"sglang/{symbol.split('::')[0]}" for symbol in symbols if patch.owns(symbol)}


def actual_state(now: dict, before: dict, after: dict, owned: set[str] | None = None) -> str:
    """The state of all files, or only of `owned` ones, by comparing bytes."""
    changed = [path for path in before | after if before.get(path) != after.get(path)]
    if owned is not None:
        changed = [path for path in changed if path in owned]
    states = {
        "absent"
        if now.get(path) == before.get(path)
        else "applied"
        if now.get(path) == after[path]
        else "torn"
        for path in changed
    }
    assert "torn" not in states
    return states.pop() if len(states) == 1 else "half-applied"


def check_status(toy, before: dict, after: dict) -> str:
    status, now = toy.status(), contents(toy)
    assert status.state == actual_state(now, before, after)
    for patch, state in status.patches:
        assert state == actual_state(now, before, after, files_of(toy.release(), patch)), patch.id
    assert not status.edited
    assert not status.drifts
    return status.state


@pytest.fixture
def bytes_before_and_after(toy, tmp_path):
    """The engine's contents before and after `apply`."""
    applied = toy.branch(tmp_path / "applied")
    apply(applied)
    return contents(toy), contents(applied)


def change_numbers(toy) -> range:
    """The numbers of the changes to try; goes on beyond the last change."""
    return range(0, 1000, {VERSION: 1, default_release(): 5}.get(toy.version, 11))


def killed_copies(toy, tmp_path, work):
    """A fresh copy of the toy for each change of `work`, which was killed at that change."""
    for n in change_numbers(toy):
        copy = toy.branch(tmp_path / f"kill-{n}")
        if not was_killed_at(n, lambda copy=copy: work(copy)):
            assert n > 10
            return
        yield copy
        shutil.rmtree(copy.site)  # hundreds of published engines take much space
        shutil.rmtree(copy.site.with_suffix(".other"))
    raise AssertionError("never ended")


def test_apply_killed_at_every_write(toy, tmp_path, bytes_before_and_after):
    start, seen = toy.snapshot(), set()
    for copy in killed_copies(toy, tmp_path, apply):
        seen.add(check_status(copy, *bytes_before_and_after))
        other = copy.branch(copy.site.with_suffix(".other"))
        copy.revert()
        assert copy.snapshot() == start
        assert check_status(copy, *bytes_before_and_after) == "absent"

        apply(other)
        assert check_status(other, *bytes_before_and_after) == "applied"
        assert contents(other) == bytes_before_and_after[1]
        other.revert()
        assert other.snapshot() == start
    assert seen == {"absent", "half-applied", "applied"}


def compiled(path: Path) -> Path:
    return path.parent / "__pycache__" / f"{path.stem}.cpython-311.pyc"


def test_revert_killed_at_every_write(toy, tmp_path, bytes_before_and_after):
    start, seen = toy.snapshot(), set()
    new = [Path(path) for path in toy.release().tree if not (toy.root / path).exists()]
    folders = {path.parent for path in new if not (toy.root / path.parent).exists()}
    apply(toy)
    for path in toy.root.rglob("*.py"):
        write(compiled(path), "compiled")
    for copy in killed_copies(toy, tmp_path, Toy.revert):
        seen.add(actual_state(contents(copy), *bytes_before_and_after))
        other = copy.branch(copy.site.with_suffix(".other"))
        copy.revert()
        # Compiled files of the engine's own sources may remain.
        now = copy.snapshot().items()
        assert {path: entry for path, entry in now if "__pycache__" not in path} == start
        for path in new:
            assert not (copy.root / path).exists() and not (copy.root / compiled(path)).exists()
        assert not [folder for folder in folders if (copy.root / folder).exists()]

        apply(other)
        assert actual_state(contents(other), *bytes_before_and_after) == "applied"
    assert seen == {"absent", "half-applied", "applied"}


@only_toy
def test_update_killed_at_every_write(toy, tmp_path):
    """An older patch set is applied, then a newer one that adds and drops a file."""
    start = toy.snapshot()
    fresh = toy.branch(tmp_path / "fresh")
    apply(toy)
    (toy.trees / "sglang/srt/layout/deep/more.py").unlink()
    write(toy.trees / "sglang/srt/layout/extra.py", "EXTRA = 3\n")
    fresh.make_fingerprints()
    assert toy.status().state == "outdated"
    apply(fresh)
    for copy in killed_copies(toy, tmp_path, apply):
        other = copy.branch(copy.site.with_suffix(".other"))
        copy.revert()
        assert copy.snapshot() == start
        apply(other)
        assert contents(other) == contents(fresh)
        assert other.status().state == "applied"
        other.revert()
        assert other.snapshot() == start


def test_apply_failing_at_every_write_restores_engine(toy, tmp_path):
    start = toy.snapshot()

    def fail() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def child(copy, n) -> int:
        act_at_change(n, fail)
        try:
            apply(copy)
        except Refusal as refusal:
            return refusal.code
        return 0

    for n in change_numbers(toy):
        copy = toy.branch(tmp_path / f"fail-{n}")
        result = wait_forked(start_forked(lambda copy=copy, n=n: child(copy, n)))
        if result == 0 and copy.status().state == "applied":
            break
        assert result == ExitCode.IO
        assert copy.snapshot() == start
        shutil.rmtree(copy.site)
    assert n > 20
