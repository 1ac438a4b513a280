"""Loads `kv_layout`, the core that the patched engine runs, from the patch set's tree.

`kv_layout` imports nothing of the engine, so the tool needs no engine. It must not be imported as
`sglang...`, because that name belongs to the engine.
"""

import importlib.util
import sys
from types import ModuleType

from sglang_pd.patchset.patches import TREES

FOLDER = TREES / "sglang" / "srt" / "disaggregation" / "kv_layout"


def _load() -> ModuleType:
    name = f"{__package__}.kv_layout"
    spec = importlib.util.spec_from_file_location(
        name, FOLDER / "__init__.py", submodule_search_locations=[str(FOLDER)]
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


kv_layout = _load()
