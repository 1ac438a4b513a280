"""Writes the patch set as a series of patches for `git apply` or `quilt`, one for each record.

NNNN-RECORD.patch    in the order in which they apply
series               their names, as `quilt` reads them
SHA256SUMS           of these files
README.md            what each patch is for, and when to drop it; the engine it was made from
"""

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from sglang_pd import __version__
from sglang_pd.errors import ExitCode, Refusal
from sglang_pd.install import operations
from sglang_pd.install.engine import Engine
from sglang_pd.patchset.patches import Release, read_records
from sglang_pd.patchset.series import SeriesPatch, split_by_record


def export(engine: Engine, release: Release, folder: Path) -> list[str]:
    """Writes the series into a new folder, whole or not at all; returns the patches' names.

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
    files["README.md"] = _readme(engine, release, dict(zip(names, series))).encode()
    sums = (f"{hashlib.sha256(text).hexdigest()}  {name}\n" for name, text in files.items())
    files["SHA256SUMS"] = "".join(sums).encode()
    _write(folder, files)
    return names


def _write(folder: Path, files: dict[str, bytes]) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    staged = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
    try:
        for name, text in files.items():
            (staged / name).write_bytes(text)
        staged.chmod(0o755)
        if folder.exists():
            folder.rmdir()
        staged.rename(folder)
    except BaseException:
        shutil.rmtree(staged, ignore_errors=True)
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


def _readme(engine: Engine, release: Release, series: dict[str, SeriesPatch]) -> str:
    revision = _revision(engine)
    place = "the top of a checkout" if engine.prefix() != "sglang/" else "the folder of `sglang/`"
    lines = [
        f"# sglang-pd {__version__} for SGLang {release.name}",
        "",
        f"Made from SGLang {engine.version or 'without a version'}"
        + (f", revision {revision}" if revision else "")
        + ". The patches apply in the order of `series`, all of them or none, to that engine:",
        "",
        "```sh",
        "sha256sum --check SHA256SUMS",
        f"# in {place}; or `quilt push -a` with this folder as `patches`",
        "while read -r patch; do git apply --index THIS_FOLDER/$patch; done < THIS_FOLDER/series",
        "```",
        "",
        "Together they write what `sglang-pd apply` writes, byte for byte. The engine is not meant "
        "to run with only some of them.",
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


def _revision(engine: Engine) -> str:
    """Returns the commit of a git checkout; empty for other engines, or without git."""
    if engine.prefix() == "sglang/":
        return ""
    command = ["git", "-C", str(engine.root), "rev-parse", "HEAD"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return found.stdout.strip()
