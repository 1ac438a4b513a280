"""The patch set itself on the published engine."""

import ast
import json
import subprocess
import sys

import pytest
from toy import PUBLISHED, ROOT, snapshot

from sglang_pd.install import operations
from sglang_pd.install.engine import find_engine
from sglang_pd.patchset import fingerprints, patches
from sglang_pd.patchset.records import markdown

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def release():
    return patches.load(PUBLISHED)


def undefined_names(site, paths) -> set[str]:
    """What ruff says of undefined and redefined names, without line numbers."""
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


def test_apply_status_and_revert(engine_copy, release):
    before = snapshot(engine_copy)
    engine = find_engine(engine_copy)
    assert engine.version == PUBLISHED
    assert operations.status(engine, release).state == "absent"
    changed = [f"sglang/{path}" for path in release.tree]
    known = undefined_names(
        engine_copy, [path for path in changed if (engine_copy / path).exists()]
    )

    operations.apply(engine, release)
    told = operations.status(engine, release)
    assert told.state == "applied"
    assert {state for _, state in told.patches} == {"applied"}
    for path in changed:
        ast.parse((engine_copy / path).read_bytes())
    assert undefined_names(engine_copy, changed) <= known

    assert operations.revert(engine)
    assert snapshot(engine_copy) == before


def test_fingerprints_are_those_of_the_tree_as_it_is(published, release):
    assert release.fingerprints == fingerprints.make_fingerprints(find_engine(published), release)


def test_every_record_is_whole(release):
    for patch in release.patches:
        assert patch.upstream == "none" or patch.upstream.startswith("https://github.com/")
        texts = [
            patch.id,
            patch.title,
            patch.symptom,
            patch.cause,
            patch.change,
            patch.carried_by,
            patch.drop_when,
        ]
        assert all(text.strip() for text in texts), patch.id
    names = [patch.id for patch in release.patches]
    assert names == sorted(set(names))
    assert names == [path.stem for path in sorted((release.folder / "patches").glob("*.toml"))]


def test_the_page_of_patches_is_made_from_the_records():
    page = markdown([patches.load(name) for name in patches.supported()])
    assert (ROOT / "docs" / "patches.md").read_text() == page, (
        "run python -m sglang_pd.patchset.records"
    )


def test_the_tree_never_shadows_the_engine(published):
    for path in (ROOT / "python" / "sglang").rglob("__init__.py"):
        assert not (published / path.relative_to(ROOT / "python")).exists()
