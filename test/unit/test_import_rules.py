"""Which modules may import which; `docs/architecture.md` has a drawing."""

import ast
import sys
from pathlib import Path

import pytest

PYTHON = Path(__file__).resolve().parents[2] / "python"
KV_LAYOUT, PD = "sglang/srt/disaggregation/kv_layout", "sglang/srt/disaggregation/pd"
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


@pytest.mark.parametrize("file", source_files(KV_LAYOUT), ids=lambda file: file.name)
def test_kv_layout_does_not_import_engine(file):
    allowed = {*sys.stdlib_module_names, "numpy", "msgspec"}
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
    assert {str(folder) for folder in ours} == {KV_LAYOUT, PD}
