"""Who may import whom; `docs/architecture.md` draws it."""

import ast
import sys
from pathlib import Path

import pytest

PYTHON = Path(__file__).resolve().parents[2] / "python"
DISAGGREGATION = "sglang.srt.disaggregation"
BACKENDS = ("ascend", "common", "mooncake", "mori", "nixl")
OURS = ("sglang_pd", "pd_harness")


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


def of(*folders: str) -> list:
    files = [file for folder in folders for file in sorted((PYTHON / folder).rglob("*.py"))]
    assert files, folders
    return [pytest.param(file, id=str(file.relative_to(PYTHON))) for file in files]


def is_of(name: str, packages) -> bool:
    return any(f"{name}.".startswith(f"{package}.") for package in packages)


@pytest.mark.parametrize("file", of("sglang/srt/disaggregation/kv_layout"))
def test_kv_layout_knows_no_engine(file):
    allowed = {*sys.stdlib_module_names, "numpy", "msgspec"}
    others = {name for name in imports(file) if not name.startswith(".")}
    assert {name.split(".")[0] for name in others} <= allowed


@pytest.mark.parametrize("file", of("sglang/srt/disaggregation/pd"))
def test_pd_knows_no_backend(file):
    backends = [f"{DISAGGREGATION}.{name}" for name in BACKENDS]
    assert not [name for name in imports(file) if is_of(name, (*backends, "nixl", "mooncake"))]


@pytest.mark.parametrize("file", of("sglang", "engines"))
def test_what_runs_in_the_engine_knows_neither_tool_nor_harness(file):
    assert not [name for name in imports(file) if is_of(name, OURS)]


@pytest.mark.parametrize("file", of("sglang_pd"))
def test_the_tool_knows_neither_harness_nor_engine(file):
    assert not [name for name in imports(file) if is_of(name, ("pd_harness", "sglang", "torch"))]


@pytest.mark.parametrize("file", of("sglang_pd/grafting"))
def test_grafting_knows_nothing_else_of_the_tool(file):
    rest = ("sglang_pd.patchset", "sglang_pd.install", "sglang_pd.cli")
    assert not [name for name in imports(file) if is_of(name, rest)]


def test_no_folder_of_ours_can_shadow_the_engine():
    """Where the engine has an `__init__.py`, ours has none."""
    ours = {path.parent.relative_to(PYTHON) for path in PYTHON.glob("sglang/**/__init__.py")}
    assert {str(folder) for folder in ours} == {
        "sglang/srt/disaggregation/kv_layout",
        "sglang/srt/disaggregation/pd",
    }
