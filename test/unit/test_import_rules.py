"""Which modules may import which; `docs/architecture.md` has a drawing."""

import ast
import sys
from pathlib import Path

import pytest

PYTHON = Path(__file__).resolve().parents[2] / "python"
DISAGGREGATION = "sglang/srt/disaggregation"
KV_LAYOUT, PD = f"{DISAGGREGATION}/kv_layout", f"{DISAGGREGATION}/pd"
TRANSFER_LOG = f"{DISAGGREGATION}/transfer_log"
# What the packages that need no engine may import, beside the standard library.
LIBRARIES = {KV_LAYOUT: {"numpy", "msgspec"}, TRANSFER_LOG: {"msgspec", "prometheus_client"}}
BACKENDS = ("ascend", "common", "mooncake", "mori", "nixl")
# What the modules of a folder must not import.
FORBIDDEN = {
    PD: ("nixl", "mooncake", *(f"sglang.srt.disaggregation.{backend}" for backend in BACKENDS)),
    "sglang": ("sglang_pd", "pd_harness"),
    "engines": ("sglang_pd", "pd_harness"),
    "sglang_pd": ("pd_harness", "sglang", "torch"),
    "sglang_pd/grafting": ("sglang_pd.patchset", "sglang_pd.install", "sglang_pd.cli"),
    "sglang_pd/patchset": ("sglang_pd.install", "sglang_pd.cli", "sglang_pd.dev"),
}


def imports(file: Path) -> set[str]:
    """Dotted names that a file imports anywhere, `from a import b` as `a.b`."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            prefix = "." * node.level + (node.module or "")
            found |= {f"{prefix}.{alias.name}" for alias in node.names}
    return found


def source_files(folder: str) -> list[Path]:
    files = sorted((PYTHON / folder).rglob("*.py"))
    assert files, folder
    return files


def is_inside(name: str, packages) -> bool:
    return any(f"{name}.".startswith(f"{package}.") for package in packages)


@pytest.mark.parametrize(
    "folder, file",
    [
        pytest.param(folder, file, id=f"{Path(folder).name}-{file.name}")
        for folder in LIBRARIES
        for file in source_files(folder)
    ],
)
def test_engine_free_packages_do_not_import_the_engine(folder, file):
    allowed = {*sys.stdlib_module_names, *LIBRARIES[folder]}
    others = {name for name in imports(file) if not name.startswith(".")}
    assert {name.split(".")[0] for name in others} <= allowed


@pytest.mark.parametrize(
    "folder, file",
    [
        pytest.param(folder, file, id=f"{folder}-{file.relative_to(PYTHON / folder)}")
        for folder in FORBIDDEN
        for file in source_files(folder)
    ],
)
def test_modules_import_nothing_forbidden(folder, file):
    assert not [name for name in imports(file) if is_inside(name, FORBIDDEN[folder])]


def test_patch_packages_cannot_shadow_engine_packages():
    """The patch tree has an `__init__.py` only in packages that the engine lacks."""
    ours = {path.parent.relative_to(PYTHON) for path in PYTHON.glob("sglang/**/__init__.py")}
    assert {str(folder) for folder in ours} == {KV_LAYOUT, PD, TRANSFER_LOG}
