"""Writes the patch set as a series of patches for `git apply` or `quilt`, one for each record.

NNNN-RECORD.patch    in the order in which they apply
series               their names, as `quilt` reads them
PATCHED.SHA256SUMS   of the engine's files once all are applied
README.md            what each patch is for, and when to drop it; the engine it was made from
SHA256SUMS           of these files
"""

import hashlib
import os
import subprocess
from pathlib import Path

from sglang_pd import __version__
from sglang_pd.errors import ExitCode, Refusal
from sglang_pd.install import operations
from sglang_pd.install.engine import CHECKOUT_PREFIX, Engine
from sglang_pd.patchset.edits import Edit
from sglang_pd.patchset.patches import Release, read_records
from sglang_pd.patchset.series import SeriesPatch, split_by_record

MAX_SHOWN = 4
# Of all patches at once, `git apply` writes all or none. In a folder of another project's work tree
# it would skip all files, without an error, if it found that project. In a checkout that was
# copied, as into an image, the index has the times of other files.
GIT_APPLY = {
    True: "(git update-index -q --refresh; git apply --index)",
    False: 'GIT_CEILING_DIRECTORIES="$(cd -P .. && pwd)" git apply',
}
COMPARE = 'sha256sum --check --quiet "$PATCHES/PATCHED.SHA256SUMS"'


def export(engine: Engine, release: Release, folder: Path) -> list[str]:
    """Writes the series into a new or empty folder, or nothing; returns the patches' names.

    It is made from the engine's originals, whether or not the patch set is applied. Raises Refusal
    as `apply`; IO if the folder exists and is not empty.
    """
    if folder.exists() and (not folder.is_dir() or os.listdir(folder)):
        raise Refusal(ExitCode.IO, f"{folder} is not empty; give --output a new folder")
    edits = operations.original_edits(engine, release)
    series = split_by_record(edits, release)
    files = {
        f"{number:04}-{one.patch.id}.patch": _text(one, release.name, engine.prefix())
        for number, one in enumerate(series, 1)
    }
    names = list(files)
    files["series"] = "".join(f"{name}\n" for name in names).encode()
    files["PATCHED.SHA256SUMS"] = _sums({engine.prefix() + one.path: one.new for one in edits})
    made_from = _origin(engine, edits)
    files["README.md"] = _readme(engine, release, made_from, dict(zip(names, series))).encode()
    files["SHA256SUMS"] = _sums(files)
    _write(folder, files)
    return names


def _sums(files: dict[str, bytes]) -> bytes:
    """Returns the files' checksums, as `sha256sum --check` reads them."""
    lines = (f"{hashlib.sha256(text).hexdigest()}  {name}\n" for name, text in files.items())
    return "".join(lines).encode()


def _write(folder: Path, files: dict[str, bytes]) -> None:
    # Into the folder itself, not beside it: a volume of a container cannot be replaced.
    is_made = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        for name, text in files.items():
            (folder / name).write_bytes(text)
    except BaseException:
        for name in files:
            (folder / name).unlink(missing_ok=True)
        if is_made:
            folder.rmdir()
        raise


def _text(one: SeriesPatch, release: str, prefix: str) -> bytes:
    patch, record = one.patch, _records()[one.patch.id]
    header = [
        f"Subject: {patch.title}",
        "",
        f"Why: {record.symptom} {record.cause}",
        f"How: {record.at(release).change}",
        f"Related PR: {patch.upstream}",
        f"Drop when: {record.drop_when}",
        "---",
        "",
    ]
    body = b"".join(
        line for edit in one.edits for line in operations.file_diff(prefix + edit.path, edit)
    )
    return "\n".join(header).encode() + body


def _readme(
    engine: Engine, release: Release, made_from: str, series: dict[str, SeriesPatch]
) -> str:
    is_checkout = engine.prefix() == CHECKOUT_PREFIX
    place = "the top of the git checkout" if is_checkout else "the folder that holds `sglang/`"
    lines = [
        f"# sglang-pd {__version__} for SGLang {release.name}",
        "",
        f"Made from {made_from}. The patches apply to these files, in the order of `series`; "
        "together they write what `sglang-pd apply` writes, byte for byte. The engine is not meant "
        "to run with only some of them.",
        "",
        f"In {place}, this writes all of them or none, and compares the result (without the last "
        "line, and with `git apply --check`, it only checks):",
        "",
        "```sh",
        "PATCHES=FOLDER_OF_THIS_FILE    # an absolute path",
        '(cd "$PATCHES" && sha256sum --check --quiet SHA256SUMS) &&',
        f'(cd "$PATCHES" && xargs cat < series) | {GIT_APPLY[is_checkout]} &&',
        COMPARE,
        "```",
        "",
        "`patch` or `quilt` write them one by one, up to the first that does not apply:",
        "",
        "```sh",
        'while read -r name; do patch -p1 --fuzz 0 --force < "$PATCHES/$name" || break; '
        'done < "$PATCHES/series"',
        COMPARE,
        "```",
        "",
        "```sh",
        'QUILT_PATCHES="$PATCHES" quilt push -a --fuzz=0',
        COMPARE,
        "```",
        "",
    ]
    for name, one in series.items():
        record = _records()[one.patch.id]
        lines += [
            f"## {name}",
            "",
            f"{record.title}.",
            "",
            f"- **Why:** {record.symptom}",
            f"- **Upstream:** {record.upstream}",
            f"- **Drop when:** {record.drop_when}",
            "",
        ]
    return "\n".join(lines)


def _records() -> dict:
    return {record.id: record for record in read_records()}


def _origin(engine: Engine, edits: list[Edit]) -> str:
    """Names the engine that the patches are for; of a git checkout also its revision.

    A checkout's files may differ from those of its revision.
    """
    name = f"SGLang {engine.version or 'without a version'}"
    if engine.prefix() != CHECKOUT_PREFIX:
        return name
    try:
        revision = _git(engine, "rev-parse", "HEAD").decode().strip()
        listed = _git(engine, "ls-tree", "-r", "-z", "--name-only", "HEAD", "--", ".").decode()
        committed = set(listed.split("\0"))
        changed = [one.path for one in edits if one.old != _committed(engine, one.path, committed)]
    except (OSError, subprocess.CalledProcessError) as error:
        why = getattr(error, "stderr", b"").decode(errors="replace").strip() or str(error)
        return f"{name}, a checkout whose revision git does not tell ({why.splitlines()[0]})"
    if not changed:
        return f"{name}, revision {revision}"
    more = f" and {len(changed) - MAX_SHOWN} more" if len(changed) > MAX_SHOWN else ""
    files = ", ".join(f"`{path}`" for path in changed[:MAX_SHOWN])
    return f"{name}, revision {revision} with uncommitted changes to {files}{more}"


def _committed(engine: Engine, path: str, committed: set[str]) -> bytes | None:
    return _git(engine, "show", f"HEAD:./{path}") if path in committed else None


def _git(engine: Engine, *words: str) -> bytes:
    command = ["git", "-C", str(engine.root), *words]
    return subprocess.run(command, capture_output=True, check=True).stdout
