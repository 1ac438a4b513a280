"""What only the patched engine has is not asked of the stock one."""

import importlib.util

import pytest

PATCHED = importlib.util.find_spec("sglang.srt.disaggregation.kv_layout") is not None
if not PATCHED:
    collect_ignore = [
        "test_chunks.py",
        "test_described_ranks.py",
        "test_drafts.py",
        "test_elided_digests.py",
        "test_ended.py",
        "test_fitting.py",
        "test_peers.py",
        "test_readers.py",
        "test_registered_later.py",
        "test_reloads.py",
        "test_workers.py",
    ]


@pytest.fixture
def published():
    """The engine's configuration, as managers read it."""
    import managers

    with managers.published():
        yield
