"""Work beside the forward passes: on a device it is done when the block ends."""

import contextlib
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.disaggregation.pd import side_stream

pytestmark = pytest.mark.engine


class Device:
    """Stands in for torch's module of a device, and logs what is asked of it."""

    def __init__(self):
        self.log: list[str] = []

    def set_device(self, device) -> None:
        self.log.append(f"set {device}")

    def Stream(self):  # noqa: N802
        self.log.append("new stream")
        return SimpleNamespace(synchronize=lambda: self.log.append("synchronize"))

    @contextlib.contextmanager
    def stream(self, stream):
        self.log.append("enter")
        yield
        self.log.append("leave")


@pytest.fixture
def device(monkeypatch):
    made = Device()
    monkeypatch.setattr(torch, "get_device_module", lambda device: made)
    monkeypatch.setattr(side_stream, "_of_thread", SimpleNamespace(stream=None))
    return made


def work(device: Device) -> None:
    with side_stream.side_stream(torch.device("cuda:1")):
        device.log.append("work")


def test_work_is_done_when_the_block_ends(device):
    """Pages are read, or sent, next: by others, who do not know this stream."""
    work(device)
    assert device.log == ["set cuda:1", "new stream", "enter", "work", "leave", "synchronize"]


def test_thread_keeps_its_stream(device):
    work(device)
    work(device)
    assert device.log.count("new stream") == 1 and device.log.count("synchronize") == 2


def test_work_that_fails_is_waited_for_too(device):
    """What it has started still reads and writes memory that is given to others."""
    with pytest.raises(KeyError), side_stream.side_stream(torch.device("cuda:1")):
        raise KeyError("injected")
    assert device.log[-1] == "synchronize"


def test_cpu_has_no_stream(device):
    with side_stream.side_stream(torch.device("cpu")):
        device.log.append("work")
    assert device.log == ["work"]
