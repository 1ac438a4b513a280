"""Stubs for packages that the engine only imports names from: a kernel wheel and an image library.

``sgl_kernel`` needs libcuda, and ``torchvision`` the torch build it was made for.  Any name can be
imported from the stubs; calling one raises an error that names it, so no stub computes anything.
"""

import importlib.abc
import importlib.machinery
import sys
from types import ModuleType

PACKAGES = ("sgl_kernel", "torchvision")

# Without this module the engine uses its own table of quantised types.
NOT_STUBBED = ("sgl_kernel.scalar_type",)


class StubFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds `PACKAGES` and any submodule of theirs; comes last, so real packages win."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname.partition(".")[0] not in PACKAGES or fullname in NOT_STUBBED:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec) -> ModuleType:
        module = ModuleType(spec.name)
        module.__getattr__ = lambda name: _stub(spec.name, name)
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: `create_module` made the whole module."""


def _stub(module: str, name: str):
    if name.startswith("__"):
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    def stub(*args, **kwargs):
        raise RuntimeError(f"{module}.{name} is only a stub on the CPU host; it cannot be called")

    stub.__name__ = name
    return stub


def install() -> None:
    """Search the stubs after every package that is really installed."""
    sys.meta_path.append(StubFinder())
