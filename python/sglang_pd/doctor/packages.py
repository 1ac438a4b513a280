"""Checks package versions against the tested ones, and that the transport can be loaded."""

import re
from collections.abc import Iterator

from sglang_pd.doctor.findings import Finding, ok, warning, wrong
from sglang_pd.doctor.host import Host, LaunchOptions
from sglang_pd.patchset.patches import Release, public_version

GROUP = "packages"
# The distributions that each may be installed as.
PACKAGES = {
    "torch": ("torch",),
    "torch_npu": ("torch-npu",),
    "nixl": ("nixl", "nixl-cu12", "nixl-cu13"),
    "mooncake": (
        "mooncake-transfer-engine",
        "mooncake-transfer-engine-cuda13",
        "mooncake-transfer-engine-non-cuda",
    ),
    "memfabric": ("memfabric-hybrid",),
}
BACKEND_LIBRARY = {"nixl": "nixl", "mooncake": "mooncake", "ascend": "memfabric"}
BACKEND_MODULE = {"nixl": "nixl._api", "mooncake": "mooncake.engine", "ascend": "memfabric_hybrid"}
CANN_HOMES = ("/usr/local/Ascend/ascend-toolkit/latest", "/usr/local/Ascend/cann")
CANN_FILES = ("*/ascend_toolkit_install.info", "compiler/version.info")


def version(host: Host, name: str) -> str:
    """Returns the version of a key of PACKAGES; empty if it is not installed."""
    found = host.versions(*PACKAGES[name])
    return next((found[package] for package in PACKAGES[name] if package in found), "")


def choose_backend(host: Host) -> str:
    """Returns the backend that the host's packages suggest, else the engine's default."""
    if version(host, "torch_npu"):
        return "ascend"
    return "nixl" if version(host, "nixl") and not version(host, "mooncake") else "mooncake"


def check_versions(host: Host, launch: LaunchOptions, release: Release) -> Iterator[Finding]:
    """Checks the versions, except an installed MemFabric's, which doctor/memfabric.py checks."""
    on_npu = launch.backend == "ascend"
    names = ["torch", *(["torch_npu"] if on_npu else []), BACKEND_LIBRARY[launch.backend]]
    for name in names:
        found = version(host, name)
        if not (name == "memfabric" and found):
            yield _version_finding(name, found, release)
    if on_npu:
        yield _version_finding("CANN", cann_version(host), release)


def _version_finding(name: str, found: str, release: Release) -> Finding:
    tested = release.tested.get(name, [])
    if not found:
        where = "source its `set_env.sh`" if name == "CANN" else "install it for this Python"
        return wrong(GROUP, name, "not found", f"{where}, or choose another --backend")
    if public_version(found) in map(public_version, tested):
        return ok(GROUP, name, found)
    known = f"were tested only with {', '.join(tested)}" if tested else "were never tested with it"
    advice = f"the patches {known}: run `sglang-pd verify` before you rely on it"
    return warning(GROUP, name, found, advice)


def cann_version(host: Host) -> str:
    """Returns the CANN toolkit's version; empty if there is none.

    Looks where the environment says, then in the usual places.
    """
    named = host.environ.get("ASCEND_TOOLKIT_HOME") or host.environ.get("ASCEND_HOME_PATH")
    for home in (named, *CANN_HOMES) if named else CANN_HOMES:
        for pattern in CANN_FILES:
            for file in sorted(host.path(home).glob(pattern)):
                match = re.search(r"(?im)^version=(.+)$", file.read_text(errors="replace"))
                if match:
                    return match[1].strip()
    return ""


def check_library(host: Host, launch: LaunchOptions) -> Iterator[Finding]:
    """Checks that the transport's library can be loaded, including system libraries."""
    module = BACKEND_MODULE[launch.backend]
    if not version(host, BACKEND_LIBRARY[launch.backend]) or host.import_error is None:
        return
    if not (error := host.import_error(module)):
        yield ok(GROUP, module, "can be imported")
    elif launch.in_image and launch.backend == "ascend":
        advice = "an image has no NPU driver: run doctor again on the host"
        yield warning(GROUP, module, error, advice)
    else:
        advice = "install what the error names (often a system library), or reinstall the package"
        yield wrong(GROUP, module, error, advice)
