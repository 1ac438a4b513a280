"""The page of patches: a table of patches by release, then a section about each patch."""

from sglang_pd.dev.patches_page import markdown
from sglang_pd.patchset.patches import (
    RELEASES,
    TREES,
    PatchRecord,
    ReleaseStatus,
    load_release,
    supported_releases,
    version_key,
)

NEEDED_WITH_CHANGE = ReleaseStatus(
    "needed", change="the change", symbols=["a.py::*"], names=["a name"]
)


def record(name: str, **releases: str | ReleaseStatus) -> PatchRecord:
    """A record; releases are given as v1_0="needed"."""
    named = {at[1:].replace("_", "."): stand for at, stand in releases.items()}
    title = f"Title of {name}"
    return PatchRecord(name, title, "mission", 1, "none", "symptom", "cause", "never", named)


def table(page: str) -> list[list[str]]:
    rows = [line for line in page.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def test_releases_sort_by_version():
    names = ["0.5.12.post1", "0.5.9", "0.5.10", "0.5.12", "0.5.9.post2"]
    assert sorted(names, key=version_key) == [
        "0.5.9",
        "0.5.9.post2",
        "0.5.10",
        "0.5.12",
        "0.5.12.post1",
    ]


def test_overview_table_of_patches_by_release():
    one = record(
        "one", v0_9=NEEDED_WITH_CHANGE, v0_10="needed", v0_11=ReleaseStatus("carried", "by them")
    )
    two = record("two", v0_10=ReleaseStatus("in part", "half"))
    assert table(markdown([one, two], {})) == [
        ["patch", "0.9", "0.10", "0.11"],
        ["---"] * 4,
        ["[one](#one)", "**needed**", "needed", "carried"],
        ["[two](#two)", "", "in part", ""],
    ]


def test_release_rows_of_a_patch():
    half = ReleaseStatus("in part", "half")
    page = markdown(
        [record("one", v1=NEEDED_WITH_CHANGE, v2="needed", v3=half, v4=half, v5="carried")], {}
    )
    _, said = page.split("- **Drop when:** never\n")
    assert said.splitlines() == [
        "- **1:** needed",
        "  - **Change:** the change",
        "  - **Names:** a name",
        "  - **Edits:** `a.py::*`",
        "- **3, 4:** in part: half",
    ]


def test_preview_releases_are_listed():
    assert "\nSGLang 1 is a preview: it has not run\n" in markdown([], {"1": "it has not run"})


def test_each_file_of_the_patch_set_is_in_a_release_and_stands_once():
    """What releases have in common is in a folder that they share, which their manifests name."""
    taken = {text for name in supported_releases() for text in load_release(name).tree.values()}
    files = [path.read_bytes() for path in sorted(RELEASES.rglob("*.py"))]
    files += [path.read_bytes() for path in sorted((TREES / "sglang").rglob("*.py"))]
    assert set(files) == taken
    assert len(set(files)) == len(files)
