"""Run code around the execution of a named module, once, without importing it."""

import contextlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable
from types import ModuleType

Action = Callable[[ModuleType], None]
Context = contextlib.AbstractContextManager

# What `on_import_of` marks, by the module's name; `startup.activate` sets these hooks.
HOOKS: dict[str, list[Action]] = {}


def on_import_of(*names: str) -> Callable[[Action], Action]:
    """Mark a function that the CPU host calls with each of these modules after its execution."""

    def mark(action: Action) -> Action:
        for name in names:
            HOOKS.setdefault(name, []).append(action)
        return action

    return mark


def after_import(name: str, *actions: Action) -> None:
    """Call each ``action(module)`` after the module ``name`` has been executed.

    Raises:
        RuntimeError: the module is already loaded, so others may have imported its old names; or
            it has a hook.
    """

    @contextlib.contextmanager
    def then_act(module: ModuleType):
        yield
        for action in actions:
            action(module)

    around_import(name, then_act)


def around_import(name: str, context: Callable[[ModuleType], Context]) -> None:
    """Execute the module ``name`` inside ``context(module)``.

    Raises:
        RuntimeError: the module is already loaded, so others may have imported its old names; or
            it has a hook.
    """
    if name in sys.modules:
        raise RuntimeError(f"{name} is already imported; hooks must be set at interpreter start")
    if any(isinstance(finder, _AroundImport) and finder.name == name for finder in sys.meta_path):
        raise RuntimeError(f"{name} has a hook, and a second one would never run")
    sys.meta_path.insert(0, _AroundImport(name, context))


class _AroundImport(importlib.abc.MetaPathFinder):
    """A finder for one module: the other finders find it, this one wraps its loader."""

    def __init__(self, name: str, context: Callable[[ModuleType], Context]):
        self.name = name
        self.context = context

    def find_spec(self, fullname, path=None, target=None):
        if fullname != self.name:
            return None
        for finder in sys.meta_path:
            if isinstance(finder, _AroundImport):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None and spec.loader is not None:
                self._wrap(spec.loader)
                return spec
        return None

    def _wrap(self, loader) -> None:
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            with self.context(module):
                execute(module)

        loader.exec_module = exec_module
