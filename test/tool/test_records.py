"""The page of patches: a table of patch by release, then what there is to say of each."""

from sglang_pd.patchset.patches import Record, Stand, age
from sglang_pd.patchset.records import markdown

OURS = Stand("needed", change="the change", symbols=["a.py::*"], names=["a name"])


def record(name: str, **releases: str | Stand) -> Record:
    """A record; releases are given as v1_0="needed"."""
    named = {at[1:].replace("_", "."): stand for at, stand in releases.items()}
    title = f"Title of {name}"
    return Record(name, title, "mission", 1, "none", "symptom", "cause", "never", named)


def table(page: str) -> list[list[str]]:
    rows = [line for line in page.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def test_releases_are_in_their_order():
    names = ["0.5.12.post1", "0.5.9", "0.5.10", "0.5.12", "0.5.9.post2"]
    assert sorted(names, key=age) == ["0.5.9", "0.5.9.post2", "0.5.10", "0.5.12", "0.5.12.post1"]


def test_the_table():
    one = record("one", v0_9=OURS, v0_10="needed", v0_11=Stand("carried", "by them"))
    two = record("two", v0_10=Stand("in part", "half"))
    assert table(markdown([one, two], {})) == [
        ["patch", "0.9", "0.10", "0.11"],
        ["---"] * 4,
        ["[one](#one)", "**needed**", "needed", "carried"],
        ["[two](#two)", "", "in part", ""],
    ]


def test_what_is_said_of_releases():
    half = Stand("in part", "half")
    page = markdown([record("one", v1=OURS, v2="needed", v3=half, v4=half, v5="carried")], {})
    _, said = page.split("- **Drop when:** never\n")
    assert said.splitlines() == [
        "- **1:** needed",
        "  - **Change:** the change",
        "  - **Names:** a name",
        "  - **Edits:** `a.py::*`",
        "- **3, 4:** in part: half",
    ]


def test_previews_are_named():
    assert "\nSGLang 1 is a preview: it has not run\n" in markdown([], {"1": "it has not run"})
