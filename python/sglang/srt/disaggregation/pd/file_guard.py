"""Stops a server whose engine was changed after `sglang-pd apply`, such as by an upgrade.

`apply` leaves a journal with the digest of each file that it has written. Uses the standard library
only, because the tool loads this file, too (`sglang_pd.guard`).
"""

import hashlib
import json
import logging
import os
from pathlib import Path
from typing import List

logger = logging.getLogger(__name__)

VARIABLE = "SGLANG_PD_GUARD"  # "0": start nevertheless
JOURNAL = Path(".sglang_pd") / "journal.json"
MAX_SHOWN = 4


def changed_files(root: Path) -> List[str]:
    """Returns the files that are no longer as `apply` wrote them, by path below `sglang/`.

    Empty also without a journal, as of an engine that was patched by other means, or not at all.

    Raises:
        OSError or ValueError: The journal or a file cannot be read.
    """
    if not (root / JOURNAL).is_file():
        return []
    changed = []
    for entry in json.loads((root / JOURNAL).read_bytes())["entries"]:
        path = root / entry["path"]
        if not entry["path"].startswith(".."):  # RECORD is the package manager's
            content = path.read_bytes() if path.is_file() else b""
            if hashlib.sha256(content).hexdigest() != entry["new"]:
                changed.append(entry["path"])
    return changed


def check_engine_files() -> None:
    """Calls `check_files` with this engine's folder; an unreadable journal only gives a warning.

    Raises:
        RuntimeError: Files were changed since `apply`.
    """
    try:
        check_files(Path(__file__).resolve().parents[3])
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning(f"Could not compare SGLang's files with {JOURNAL}: {error!r}")


def check_files(root: Path) -> None:
    """Raises RuntimeError if files were changed since `apply`, unless `SGLANG_PD_GUARD` is 0."""
    if os.environ.get(VARIABLE) == "0":
        return
    changed = changed_files(root)
    if changed:
        more = f" and {len(changed) - MAX_SHOWN} more" if len(changed) > MAX_SHOWN else ""
        raise RuntimeError(
            f"SGLang at {root} was changed after `sglang-pd apply`, by an upgrade or by hand: "
            f"{', '.join(changed[:MAX_SHOWN])}{more}. With only some of the patches, KV may be "
            f"wrong. Undo the changes, or reinstall SGLang and run `sglang-pd apply` again; after "
            f"an upgrade, `sglang-pd revert` leaves the new SGLang as it is; {VARIABLE}=0 starts "
            "nevertheless"
        )
