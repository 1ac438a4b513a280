"""The CPU host: off unless asked for, never beside a real NPU, replacing only what is missing."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_pd.cpu_host import SWITCH, thread_binding

PACKAGE = Path(__file__).resolve().parents[2] / "python"


def python(code: str, *arguments: str, path: Path | None = None, **environment: str):
    """Run ``code`` after `activate` in a fresh interpreter with ``environment`` alone."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    folders = [str(folder) for folder in (path, PACKAGE) if folder]
    return subprocess.run(
        [
            sys.executable,
            "-c",
            f"from sglang_pd.cpu_host.startup import activate; activate()\n{code}",
            *arguments,
        ],
        env={**kept, "PYTHONPATH": os.pathsep.join(folders), **environment},
        capture_output=True,
        text=True,
    )


def test_off_unless_asked_for():
    found = python("import importlib.util as u; print(u.find_spec('sgl_kernel'))")
    assert found.stdout == "None\n"


def test_a_misspelt_switch_is_refused():
    found = python("print('ran')", **{SWITCH: "yes"})
    assert found.returncode != 0
    assert f"{SWITCH} is 'yes'" in found.stderr
    assert found.stdout == ""


def test_refuses_beside_torch_npu(tmp_path):
    (tmp_path / "torch_npu.py").write_text("")
    found = python("print('ran')", path=tmp_path, **{SWITCH: "1"})
    assert found.returncode != 0
    assert "torch_npu" in found.stderr
    assert str(tmp_path) in found.stderr
    assert found.stdout == ""


def test_a_missing_kernel_has_a_name_but_does_not_compute():
    found = python(
        "from sgl_kernel.kvcacheio import transfer_kv_all_layer as kernel\nkernel(1)",
        **{SWITCH: "1"},
    )
    assert "sgl_kernel.kvcacheio.transfer_kv_all_layer was called" in found.stderr


def test_an_installed_package_is_used_rather_than_its_stand_in(tmp_path):
    (tmp_path / "sgl_kernel.py").write_text("real = True")
    found = python("import sgl_kernel; print(sgl_kernel.real)", path=tmp_path, **{SWITCH: "1"})
    assert found.stdout == "True\n", found.stderr


def test_streams_and_events_of_the_pipeline_loop():
    found = python(
        """
import torch
event = torch.cuda.Event()
event.record(torch.cuda.current_stream())
torch.cuda.current_stream().wait_event(event)
with torch.cuda.stream(torch.cuda.Stream()):
    torch.cuda.synchronize()
print(event.query())
""",
        **{SWITCH: "1"},
    )
    assert found.stdout == "True\n", found.stderr


@pytest.mark.parametrize(
    ("arguments", "entries"),
    [([], 1), (["--tp", "2"], 2), (["--tp-size=4"], 4), (["--tensor-parallel-size", "3"], 3)],
)
def test_one_core_is_named_per_rank(arguments, entries):
    code = "import os; print(os.environ['SGLANG_CPU_OMP_THREADS_BIND'])"
    found = python(code, *arguments, **{SWITCH: "1"})
    assert found.stdout.strip() == thread_binding(entries), found.stderr


def test_a_chosen_binding_stays():
    found = python(
        "import os; print(os.environ['SGLANG_CPU_OMP_THREADS_BIND'])",
        **{SWITCH: "1", "SGLANG_CPU_OMP_THREADS_BIND": "all"},
    )
    assert found.stdout == "all\n", found.stderr


def fake_packages(folder: Path, patched: bool) -> None:
    """An engine and a NIXL with just enough in them to see which memory kinds are changed."""
    disaggregation = folder / "sglang" / "srt" / "disaggregation"
    if patched:
        (disaggregation / "kv_layout").mkdir(parents=True)
        (disaggregation / "kv_layout" / "__init__.py").write_text("")
    (folder / "sglang").mkdir(exist_ok=True)
    (folder / "sglang" / "__init__.py").write_text("")
    (folder / "nixl_cu12").mkdir()
    (folder / "nixl_cu12" / "__init__.py").write_text("")
    (folder / "nixl_cu12" / "_api.py").write_text(
        "class nixl_agent:\n"
        "    def __init__(self, name):\n"
        "        self.nixl_mems = {'DRAM': 0, 'VRAM': 1}\n"
    )


@pytest.mark.parametrize(
    ("patched", "kinds"), [(False, {"DRAM": 0, "VRAM": 0}), (True, {"DRAM": 0, "VRAM": 1})]
)
def test_nixl_memory_kind_is_changed_for_the_stock_engine_only(tmp_path, patched, kinds):
    fake_packages(tmp_path, patched)
    code = "import json, nixl_cu12._api as a; print(json.dumps(a.nixl_agent('x').nixl_mems))"
    found = python(code, path=tmp_path, **{SWITCH: "1"})
    assert json.loads(found.stdout) == kinds, found.stderr


def test_kv_heads_are_not_padded():
    pytest.importorskip("sglang", reason="needs the engine: run with scripts/cpu_host.sh")
    from sglang.srt.configs import update_config

    assert update_config.adjust_config_with_unaligned_cpu_tp("config", "load", 4) == "config"
