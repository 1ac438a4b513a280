"""Run a function right after a named module has been imported, once, without importing it."""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable
from types import ModuleType


def after_import(name: str, action: Callable[[ModuleType], None]) -> None:
    """Call ``action(module)`` once the module ``name`` has been executed.

    Raises:
        RuntimeError: the module is loaded already, so importers may hold what it was.
    """
    if name in sys.modules:
        raise RuntimeError(f"{name} is imported already; hooks must be set at interpreter start")
    sys.meta_path.insert(0, _AfterImport(name, action))


class _AfterImport(importlib.abc.MetaPathFinder):
    """A finder for one module, which lets the other finders find it and wraps its loader."""

    def __init__(self, name: str, action: Callable[[ModuleType], None]):
        self.name = name
        self.action = action

    def find_spec(self, fullname, path=None, target=None):
        if fullname != self.name:
            return None
        for finder in sys.meta_path:
            if isinstance(finder, _AfterImport):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None and spec.loader is not None:
                self._wrap(spec.loader)
                return spec
        return None

    def _wrap(self, loader) -> None:
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            self.action(module)

        loader.exec_module = exec_module
