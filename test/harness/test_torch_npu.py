"""Each image's torch_npu wheel has all functions that our code and the patched pools call.

The tests read the wheels without importing them, because an import needs an NPU's driver.
"""

import ast
import functools
import hashlib
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from pd_harness.cluster import CHECKOUT, PD_ENV
from sglang_pd.patchset.patches import supported_releases

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]

# (version, SHA-256) in each release's upstream image: 0.5.9 with CANN 8.5.0, later with CANN 9.
FOR_CANN_9 = ("2.10.0", "4e14fa849000189c26b006be1d1700e2f46edda48c84a7de05efd9ce6786a215")
WHEELS = {
    "0.5.9": ("2.8.0.post2", "684ec25bb0f40ce316ce15dc342cd2e3812437f0111abf7b247a3d733e1b1b99"),
    "0.5.18": FOR_CANN_9,
    "0.5.23": FOR_CANN_9,
}
PATCH_SOURCES = ["python/sglang", "python/engines", "test/npu", "python/pd_harness/device.py"]
PATCH_SOURCES += ["test/support/rank_base.py", "test/support/engine_calls.py"]
POOLS = "srt/hardware_backend/npu/memory_pool_npu.py"
OPERATORS = "python/pd_harness/cpu_host/npu_operators.py"


@functools.cache
def wheel(release: str) -> zipfile.ZipFile:
    """Returns the release's torch_npu wheel; fetches it once (36 MB at most), checks it always."""
    version, digest = WHEELS[release]
    folder = PD_ENV / "wheels"
    name = f"torch_npu-{version}-cp311-cp311-manylinux_2_28_x86_64.whl"
    if not (folder / name).exists():
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--only-binary", ":all:", "--python-version", "3.11"]
        command += ["--platform", "manylinux_2_28_x86_64", "--dest", str(folder)]
        done = subprocess.run(
            [*command, f"torch_npu=={version}"], capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, done.stderr[-2000:]
    found = hashlib.sha256((folder / name).read_bytes()).hexdigest()
    assert found == digest, f"{folder / name} has the SHA-256 {found}, not {digest}: remove it"
    return zipfile.ZipFile(folder / name)


def sources(release: str) -> Iterator[Path]:
    """Yields our source files of this release, and its patched pools."""
    for name in PATCH_SOURCES:
        path = CHECKOUT / name
        for file in [path] if path.is_file() else sorted(path.rglob("*.py")):
            others = {one for one in supported_releases() if one != release}
            if not others & set(file.parts):
                yield file
    engine = PD_ENV / release / "patched"
    (pools,) = engine.glob(f"lib/python*/site-packages/sglang/{POOLS}")
    yield pools


def npu_calls(source: str) -> Iterator[str]:
    """Yields `torch_npu.NAME`, `torch.npu.NAME` or `Tensor.npu` per attribute that is read."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Attribute):
            continue
        of = ast.unparse(node.value)
        if "get_device_module(" in of or of == "torch.npu":
            yield f"torch.npu.{node.attr}"
        elif of == "torch_npu":
            yield f"torch_npu.{node.attr}"
        elif node.attr == "npu" and of != "torch":
            yield "Tensor.npu"


def bound_names(source: bytes) -> set[str]:
    """Returns the names that a module imports, defines or assigns."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom | ast.Import):
            names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names


@functools.cache
def libraries(release: str) -> list[bytes]:
    """Returns the wheel's libraries that register operators."""
    return [
        wheel(release).read(name)
        for name in wheel(release).namelist()
        if re.fullmatch(r"torch_npu/lib/lib(torch_npu|op_plugin\w*)\.so", name)
    ]


def is_native(release: str, name: str) -> bool:
    """Returns whether a library has the operator's schema, `NAME(...) -> ...`, in any text."""
    schema = re.compile(re.escape(name.encode()) + rb"\([A-Z][^\0]*?\) -> [A-Z(]")
    return any(schema.search(library) for library in libraries(release))


def wheel_has(release: str, what: str) -> bool:
    module, _, name = what.rpartition(".")
    if what == "Tensor.npu":
        made = "generate_methods_for_privateuse1_backend"
        return made.encode() in wheel(release).read("torch_npu/__init__.py")
    if module == "torch.npu":
        return name in bound_names(wheel(release).read("torch_npu/npu/__init__.py"))
    known = bound_names(wheel(release).read("torch_npu/__init__.py"))
    return name in known or is_native(release, name)


@pytest.mark.parametrize("release", WHEELS)
def test_torch_npu_calls_exist_in_wheel(release):
    if not (PD_ENV / release / "patched").exists():
        pytest.skip(f"no patched engine of {release} here, whose pools are looked at")
    calls = {call for file in sources(release) for call in npu_calls(file.read_text())}
    assert {"torch.npu.synchronize", "torch.npu.device_count", "Tensor.npu"} < calls
    assert {"torch_npu.npu_scatter_nd_update_", "torch_npu._npu_reshape_and_cache"} < calls
    assert [call for call in sorted(calls) if not wheel_has(release, call)] == []


@pytest.mark.parametrize("release", WHEELS)
def test_stand_in_operators_exist_in_wheel(release):
    functions = ast.parse((CHECKOUT / OPERATORS).read_text()).body
    names = {one.name for one in functions if isinstance(one, ast.FunctionDef)}
    assert len(names) >= 2
    assert all(is_native(release, name) for name in names)


@pytest.mark.parametrize("release", WHEELS)
def test_missing_operators_are_detected(release):
    for name in ("torch_npu.npu_scatter_nd_updates_", "torch.npu.wait_for_all"):
        assert not wheel_has(release, name)


def test_every_release_has_a_wheel():
    assert set(WHEELS) == set(supported_releases())
