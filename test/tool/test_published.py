"""The patch set itself on the published engine."""

import ast
import json
import subprocess
import sys

import pytest
from toy import ROOT, Toy

from sglang_pd.cli import find_engine_and_release
from sglang_pd.dev import fingerprints
from sglang_pd.dev.patches_page import page
from sglang_pd.errors import ExitCode
from sglang_pd.install import operations
from sglang_pd.install.engine import find_engine
from sglang_pd.patchset import patches

pytestmark = pytest.mark.engine


@pytest.fixture
def writable(engine_copy, version):
    """A copy of the published engine, with our patch set."""
    return Toy(engine_copy, patches.RELEASES, patches.TREES, version)


def undefined_names(site, paths) -> set[tuple[str, str]]:
    """Ruff's findings on undefined and redefined names, without line numbers."""
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--no-cache"]
    command += ["--select", "F821,F811", "--output-format", "json", *paths]
    ran = subprocess.run(command, cwd=site, capture_output=True, text=True)
    return {
        (found["filename"], found["message"].split(" from line")[0])
        for found in json.loads(ran.stdout)
    }


def test_apply_status_and_revert(writable, version):
    before, site = writable.snapshot(), writable.site
    assert writable.engine().version == version
    assert writable.status().state == "absent"
    changed = [f"sglang/{path}" for path in writable.release().tree]
    known = undefined_names(site, [path for path in changed if (site / path).exists()])

    writable.apply(preview=True)
    status = writable.status()
    assert status.state == "applied"
    assert {state for _, state in status.patches} == {"applied"}
    for path in changed:
        ast.parse((site / path).read_bytes())
    assert undefined_names(site, changed) <= known

    assert writable.revert()
    assert writable.snapshot() == before


def test_fingerprints_match_published_engine(published, version):
    release = patches.load_release(version)
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
        "run python -m sglang_pd.dev.patches_page"
    )


# An engine whose version the tool does not know


@pytest.fixture
def patch_level(writable, version):
    """The published engine as a later patch level, by its version file and its metadata."""
    files = [writable.root / name for name in ("_version.py", "version.py")]
    (file,) = [file for file in files if file.exists() and version in file.read_text()]
    metadata = next(writable.site.glob("sglang-*.dist-info")) / "METADATA"
    for one in (file, metadata):
        text = one.read_text()
        assert version in text, one
        one.write_text(text.replace(version, f"{version}.post9"))
    return writable


def test_patch_level_with_symbols_of_release_is_matched(patch_level, version):
    before = patch_level.snapshot()
    engine, release = find_engine_and_release(patch_level.site, None)
    assert (engine.version, release.name) == (f"{version}.post9", version)
    operations.apply(engine, release, preview=True)
    engine, release = find_engine_and_release(patch_level.site, None)
    assert (release.name, operations.status(engine, release).state) == (version, "applied")
    assert patch_level.revert()
    assert patch_level.snapshot() == before


def test_patch_level_with_changed_symbol_is_refused(patch_level, version):
    conn = patch_level.root / "srt/disaggregation/mooncake/conn.py"
    text = conn.read_text()
    assert text.count("def maybe_send_extra(") == 1
    conn.write_text(text.replace("def maybe_send_extra(", "def maybe_send_extra(  # theirs"))
    count = len(patches.symbol_ids(patch_level.release().fingerprints))
    patch_level.assert_refused(
        lambda one: find_engine_and_release(one.site, None),
        ExitCode.UNSUPPORTED,
        f"The nearest is {version}: 1 of {count} symbols",
        "mooncake/conn.py::MooncakeKVManager.maybe_send_extra: ",
    )


def test_patch_tree_does_not_shadow_engine_packages(published):
    for path in (ROOT / "python" / "sglang").rglob("__init__.py"):
        assert not (published / path.relative_to(ROOT / "python")).exists()
