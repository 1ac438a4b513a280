"""Checks the engine, its release, and whether the patches are applied."""

from collections.abc import Iterator

from sglang_pd.doctor.findings import Finding, ok, warning, wrong
from sglang_pd.install.engine import Engine
from sglang_pd.install.operations import Status
from sglang_pd.patchset.patches import Release

GROUP = "engine"
ADVICE = {
    "absent": "run `sglang-pd apply`",
    "half-applied": "run `sglang-pd apply`, which completes it",
    "outdated": "run `sglang-pd apply`, which brings it up to date",
    "drifted": "`sglang-pd status` names the symbols; install the published release",
}


def check_engine(engine: Engine, release: Release) -> Iterator[Finding]:
    text = f"SGLang {engine.version or release.name} at {engine.root}"
    if release.preview:
        yield warning(GROUP, "release", text, f"it is a preview: {release.preview}")
    elif engine.version and engine.version != release.name:
        yield ok(GROUP, "release", f"{text}, treated as {release.name}")
    else:
        yield ok(GROUP, "release", text)


def check_patches(status: Status) -> Iterator[Finding]:
    if status.state == "applied":
        yield ok(GROUP, "patches", f"{len(status.patches)} applied")
    else:
        yield wrong(GROUP, "patches", status.state, ADVICE[status.state])
    if status.edited:
        files = ", ".join(status.edited)
        found = f"edited since the patch set was applied: {files}"
        yield wrong(GROUP, "files", found, "reinstall the engine, then apply")
