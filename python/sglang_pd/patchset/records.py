"""`python -m sglang_pd.patchset.records`: for developers, prints docs/patches.md."""

from itertools import groupby

from sglang_pd.patchset.patches import (
    PatchRecord,
    ReleaseStatus,
    load_release,
    read_records,
    supported_releases,
    version_key,
)

HEAD = """\
# The patches

Made by `python -m sglang_pd.patchset.records` from the patch records, `python/engines/patches/`.

First what the patch set is for, then other layouts of prefill and decode that did not fit, then
hardening.

How much of each patch a release of SGLang needs: all (needed), some (in part: below is what it
has, or what is left), or nothing, for it has the like itself (carried). Bold: this patch set has an
edit for it. Empty: not examined.
"""
FIELDS = {
    "upstream": "Upstream",
    "symptom": "Symptom",
    "cause": "Cause",
    "drop_when": "Drop when",
}


def markdown(records: list[PatchRecord], previews: dict[str, str]) -> str:
    """Formats the patch records as one page. previews: {preview release: why it is a preview}."""
    columns = sorted({name for record in records for name in record.releases}, key=version_key)
    lines = [HEAD, *(f"SGLang {name} is a preview: {why}\n" for name, why in previews.items())]
    lines += [_row(["patch", *columns]), _row(["---"] * (len(columns) + 1))]
    for record in records:
        cells = (_cell(record.at(name)) for name in columns)
        lines.append(_row([f"[{record.id}](#{record.id})", *cells]))
    for record in records:
        lines += ["", f"## {record.id}", "", f"{record.title}.", "", *_fields(record)]
        lines += _release_rows(record, columns)
    return "\n".join(lines) + "\n"


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(stand: ReleaseStatus | None) -> str:
    if stand is None:
        return ""
    return f"**{stand.state}**" if stand.symbols else stand.state


def _fields(record: PatchRecord) -> list[str]:
    return [f"- **{label}:** {getattr(record, field)}" for field, label in FIELDS.items()]


def _release_rows(record: PatchRecord, columns: list[str]) -> list[str]:
    """Formats the releases' statuses; adjacent releases with equal statuses share an item."""
    statuses = ((name, record.at(name)) for name in columns)
    rows = []
    for stand, group in groupby(statuses, key=lambda one: one[1]):
        if stand and (stand.what or stand.symbols):
            names = ", ".join(name for name, _ in group)
            state = stand.state + (f": {stand.what}" if stand.what else "")
            rows += [f"- **{names}:** {state}", *(f"  - {line}" for line in _edit(stand))]
    return rows


def _edit(stand: ReleaseStatus) -> list[str]:
    rows = [f"**Change:** {stand.change}"] if stand.change else []
    rows += [f"**Names:** {'; '.join(stand.names)}"] if stand.names else []
    edits = ", ".join(f"`{symbol}`" for symbol in stand.symbols)
    return [*rows, f"**Edits:** {edits}"] if edits else rows


def page() -> str:
    """Returns the text that docs/patches.md must have."""
    statuses = {
        name: load_release(name, with_fingerprints=False).preview for name in supported_releases()
    }
    return markdown(read_records(), {name: why for name, why in statuses.items() if why})


if __name__ == "__main__":
    print(page(), end="")
