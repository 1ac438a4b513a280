"""Attributes of KV managers, whose engine starts threads in `__init__` that use them at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

Value = TypeVar("Value")


class PerInstance(Generic[Value]):
    """A class attribute that stands for one value per instance, made when it is first used.

    An instance has it before and without `__init__`: threads that the engine starts there use it,
    and so does a test that makes a manager by `object.__new__`.
    """

    def __init__(self, make: Callable[[], Value]):
        """make: Makes an instance's value; two threads may call it, and one value is kept."""
        self.make = make

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, instance: Any, owner: type) -> Value:
        if instance is None:
            return self
        return vars(instance).setdefault(self.name, self.make())
