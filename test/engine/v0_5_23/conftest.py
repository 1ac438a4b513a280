"""Leaves tests of what only the patched engine has out of runs on the stock engine."""

import importlib.util

import pytest

PATCHED = importlib.util.find_spec("sglang.srt.disaggregation.kv_layout") is not None
if not PATCHED:
    collect_ignore = [
        "test_add_transfer_request.py",
        "test_compatibility.py",
        "test_draft_kv_heads.py",
        "test_local_layout.py",
        "test_memory_registration_at_runtime.py",
        "test_message_checks.py",
        "test_peer_reconnect.py",
        "test_peers.py",
        "test_room_failures.py",
        "test_room_state_machine.py",
        "test_transfer_worker.py",
        "test_verify_elided_index_keys.py",
    ]


@pytest.fixture
def published():
    """Publishes the engine configuration that managers read."""
    import fake_managers

    with fake_managers.published_config():
        yield
