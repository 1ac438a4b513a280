"""A patched engine compares its files with what was applied when a KV manager is made."""

import hashlib
import inspect
import json

import pytest
from sglang.srt.disaggregation.pd import file_guard, local_layout

pytestmark = pytest.mark.engine


def test_engine_of_the_tests_is_unchanged():
    file_guard.check_engine_files()


@pytest.fixture
def root(tmp_path):
    """An engine's folder with one file, as `apply` has written it."""
    digest = hashlib.sha256(b"A = 1\n").hexdigest()
    entries = [{"path": "a.py", "new": digest}, {"path": "../x.dist-info/RECORD", "new": "0"}]
    (tmp_path / ".sglang_pd").mkdir()
    (tmp_path / file_guard.JOURNAL).write_text(json.dumps({"entries": entries}))
    (tmp_path / "a.py").write_text("A = 1\n")
    return tmp_path


def test_changed_file_raises(root, monkeypatch):
    file_guard.check_files(root)
    (root / "a.py").write_text("A = 2\n")
    told = "was changed after `sglang-pd apply`.*: a.py. .*`sglang-pd revert` leaves the new"
    with pytest.raises(RuntimeError, match=told):
        file_guard.check_files(root)
    monkeypatch.setenv(file_guard.VARIABLE, "0")
    file_guard.check_files(root)


def test_unreadable_journal_is_only_logged(root, monkeypatch, caplog):
    (root / file_guard.JOURNAL).write_text("{")
    monkeypatch.setattr(file_guard, "__file__", str(root / "srt/disaggregation/pd/file_guard.py"))
    file_guard.check_engine_files()
    assert "Could not compare SGLang's files" in caplog.text


def test_changed_engine_makes_no_kv_manager(monkeypatch):
    def refuse():
        raise RuntimeError("changed")

    monkeypatch.setattr(local_layout, "check_engine_files", refuse)
    describe = local_layout.set_local_layout
    with pytest.raises(RuntimeError, match="changed"):
        describe(*[None] * len(inspect.signature(describe).parameters))
