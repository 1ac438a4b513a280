"""Copies to and from the host wait for the device at their beginning and at their end.

These tests need `pretended_device`, whose copies arrive only when a caller waits:
`test_npu_dry_run.py` runs them. Each case must also fail where either wait is left out.
"""

import pretended_device
import pytest
import torch
from cpu_copy_checks import tensors
from sglang.srt.hardware_backend.npu import cpu_copy

pytestmark = pytest.mark.engine

ROWS = torch.tensor([4, 1, 6])
CHUNK = 2
LAYERS, SLOTS = 2, 8
OLD, NEW = 3.0, 5.0  # a slot's value before and after another stream writes it


def buffer_layers(buffer) -> list:
    return [[buffer[layer]] for layer in range(LAYERS)]


def pool_with_pending_write():
    """A device buffer [layers, slots, 4] that another stream is about to fill."""
    buffer = torch.full((LAYERS, SLOTS, 4), OLD, device="npu")
    pretended_device.synchronize()
    pretended_device.run_on_other_stream(lambda: buffer.host_tensor.fill_(NEW))
    return buffer


TO_HOST = {
    "rows": lambda buffer: cpu_copy.copy_to_host([buffer], ROWS, CHUNK),
    "layers": lambda buffer: cpu_copy.copy_layers_to_host(buffer_layers(buffer), ROWS, CHUNK),
}
FROM_HOST = {
    "rows": lambda copied, buffer: cpu_copy.copy_from_host(copied, [buffer], ROWS, CHUNK),
    "layers": lambda copied, buffer: cpu_copy.copy_layers_from_host(
        copied, buffer_layers(buffer), ROWS, CHUNK
    ),
}


def check_copy_to_host(how: str) -> None:
    """The copy contains every earlier write, and has arrived."""
    copied = TO_HOST[how](pool_with_pending_write())
    assert all((part == NEW).all() for part in tensors(copied))
    assert pretended_device.outstanding() == 0


def check_copy_from_host(how: str) -> None:
    """Another stream's earlier write does not overwrite the copy; its host memory is free again."""
    copied = TO_HOST[how](pool_with_pending_write())
    pretended_device.synchronize()
    buffer = pool_with_pending_write()
    for part in tensors(copied):
        part.fill_(OLD)
    FROM_HOST[how](copied, buffer)
    assert pretended_device.outstanding() == 0
    assert (buffer[:, ROWS.tolist()].cpu() == OLD).all()
    rest = [slot for slot in range(SLOTS) if slot not in ROWS]
    assert (buffer[:, rest].cpu() == NEW).all()


CASES = [(case, how) for case in (check_copy_to_host, check_copy_from_host) for how in TO_HOST]


@pytest.fixture(autouse=True)
def finish_pending_copies():
    yield
    pretended_device.synchronize()


@pytest.mark.parametrize("case, how", CASES)
def test_copy_synchronizes_with_device(case, how):
    case(how)


class SkipEverySecondWait:
    """Leaves out each copy's wait at its beginning (0) or at its end (1)."""

    def __init__(self, leave_out: int, wait):
        self.leave_out, self.wait, self.calls = leave_out, wait, 0

    def __call__(self, device) -> None:
        if self.calls % 2 != self.leave_out:
            self.wait(device)
        self.calls += 1


@pytest.mark.parametrize("leave_out", [0, 1], ids=["beginning", "end"])
@pytest.mark.parametrize("case, how", CASES)
def test_missing_synchronization_is_detected(case, how, leave_out, monkeypatch):
    monkeypatch.setattr(
        cpu_copy, "_synchronize", SkipEverySecondWait(leave_out, cpu_copy._synchronize)
    )
    with pytest.raises(AssertionError):
        case(how)
