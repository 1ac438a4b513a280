"""The device that servers and tests run on: Ascend NPUs if there are any, else the CPU host.

Ranks without a model also run on CUDA GPUs, over NIXL, if the variable names them.
"""

import datetime
import importlib.util
import os
import time

from pd_harness.cpu_host.memfabric import discovers_peers_late

DEVICE_VARIABLE = "SGLANG_PD_DEVICE"
# 14 s were not always enough on a busy machine.
PEER_DISCOVERY_S = 20
# NPU attention does not support float32; of its types float16 is the most precise.
DTYPES = {"cpu": "float32", "npu": "float16"}  # of devices that servers run on
DEVICES = (*DTYPES, "cuda")


def device() -> str:
    """What ``SGLANG_PD_DEVICE`` names, else ``npu`` if this process sees one, else ``cpu``.

    Raises:
        ValueError: the variable names none of `DEVICES`.
        RuntimeError: the variable names a device that is missing, where a CI runner would otherwise
            skip all its tests.
    """
    named = os.environ.get(DEVICE_VARIABLE)
    if named is None:
        return "npu" if npus() else "cpu"
    if named not in DEVICES:
        raise ValueError(f"{DEVICE_VARIABLE} is {named!r}; set it to one of {', '.join(DEVICES)}")
    if named == "npu" and not npus():
        raise RuntimeError(f"{DEVICE_VARIABLE} is npu, but {_missing_npu()}")
    if named == "cuda" and not gpus():
        raise RuntimeError(f"{DEVICE_VARIABLE} is cuda, but torch sees no GPU")
    return named


def machine() -> dict:
    """Today's date, and this machine's cores and memory: what each measurement records."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    today = str(datetime.date.today())
    return {"date": today, "cores": os.cpu_count(), "memory_gib": round(memory / 2**30)}


def npus() -> int:
    """How many NPUs this process sees."""
    if importlib.util.find_spec("torch_npu") is None:
        return 0
    import torch
    import torch_npu  # noqa: F401 - adds `torch.npu`

    return torch.npu.device_count()


def gpus() -> int:
    """How many CUDA GPUs this process sees."""
    import torch

    return torch.cuda.device_count()


def npu_skip_reason() -> str | None:
    """Why tests that need an NPU are skipped; None if they run."""
    if device() == "npu":
        return None
    why = f"{DEVICE_VARIABLE} is cpu" if DEVICE_VARIABLE in os.environ else _missing_npu()
    return f"no NPU: {why}"


def _missing_npu() -> str:
    if importlib.util.find_spec("torch_npu") is None:
        return "torch_npu is not installed"
    return "torch_npu sees no device"


def wait_for_memfabric_peers(memfabric: str) -> None:
    """Wait until this release of MemFabric has discovered a peer that starts now.

    Before 1.1.3 it polls for peers every 3 s, and ignores their memory the first two times.
    """
    if device() == "npu" or discovers_peers_late(memfabric):
        time.sleep(PEER_DISCOVERY_S)
