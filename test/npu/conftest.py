"""What only an NPU can show; elsewhere every test is collected, and skipped with the reason."""

import importlib

import pytest

from pd_harness.device import why_no_npu


@pytest.fixture(autouse=True)
def an_npu():
    if reason := why_no_npu():
        pytest.skip(reason)


@pytest.fixture
def probes(an_npu):
    """`test/support/probes.py`; it imports the engine."""
    return importlib.import_module("probes")
