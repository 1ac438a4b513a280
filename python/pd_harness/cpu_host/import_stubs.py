"""Packages of which the engine only imports names here: a kernel wheel and an image library.

``sgl_kernel`` needs libcuda and ``torchvision`` the torch build it was made for.  Every name in
them can be imported; calling one says what is missing, so nothing can pass for a computation.
"""

import importlib.abc
import importlib.machinery
import sys
from types import ModuleType

PACKAGES = ("sgl_kernel", "torchvision")

# The engine has its own table of quantised types for when this module cannot be imported.
NOT_STUBBED = ("sgl_kernel.scalar_type",)


class StubFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the packages above and any submodule of theirs; asked last, so real ones win."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname.partition(".")[0] not in PACKAGES or fullname in NOT_STUBBED:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec) -> ModuleType:
        module = ModuleType(spec.name)
        module.__getattr__ = lambda name: _stub(spec.name, name)
        return module

    def exec_module(self, module: ModuleType) -> None:
        """The module is whole as it was created."""


def _stub(module: str, name: str):
    if name.startswith("__"):
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    def stub(*args, **kwargs):
        raise RuntimeError(f"{module}.{name} was called, but the CPU host has only its name")

    stub.__name__ = name
    return stub


def install() -> None:
    """Ask for the names after everything that is really installed."""
    sys.meta_path.append(StubFinder())
