"""`python -m sglang_pd.patchset.records`: for developers, prints docs/patches.md."""

from sglang_pd.patchset.patches import Patch, Release, load, supported

FIELDS = {
    "upstream": "Upstream",
    "symptom": "Symptom",
    "cause": "Cause",
    "change": "Change",
    "carried_by": "Carried by",
    "drop_when": "Drop when",
}


def markdown(releases: list[Release]) -> str:
    """The patch records of all releases as one page."""
    lines = [
        "# The patches",
        "",
        "Made by `python -m sglang_pd.patchset.records` from the patch records.",
    ]
    for release in releases:
        lines += ["", f"## For SGLang {release.name}"]
        for patch in release.patches:
            lines += ["", f"### {patch.id}: {patch.title}", "", *_rows(patch)]
    return "\n".join(lines) + "\n"


def _rows(patch: Patch) -> list[str]:
    rows = [f"- **{label}:** {getattr(patch, field)}" for field, label in FIELDS.items()]
    if patch.names:
        rows.append(f"- **Names:** {'; '.join(patch.names)}")
    return [*rows, "- **Edits:** " + ", ".join(f"`{symbol}`" for symbol in patch.symbols)]


if __name__ == "__main__":
    print(markdown([load(name) for name in supported()]), end="")
