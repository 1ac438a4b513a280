"""The patch set itself on the published engine."""

import ast
import json
import subprocess
import sys

import pytest
from toy import ROOT, snapshot

from sglang_pd.cli import find_engine_and_release
from sglang_pd.errors import ExitCode, Refusal
from sglang_pd.install import operations
from sglang_pd.install.engine import find_engine
from sglang_pd.patchset import fingerprints, patches
from sglang_pd.patchset.records import page

pytestmark = pytest.mark.engine


@pytest.fixture
def release(version):
    return patches.load_release(version)


def undefined_names(site, paths) -> set[str]:
    """Ruff's findings on undefined and redefined names, without line numbers."""
    ruff = [
        sys.executable,
        "-m",
        "ruff",
        "check",
        "--isolated",
        "--no-cache",
        "--select",
        "F821,F811",
    ]
    ran = subprocess.run(
        [*ruff, "--output-format", "json", *paths], cwd=site, capture_output=True, text=True
    )
    return {
        (found["filename"], found["message"].split(" from line")[0])
        for found in json.loads(ran.stdout)
    }


def test_apply_status_and_revert(engine_copy, release, version):
    before = snapshot(engine_copy)
    engine = find_engine(engine_copy)
    assert engine.version == version
    assert operations.status(engine, release).state == "absent"
    changed = [f"sglang/{path}" for path in release.tree]
    known = undefined_names(
        engine_copy, [path for path in changed if (engine_copy / path).exists()]
    )

    operations.apply(engine, release, preview=True)
    told = operations.status(engine, release)
    assert told.state == "applied"
    assert {state for _, state in told.patches} == {"applied"}
    for path in changed:
        ast.parse((engine_copy / path).read_bytes())
    assert undefined_names(engine_copy, changed) <= known

    assert operations.revert(engine)
    assert snapshot(engine_copy) == before


def test_fingerprints_match_published_engine(published, release):
    assert release.fingerprints == fingerprints.make_fingerprints(find_engine(published), release)


def test_every_patch_record_is_complete():
    records = patches.read_records()
    for record in records:
        assert record.upstream == "none" or record.upstream.startswith("https://github.com/")
        texts = [record.title, record.symptom, record.cause, record.drop_when]
        assert all(text.strip() for text in texts), record.id
    names = [record.id for record in records]
    places = [(record.kind, record.order) for record in records]
    assert len(set(places)) == len(places)
    assert sorted(names) == [file.stem for file in sorted((patches.RELEASES / "patches").glob("*"))]


@pytest.mark.parametrize("name", patches.supported_releases())
def test_unneeded_patches_are_explained(name):
    release = patches.load_release(name, with_fingerprints=False)
    for patch in [*release.patches, *release.carried, *release.missing]:
        assert patch.need == "needed" or patch.what.strip(), patch.id


def test_patches_page_is_generated_from_records():
    assert (ROOT / "docs" / "patches.md").read_text() == page(), (
        "run python -m sglang_pd.patchset.records"
    )


# An engine whose version the tool does not know


def _text(file) -> str:
    return file.read_text() if file.exists() else ""


@pytest.fixture
def patch_level(engine_copy, version):
    """The published engine as a later patch level, by its version file and its metadata."""
    names = ("_version.py", "version.py")
    (said,) = [path for name in names if version in _text(path := engine_copy / "sglang" / name)]
    metadata = next(engine_copy.glob("sglang-*.dist-info")) / "METADATA"
    for file in (said, metadata):
        text = file.read_text()
        assert version in text, file
        file.write_text(text.replace(version, f"{version}.post9"))
    return engine_copy


def test_patch_level_with_symbols_of_release_is_matched(patch_level, version):
    before = snapshot(patch_level)
    engine, release = find_engine_and_release(patch_level, None)
    assert (engine.version, release.name) == (f"{version}.post9", version)
    operations.apply(engine, release, preview=True)
    engine, release = find_engine_and_release(patch_level, None)
    assert (release.name, operations.status(engine, release).state) == (version, "applied")
    assert operations.revert(engine)
    assert snapshot(patch_level) == before


def test_patch_level_with_changed_symbol_is_refused(patch_level, release, version):
    conn = patch_level / "sglang" / "srt/disaggregation/mooncake/conn.py"
    text = conn.read_text()
    assert text.count("def maybe_send_extra(") == 1
    conn.write_text(text.replace("def maybe_send_extra(", "def maybe_send_extra(  # theirs"))
    before = snapshot(patch_level)
    with pytest.raises(Refusal) as refusal:
        find_engine_and_release(patch_level, None)
    count = len(patches.symbol_ids(release.fingerprints))
    assert refusal.value.code == ExitCode.UNSUPPORTED
    assert f"The nearest is {version}: 1 of {count} symbols" in str(refusal.value)
    assert "mooncake/conn.py::MooncakeKVManager.maybe_send_extra: " in str(refusal.value)
    assert snapshot(patch_level) == before


def test_patch_tree_does_not_shadow_engine_packages(published):
    for path in (ROOT / "python" / "sglang").rglob("__init__.py"):
        assert not (published / path.relative_to(ROOT / "python")).exists()
