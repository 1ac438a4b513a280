"""What only an NPU can show; elsewhere every test is collected, and skipped with the reason."""

import importlib

import pytest

from pd_harness.device import npu_skip_reason


@pytest.fixture(autouse=True)
def require_npu():
    if reason := npu_skip_reason():
        pytest.skip(reason)


@pytest.fixture
def engine_calls(require_npu):
    """`test/support/engine_calls.py`; it imports the engine."""
    return importlib.import_module("engine_calls")
