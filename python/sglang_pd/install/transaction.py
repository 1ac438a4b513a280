"""Changes many files of a folder as one: all or none, even if the process is interrupted.

First it stages everything in a scratch folder inside the engine: the originals, the new contents,
and a journal of both sides' digests. One rename makes that the state folder; from then on the
journal records how to undo. Then each staged file is renamed onto its target. Undoing renames the
originals back, then removes the journal, then the rest. Each target is complete at every moment:
old or new.
"""

import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from sglang_pd.errors import ExitCode, Refusal
from sglang_pd.patchset.edits import Edit

STATE_FOLDER = ".sglang_pd"
JOURNAL = f"{STATE_FOLDER}/journal.json"
SCRATCH_FOLDER = ".sglang_pd.new"  # for staging: may be deleted at any time
IGNORED = ".gitignore", b"*\n"  # hides the state folder in a git checkout
# What `undo` has done.
RESTORED = "restored"
REPLACED = "removed what an earlier apply had added to, and left the other files of,"


class JournalEntry(msgspec.Struct, frozen=True):
    """A changed file. staged: its name in the state folder. old (None: new file), new: SHA-256."""

    path: str
    staged: str
    old: str | None
    new: str

    @property
    def is_outside(self) -> bool:
        """Whether the file is not the engine's, but RECORD, which belongs to package managers."""
        return self.path.startswith("..")


class Journal(msgspec.Struct, frozen=True):
    """The changes, and their release. folders: those made for new files, parents first."""

    tool: str
    release: str
    entries: list[JournalEntry]
    folders: list[str]


def sha256(content: bytes | None) -> str | None:
    return None if content is None else hashlib.sha256(content).hexdigest()


def read_file(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


@contextmanager
def locked(root: Path) -> Iterator[None]:
    """Locks the engine, without a lock file. Raises Refusal BUSY if another process holds it."""
    fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Refusal(
                ExitCode.BUSY,
                f"another apply or revert of {root} is under way; try again when it has finished",
            ) from None
        yield
    finally:
        os.close(fd)


def read_journal(root: Path) -> Journal | None:
    """Returns the journal of an applied or half-applied engine; None for an untouched one.

    Raises Refusal IO if the journal is damaged.
    """
    text = read_file(root / JOURNAL)
    if text is None:
        return None
    try:
        return msgspec.json.decode(text, type=Journal)
    except msgspec.DecodeError as error:
        raise Refusal(
            ExitCode.IO,
            f"{root / JOURNAL} cannot be read ({error}); reinstall SGLang",
        ) from error


def file_state(root: Path, entry: JournalEntry) -> str:
    """Returns `old`, `new`, or `edited` if the file is neither."""
    digest = sha256(read_file(root / entry.path))
    return "new" if digest == entry.new else "old" if digest == entry.old else "edited"


def is_complete(root: Path, journal: Journal) -> bool:
    return all(file_state(root, entry) == "new" for entry in journal.entries)


def is_replaced(root: Path, journal: Journal) -> bool:
    """Whether the engine was reinstalled, upgraded or moved to another revision since `apply`.

    Then none of its own files is as `apply` wrote it, and there is nothing to restore.
    """
    states: dict[bool, set[str]] = {True: set(), False: set()}  # of added and of changed files
    for entry in journal.entries:
        if not entry.is_outside:
            states[entry.old is None].add(file_state(root, entry))
    added, changed = states[True], states[False]
    # Old files beside new ones: an `apply` or `revert` was interrupted.
    return "new" not in changed and ("edited" in changed or added <= {"old"})


def originals(root: Path, journal: Journal | None) -> Callable[[str], bytes | None]:
    """Returns a reader of the engine's files as they were before the journal's changes.

    Of an engine that was replaced, the files are as they are now, without those that were added.
    """
    entries = {entry.path: entry for entry in journal.entries} if journal else {}
    kept = {"old"}
    if journal and is_replaced(root, journal):
        kept.add("edited")

    def read(path: str) -> bytes | None:
        entry = entries.get(path)
        if entry is None or file_state(root, entry) in kept:
            return read_file(root / path)
        return None if entry.old is None else read_file(root / STATE_FOLDER / "old" / entry.staged)

    return read


def staged_names(edits: list[Edit]) -> list[str]:
    return [f"{k:03}-{Path(edit.path).name}.txt" for k, edit in enumerate(edits)]


def state_files(edits: list[Edit]) -> list[str]:
    """Returns the files that the state folder keeps while the edits are applied."""
    names = [
        f"old/{name}" for name, edit in zip(staged_names(edits), edits) if edit.old is not None
    ]
    return [JOURNAL, *(f"{STATE_FOLDER}/{name}" for name in [IGNORED[0], *names])]


def check_writable(root: Path, paths: list[str]) -> None:
    """Raises Refusal NO_PERMISSION, naming the first file or folder that cannot be replaced."""
    for path in [root / STATE_FOLDER, *(root / path for path in paths)]:
        folder = path.parent
        while not folder.exists():
            folder = folder.parent
        if path.is_symlink():
            raise Refusal(
                ExitCode.NO_PERMISSION,
                f"{path} is a symbolic link, and its target may belong to others (a package "
                "manager's cache?); reinstall the engine with copied files",
            )
        for place in [folder, *([path] if path.exists() else [])]:
            if not os.access(place, os.W_OK):
                raise Refusal(
                    ExitCode.NO_PERMISSION,
                    f"no permission to write {place}; run as its owner, or make it writable",
                )
        # Compares folders only: files of a container's image may report another layer's device.
        if os.stat(folder).st_dev != os.stat(root).st_dev:
            raise Refusal(
                ExitCode.NO_PERMISSION,
                f"{folder} is on another file system than {root}: its files cannot be replaced "
                "in one step; reinstall the engine into one file system",
            )


def commit(root: Path, edits: list[Edit], release: str, tool: str) -> None:
    """Makes the edits, after undoing an earlier journal's.

    The caller holds the lock, and no file is `edited`. Raises Refusal NO_PERMISSION, leaving the
    engine as before, or IO, leaving it without any edits.
    """
    journal = read_journal(root)
    check_writable(root, [item.path for item in (*edits, *(journal.entries if journal else ()))])
    remove_leftovers(root)
    if journal:
        _undo(root, journal)
    try:
        _stage(root, edits, release, tool)
        os.rename(root / SCRATCH_FOLDER, root / STATE_FOLDER)
    except BaseException as error:
        shutil.rmtree(root / SCRATCH_FOLDER, ignore_errors=True)
        raise _as_refusal(
            error,
            f"nothing is applied, because staging in {root / SCRATCH_FOLDER} failed; fix the cause "
            "(a full disk?) and apply again",
        ) from error
    journal = read_journal(root)
    try:
        _sync(root)
        for folder in journal.folders:
            _make_folder(root / folder)
        for entry in journal.entries:
            os.replace(root / STATE_FOLDER / "new" / entry.staged, root / entry.path)
        _sync_parents(root, journal)
        os.rmdir(root / STATE_FOLDER / "new")
    except BaseException as error:
        _undo(root, journal)
        raise _as_refusal(
            error, "all edits are undone, nothing is applied; fix the cause and apply again"
        ) from error


def _as_refusal(error: BaseException, what: str) -> BaseException:
    return Refusal(ExitCode.IO, f"{what}: {error}") if isinstance(error, OSError) else error


def undo(root: Path) -> str:
    """Restores every byte; returns what was done, empty if there was nothing to restore.

    Of an engine that was replaced since, only removes what was added and is unchanged. The caller
    holds the lock. Raises Refusal as `check_undoable` and `check_writable`, before it writes
    anything.
    """
    journal = read_journal(root)
    if journal is None:
        if has_leftovers(root):
            check_writable(root, [])
            remove_leftovers(root)
        return ""
    check_undoable(root, journal)
    check_writable(root, [entry.path for entry in journal.entries])
    remove_leftovers(root)
    done = REPLACED if is_replaced(root, journal) else RESTORED
    _undo(root, journal)
    return done


def check_undoable(root: Path, journal: Journal) -> None:
    """Raises Refusal EDITED for a file that is neither old nor new, IO for a lost original.

    The files of an engine that was replaced need no restoring.
    """
    states = {entry.path: file_state(root, entry) for entry in journal.entries}
    found = [path for path, state in states.items() if state == "edited"]
    if found and not is_replaced(root, journal):
        raise Refusal(
            ExitCode.EDITED,
            f"edited since the patch set was applied: {', '.join(found)} (in {root}). Undo these "
            "edits first, or restore all of SGLang's files: reinstall it, or in a git checkout "
            "`git checkout --force`",
        )
    for entry in journal.entries:
        saved = root / STATE_FOLDER / "old" / entry.staged
        is_needed = entry.old is not None and states[entry.path] == "new"
        if is_needed and sha256(read_file(saved)) != entry.old:
            raise Refusal(
                ExitCode.IO,
                f"the original of {entry.path} is missing or damaged at {saved}; reinstall SGLang",
            )


def has_leftovers(root: Path) -> bool:
    """Whether an interrupted run left unneeded folders."""
    return (root / SCRATCH_FOLDER).exists() or (
        (root / STATE_FOLDER).exists() and not read_journal(root)
    )


def remove_leftovers(root: Path) -> None:
    """Removes the unneeded folders that an interrupted run left."""
    shutil.rmtree(root / SCRATCH_FOLDER, ignore_errors=True)
    if not read_journal(root):
        shutil.rmtree(root / STATE_FOLDER, ignore_errors=True)
    _remove_if_empty(root / STATE_FOLDER / "new")


def _stage(root: Path, edits: list[Edit], release: str, tool: str) -> None:
    scratch = root / SCRATCH_FOLDER
    for folder in (scratch, scratch / "old", scratch / "new"):
        _make_folder(folder)
    entries = []
    for name, edit in zip(staged_names(edits), edits):
        like = root / "__init__.py" if edit.old is None else root / edit.path
        if edit.old is not None:
            _write(scratch / "old" / name, edit.old, like)
            stat = like.stat()
            os.utime(scratch / "old" / name, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        _write(scratch / "new" / name, edit.new, like)
        entries.append(JournalEntry(edit.path, name, sha256(edit.old), sha256(edit.new)))
    journal = Journal(tool, release, entries, _missing_folders(root, edits))
    text = msgspec.json.format(msgspec.json.encode(journal), indent=1)
    _write(scratch / "journal.json", text, root / "__init__.py")
    _write(scratch / IGNORED[0], IGNORED[1], root / "__init__.py")
    for folder in (scratch / "old", scratch / "new", scratch):
        _sync(folder)


def _undo(root: Path, journal: Journal) -> None:
    for entry in reversed(journal.entries):
        target, state = root / entry.path, file_state(root, entry)
        if entry.old is None and state != "edited":
            target.unlink(missing_ok=True)
            for compiled in target.parent.glob(f"__pycache__/{target.stem}.*.pyc"):
                compiled.unlink()
        elif entry.old is not None and state == "new":
            os.replace(root / STATE_FOLDER / "old" / entry.staged, target)
    for folder in reversed(journal.folders):
        _remove_if_empty(root / folder / "__pycache__")
        _remove_if_empty(root / folder)
    _sync_parents(root, journal)
    # The state folder itself cannot be renamed if it is part of a container's image.
    os.unlink(root / JOURNAL)
    _sync(root / STATE_FOLDER)
    shutil.rmtree(root / STATE_FOLDER)


def _missing_folders(root: Path, edits: list[Edit]) -> list[str]:
    folders: list[str] = []
    for edit in edits:
        above = [folder for folder in Path(edit.path).parents if not (root / folder).exists()]
        folders += [str(folder) for folder in reversed(above) if str(folder) not in folders]
    return folders


def _make_folder(path: Path) -> None:
    """Makes a folder with its parent's mode and owner."""
    above = path.parent.stat()
    os.mkdir(path)
    _copy_owner_and_mode(path, above, os.stat(path))


def _write(path: Path, content: bytes, like: Path) -> None:
    """Writes a new file through to the disk, with the mode and owner of `like`."""
    with open(path, "xb") as file:
        file.write(content)
        file.flush()
        _copy_owner_and_mode(path, like.stat(), os.fstat(file.fileno()))
        os.fsync(file.fileno())


def _copy_owner_and_mode(path: Path, wanted: os.stat_result, has: os.stat_result) -> None:
    if (wanted.st_uid, wanted.st_gid) != (has.st_uid, has.st_gid):
        with suppress(PermissionError):  # only root may give files away
            os.chown(path, wanted.st_uid, wanted.st_gid)
    os.chmod(path, wanted.st_mode & 0o7777)


def _remove_if_empty(folder: Path) -> None:
    if folder.is_dir() and not os.listdir(folder):
        os.rmdir(folder)


def _sync(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _sync_parents(root: Path, journal: Journal) -> None:
    for folder in sorted({(root / entry.path).parent for entry in journal.entries}):
        if folder.is_dir():
            _sync(folder)
