"""Which modules may import which; `docs/architecture.md` has a drawing."""

import ast
import sys
from pathlib import Path

import pytest

PYTHON = Path(__file__).resolve().parents[2] / "python"
DISAGGREGATION = "sglang.srt.disaggregation"
BACKENDS = ("ascend", "common", "mooncake", "mori", "nixl")
TOOL_PACKAGES = ("sglang_pd", "pd_harness")


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


def source_files(*folders: str) -> list:
    files = [file for folder in folders for file in sorted((PYTHON / folder).rglob("*.py"))]
    assert files, folders
    return [pytest.param(file, id=str(file.relative_to(PYTHON))) for file in files]


def is_inside(name: str, packages) -> bool:
    return any(f"{name}.".startswith(f"{package}.") for package in packages)


@pytest.mark.parametrize("file", source_files("sglang/srt/disaggregation/kv_layout"))
def test_kv_layout_does_not_import_engine(file):
    allowed = {*sys.stdlib_module_names, "numpy", "msgspec"}
    others = {name for name in imports(file) if not name.startswith(".")}
    assert {name.split(".")[0] for name in others} <= allowed


@pytest.mark.parametrize("file", source_files("sglang/srt/disaggregation/pd"))
def test_pd_does_not_import_backends(file):
    backends = [f"{DISAGGREGATION}.{name}" for name in BACKENDS]
    assert not [name for name in imports(file) if is_inside(name, (*backends, "nixl", "mooncake"))]


@pytest.mark.parametrize("file", source_files("sglang", "engines"))
def test_patches_do_not_import_tool_or_harness(file):
    assert not [name for name in imports(file) if is_inside(name, TOOL_PACKAGES)]


@pytest.mark.parametrize("file", source_files("sglang_pd"))
def test_tool_does_not_import_harness_or_engine(file):
    assert not [
        name for name in imports(file) if is_inside(name, ("pd_harness", "sglang", "torch"))
    ]


@pytest.mark.parametrize("file", source_files("sglang_pd/grafting"))
def test_grafting_does_not_import_rest_of_tool(file):
    rest = ("sglang_pd.patchset", "sglang_pd.install", "sglang_pd.cli")
    assert not [name for name in imports(file) if is_inside(name, rest)]


def test_patch_packages_cannot_shadow_engine_packages():
    """The patch tree has an `__init__.py` only in packages that the engine lacks."""
    ours = {path.parent.relative_to(PYTHON) for path in PYTHON.glob("sglang/**/__init__.py")}
    assert {str(folder) for folder in ours} == {
        "sglang/srt/disaggregation/kv_layout",
        "sglang/srt/disaggregation/pd",
    }
