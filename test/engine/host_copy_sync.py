"""Copies to and from the host wait for the device at their beginning and at their end.

These tests need `pretended_device`, whose copies arrive only when a caller waits:
`test_npu_dry_run.py` runs them. Each case must also fail where either wait is left out.
"""

import itertools

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
# Copies to the host, copies back, and the form of a buffer that both take.
COPIES = {
    "rows": (cpu_copy.copy_to_host, cpu_copy.copy_from_host, lambda buffer: [buffer]),
    "layers": (
        cpu_copy.copy_layers_to_host,
        cpu_copy.copy_layers_from_host,
        lambda buffer: [[buffer[layer]] for layer in range(LAYERS)],
    ),
}


def pool_with_pending_write():
    """A device buffer [layers, slots, 4] that another stream is about to fill."""
    buffer = torch.full((LAYERS, SLOTS, 4), OLD, device="npu")
    pretended_device.synchronize()
    pretended_device.run_on_other_stream(lambda: buffer.host_tensor.fill_(NEW))
    return buffer


def check_copy_to_host(how: str) -> None:
    """The copy contains every earlier write, and has arrived."""
    to_host, _, form = COPIES[how]
    copied = to_host(form(pool_with_pending_write()), ROWS, CHUNK)
    assert all((part == NEW).all() for part in tensors(copied))
    assert pretended_device.outstanding() == 0


def check_copy_from_host(how: str) -> None:
    """Another stream's earlier write does not overwrite the copy; its host memory is free again."""
    to_host, from_host, form = COPIES[how]
    copied = to_host(form(pool_with_pending_write()), ROWS, CHUNK)
    pretended_device.synchronize()
    buffer = pool_with_pending_write()
    for part in tensors(copied):
        part.fill_(OLD)
    from_host(copied, form(buffer), ROWS, CHUNK)
    assert pretended_device.outstanding() == 0
    assert (buffer[:, ROWS.tolist()].cpu() == OLD).all()
    rest = [slot for slot in range(SLOTS) if slot not in ROWS]
    assert (buffer[:, rest].cpu() == NEW).all()


CASES = [(case, how) for case in (check_copy_to_host, check_copy_from_host) for how in COPIES]


@pytest.fixture(autouse=True)
def finish_pending_copies():
    yield
    pretended_device.synchronize()


@pytest.mark.parametrize("case, how", CASES)
def test_copy_synchronizes_with_device(case, how):
    case(how)


@pytest.mark.parametrize("left_out", [0, 1], ids=["beginning", "end"])
@pytest.mark.parametrize("case, how", CASES)
def test_missing_synchronization_is_detected(case, how, left_out, monkeypatch):
    """Each copy waits twice, and one of the two waits is left out."""
    waits, wait = itertools.count(), cpu_copy._synchronize

    def wait_or_not(device) -> None:
        if next(waits) % 2 != left_out:
            wait(device)

    monkeypatch.setattr(cpu_copy, "_synchronize", wait_or_not)
    with pytest.raises(AssertionError):
        case(how)
