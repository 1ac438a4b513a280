"""A patched method accepts every call that the engine's accepts, by position and by name."""

import inspect
from importlib import import_module

import pytest

pytestmark = pytest.mark.engine

MODULES = (
    "disaggregation.ascend.conn",
    "disaggregation.common.conn",
    "disaggregation.decode",
    "disaggregation.mooncake.conn",
    "disaggregation.nixl.conn",
    "disaggregation.prefill",
    "disaggregation.utils",
    "managers.scheduler",
)
PREFIX = "Engine"  # of the engine's class, whose subclass has its name


def overridden_methods():
    """Each method of the engine's that a patched class overrides: an id, ours, the engine's."""
    for module in (import_module(f"sglang.srt.{name}") for name in MODULES):
        for name, engine in inspect.getmembers(module, inspect.isclass):
            patched = getattr(module, name.removeprefix(PREFIX), None)
            if not (name.startswith(PREFIX) and engine in getattr(patched, "__mro__", ())):
                continue
            for method, theirs in inspect.getmembers(engine, inspect.isfunction):
                ours = getattr(patched, method)
                if ours is not theirs:
                    yield pytest.param(ours, theirs, id=f"{patched.__name__}.{method}")


@pytest.mark.parametrize(("ours", "theirs"), overridden_methods())
def test_accepts_the_calls_of_the_engines_method(ours, theirs):
    ours, parameters = inspect.signature(ours), inspect.signature(theirs).parameters.values()
    named = [one for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
    required = [one for one in named if one.default is one.empty]
    ours.bind(**dict.fromkeys(one.name for one in named))
    ours.bind(**dict.fromkeys(one.name for one in required))
    by_position = [one.name for one in named if one.kind == one.POSITIONAL_OR_KEYWORD]
    by_name = [one.name for one in named if one.kind == one.KEYWORD_ONLY]
    ours.bind(*by_position, **dict.fromkeys(by_name))
