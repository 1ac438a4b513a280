"""What only an NPU can show; elsewhere every test is collected, and skipped with the reason."""

import importlib
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
for helpers in ("engine", "transport"):
    sys.path.append(str(TESTS / helpers))

from pd_harness.device import why_no_npu  # noqa: E402


@pytest.fixture(autouse=True)
def an_npu():
    if reason := why_no_npu():
        pytest.skip(reason)


@pytest.fixture
def probes(an_npu):
    """`test/engine/probes.py`; it imports the engine."""
    return importlib.import_module("probes")
