"""What servers and tests run on: Ascend NPUs where there are any, the CPU host elsewhere."""

import importlib.util
import os
import time

from pd_harness.cpu_host.memfabric import discovers_peers_late

DEVICE_VARIABLE = "SGLANG_PD_DEVICE"
# On a busy machine 14 were not always enough.
PEER_DISCOVERY_S = 20
# Attention on an NPU knows no float32. Of its types float16 is nearest to what is right.
DTYPES = {"cpu": "float32", "npu": "float16"}


def device() -> str:
    """``cpu`` or ``npu``: what ``SGLANG_PD_DEVICE`` names, else ``npu`` where one is seen.

    Raises:
        ValueError: it names something else.
        RuntimeError: it names ``npu``, and there is none; so a runner's tests cannot all skip.
    """
    named = os.environ.get(DEVICE_VARIABLE)
    if named is None:
        return "npu" if npus() else "cpu"
    if named not in DTYPES:
        raise ValueError(f"{DEVICE_VARIABLE} is {named!r}; set it to one of {', '.join(DTYPES)}")
    if named == "npu" and not npus():
        raise RuntimeError(f"{DEVICE_VARIABLE} is npu, but {_missing_npu()}")
    return named


def npus() -> int:
    """How many NPUs this process sees."""
    if importlib.util.find_spec("torch_npu") is None:
        return 0
    import torch
    import torch_npu  # noqa: F401 - gives torch its `npu`

    return torch.npu.device_count()


def npu_skip_reason() -> str | None:
    """Why tests that need an NPU do not run; None where they do."""
    if device() == "npu":
        return None
    return (
        f"no NPU: {DEVICE_VARIABLE} is cpu"
        if DEVICE_VARIABLE in os.environ
        else f"no NPU: {_missing_npu()}"
    )


def _missing_npu() -> str:
    if importlib.util.find_spec("torch_npu") is None:
        return "torch_npu is not installed"
    return "torch_npu sees no device"


def wait_for_memfabric_peers(memfabric: str) -> None:
    """Wait until this release of MemFabric knows a peer that has started now.

    Before 1.1.3 it looks for peers every 3 s, and not for their memory the first two times.
    """
    if device() == "npu" or discovers_peers_late(memfabric):
        time.sleep(PEER_DISCOVERY_S)
