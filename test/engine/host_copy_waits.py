"""The copy to the host waits for the device at its beginning and at its end.

For `pretended_device` alone, whose copies arrive when somebody waits: `test_pretended_npus.py`
runs this. Each case is also shown to fail where the waits do nothing.
"""

import pretended_device
import pytest
import torch
from copies import tensors
from sglang.srt.hardware_backend.npu import cpu_copy

pytestmark = pytest.mark.engine

ROWS = torch.tensor([4, 1, 6])
CHUNK = 2
LAYERS, SLOTS = 2, 8
OLD, NEW = 3.0, 5.0  # of a slot, before and after another stream has written it


def layers_of(buffer) -> list:
    return [[buffer[layer]] for layer in range(LAYERS)]


def a_pool():
    """[layers, slots, 4] on the device, which another stream is about to fill."""
    buffer = torch.full((LAYERS, SLOTS, 4), OLD, device="npu")
    pretended_device.synchronize()
    pretended_device.later(lambda: buffer.held.fill_(NEW))
    return buffer


TO_HOST = {
    "rows": lambda buffer: cpu_copy.copy_to_host([buffer], ROWS, CHUNK),
    "layers": lambda buffer: cpu_copy.copy_layers_to_host(layers_of(buffer), ROWS, CHUNK),
}
FROM_HOST = {
    "rows": lambda copied, buffer: cpu_copy.copy_from_host(copied, [buffer], ROWS, CHUNK),
    "layers": lambda copied, buffer: cpu_copy.copy_layers_from_host(
        copied, layers_of(buffer), ROWS, CHUNK
    ),
}


def leaves_the_device(how: str) -> None:
    """All that was written before has been copied, and has arrived."""
    copied = TO_HOST[how](a_pool())
    assert all((part == NEW).all() for part in tensors(copied))
    assert pretended_device.outstanding() == 0


def returns_to_it(how: str) -> None:
    """What another stream wrote before does not overwrite it; its host memory may be used again."""
    copied = TO_HOST[how](a_pool())
    pretended_device.synchronize()
    buffer = a_pool()
    for part in tensors(copied):
        part.fill_(OLD)
    FROM_HOST[how](copied, buffer)
    assert pretended_device.outstanding() == 0
    assert (buffer[:, ROWS.tolist()].cpu() == OLD).all()
    rest = [slot for slot in range(SLOTS) if slot not in ROWS]
    assert (buffer[:, rest].cpu() == NEW).all()


CASES = [(case, how) for case in (leaves_the_device, returns_to_it) for how in TO_HOST]


@pytest.fixture(autouse=True)
def nothing_is_left():
    yield
    pretended_device.synchronize()


@pytest.mark.parametrize("case, how", CASES)
def test_it_waits(case, how):
    case(how)


class OneOfTwo:
    """Waits at the beginning of each copy and not at its end, or the other way round."""

    def __init__(self, leave_out: int, wait):
        self.leave_out, self.wait, self.calls = leave_out, wait, 0

    def __call__(self, device) -> None:
        if self.calls % 2 != self.leave_out:
            self.wait(device)
        self.calls += 1


@pytest.mark.parametrize("leave_out", [0, 1], ids=["beginning", "end"])
@pytest.mark.parametrize("case, how", CASES)
def test_a_wait_that_does_nothing_is_noticed(case, how, leave_out, monkeypatch):
    monkeypatch.setattr(cpu_copy, "_wait_for", OneOfTwo(leave_out, cpu_copy._wait_for))
    with pytest.raises(AssertionError):
        case(how)
