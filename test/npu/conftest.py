"""Tests that need an NPU; elsewhere they are collected, and skipped with a reason."""

import importlib

import pytest

from pd_harness.device import npu_skip_reason


@pytest.fixture(autouse=True)
def require_npu():
    if reason := npu_skip_reason():
        pytest.skip(reason)


@pytest.fixture
def engine_calls(require_npu):
    """The module `test/support/engine_calls.py`, which imports the engine."""
    return importlib.import_module("engine_calls")
