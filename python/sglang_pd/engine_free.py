"""Loads packages of the patch set's tree that import nothing of the engine.

They must not be imported as `sglang...`, because that name belongs to the engine.
"""

import importlib.util
import sys
from types import ModuleType

from sglang_pd.patchset.patches import TREES

FOLDER = TREES / "sglang" / "srt" / "disaggregation"


def load(package: str) -> ModuleType:
    """Returns a package of the patched engine's `disaggregation` folder, such as `kv_layout`."""
    name = f"{__package__}.{package}"
    if name in sys.modules:
        return sys.modules[name]
    folder = FOLDER / package
    spec = importlib.util.spec_from_file_location(
        name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
