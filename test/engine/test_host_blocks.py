"""Host memory of copies: what was not needed for a while is given back."""

import gc
import threading
import time

import pytest
import torch
from sglang.srt.hardware_backend.npu import host_blocks

from pd_harness.waiting import awaited

pytestmark = pytest.mark.engine

SIZE = 3 << 12  # which no other test takes
KIND = (SIZE, False)


class Copy:
    pass


@pytest.fixture(autouse=True)
def no_thread(monkeypatch):
    """Windows of time end where a test says so."""
    monkeypatch.setattr(host_blocks, "_giving_back", [threading.current_thread()])
    host_blocks._free.pop(KIND, None)
    host_blocks._fewest.pop(KIND, None)


def copies(count: int) -> list[Copy]:
    made = [Copy() for _ in range(count)]
    for owner in made:
        assert host_blocks.take(owner, SIZE, SIZE, False).nbytes == SIZE
    return made


def free() -> int:
    gc.collect()
    return len(host_blocks._free[KIND])


def end_window() -> int:
    """Drop what was not needed in it; how many blocks that were."""
    kinds = [kind for kind in host_blocks.unneeded() if kind == KIND]
    for kind in kinds:
        host_blocks.drop(kind)
    return len(kinds)


def test_as_many_are_kept_as_were_in_use_at_a_time():
    made = copies(10)
    end_window()
    del made[:]
    assert free() == 10
    assert end_window() == 0  # until just now all were in use
    made = copies(3)
    del made[:]
    assert free() == 10
    assert end_window() == 7 and free() == 3
    assert end_window() == 3 and free() == 0
    assert end_window() == 0


def test_a_block_in_use_is_not_dropped():
    (owner,) = copies(1)
    end_window()
    end_window()
    del owner
    assert free() == 1


def test_what_is_taken_meanwhile_is_not_dropped():
    made = copies(2)
    del made[:]
    assert free() == 2
    end_window()
    kinds = host_blocks.unneeded()
    made = copies(2)
    for kind in kinds:
        host_blocks.drop(kind)
    del made[:]
    assert free() == 2


def test_a_thread_gives_them_back(monkeypatch):
    monkeypatch.setattr(host_blocks, "_giving_back", [])
    monkeypatch.setattr(host_blocks, "IDLE_SECONDS", 0.05)
    monkeypatch.setattr(host_blocks, "PAUSE_SECONDS", 0.0)
    made = copies(5)
    copies(5)  # whose owners are gone at once
    (thread,) = host_blocks._giving_back
    assert awaited(lambda: not host_blocks._free[KIND], 10, 0.01)
    time.sleep(0.2)
    del made[:]
    assert awaited(lambda: free() == 0, 10, 0.01)
    assert thread.daemon and thread.is_alive()


def test_torch_keeps_no_pinned_memory_that_was_given_back(monkeypatch):
    """It has a free list of its own, which this takes the last block from."""
    emptied = []
    backend = type("TorchNpu", (), {})
    backend._C = type("C", (), {host_blocks.EMPTY_CACHE: lambda: emptied.append(1)})
    monkeypatch.setitem(host_blocks.sys.modules, "torch_npu", backend)
    for pinned, calls in ((False, 0), (True, 1)):
        host_blocks._free[SIZE, pinned].append(torch.empty(SIZE, dtype=torch.uint8))
        host_blocks.drop((SIZE, pinned))
        assert len(emptied) == calls
