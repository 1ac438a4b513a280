"""An SGLang plugin: stops a server whose engine was changed after `sglang-pd apply`.

From 0.5.11 on SGLang loads it in its main process and in each scheduler, if sglang-pd is installed
beside it. It sees what the patched code cannot: an upgrade that has replaced all of it, but not
`apply`'s journal. SGLang logs a plugin's exceptions and goes on, so it exits.
"""

import importlib.util
import logging
import sys

from sglang_pd.patchset.patches import TREES

logger = logging.getLogger(__name__)

FILE = TREES / "sglang" / "srt" / "disaggregation" / "pd" / "file_guard.py"


def check_engine() -> None:
    """Exits with code 1 if the importing engine's files are no longer as `apply` wrote them."""
    try:
        # Imported here: a server must start even if this fails.
        from sglang_pd.install.engine import find_root

        spec = importlib.util.spec_from_file_location("sglang_pd._file_guard", FILE)
        guard = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(guard)
        root = find_root()
    except Exception as error:
        logger.warning(f"sglang-pd could not check SGLang's files: {error!r}")
        return
    try:
        guard.check_files(root)
    except RuntimeError as error:
        logger.error(error)
        sys.exit(f"sglang-pd: {error}")
    except Exception as error:
        logger.warning(f"sglang-pd could not check SGLang's files: {error!r}")
