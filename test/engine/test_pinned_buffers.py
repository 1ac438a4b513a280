"""Host memory of copies: blocks that were idle for a while are released."""

import gc
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.hardware_backend.npu import pinned_buffers

from pd_harness.polling import wait_until

pytestmark = pytest.mark.engine

SIZE = 3 << 12  # no other test allocates this size
KIND = (SIZE, False)


class BlockOwner:
    pass


@pytest.fixture(autouse=True)
def no_background_thread(monkeypatch):
    """Lets tests end idle windows themselves."""
    monkeypatch.setattr(pinned_buffers, "_release_threads", [threading.current_thread()])
    pinned_buffers._free.pop(KIND, None)
    pinned_buffers._fewest.pop(KIND, None)


def allocate_blocks(count: int) -> list[BlockOwner]:
    made = [BlockOwner() for _ in range(count)]
    for owner in made:
        assert pinned_buffers.allocate(owner, SIZE, SIZE, False).nbytes == SIZE
    return made


def count_free_blocks() -> int:
    gc.collect()
    return len(pinned_buffers._free[KIND])


def end_idle_window() -> int:
    """Releases the blocks that were idle during the window; returns their number."""
    kinds = [kind for kind in pinned_buffers.idle_kinds() if kind == KIND]
    for kind in kinds:
        pinned_buffers.release_block(kind)
    return len(kinds)


def test_allocation_survives_a_system_without_threads(monkeypatch, no_threads):
    """Decode's scheduler copies; the next copy tries to start the thread again."""
    monkeypatch.setattr(pinned_buffers, "_release_threads", threads := [])
    with no_threads():
        allocate_blocks(1)
    assert not threads


def test_failed_release_does_not_end_the_thread(monkeypatch):
    class Ended(BaseException):
        pass

    sleeps = iter([None, None, None, Ended])

    def sleep(_: float) -> None:
        if (end := next(sleeps)) is not None:
            raise end

    def release(kind) -> None:
        released.append(kind)
        raise RuntimeError("the device is gone")

    released: list = []
    monkeypatch.setattr(pinned_buffers, "time", SimpleNamespace(sleep=sleep))
    monkeypatch.setattr(pinned_buffers, "idle_kinds", lambda: [KIND])
    monkeypatch.setattr(pinned_buffers, "release_block", release)
    with pytest.raises(Ended):
        pinned_buffers._release_idle_blocks()
    assert len(released) == 2


def test_free_blocks_beyond_recent_peak_are_released():
    made = allocate_blocks(10)
    end_idle_window()
    del made[:]
    assert count_free_blocks() == 10
    assert end_idle_window() == 0  # all were in use until just now
    made = allocate_blocks(3)
    del made[:]
    assert count_free_blocks() == 10
    assert end_idle_window() == 7 and count_free_blocks() == 3
    assert end_idle_window() == 3 and count_free_blocks() == 0
    assert end_idle_window() == 0


def test_block_in_use_is_not_released():
    (owner,) = allocate_blocks(1)
    end_idle_window()
    end_idle_window()
    del owner
    assert count_free_blocks() == 1


def test_block_reused_before_release_is_kept():
    made = allocate_blocks(2)
    del made[:]
    assert count_free_blocks() == 2
    end_idle_window()
    kinds = pinned_buffers.idle_kinds()
    made = allocate_blocks(2)
    for kind in kinds:
        pinned_buffers.release_block(kind)
    del made[:]
    assert count_free_blocks() == 2


def test_background_thread_releases_idle_blocks(monkeypatch):
    monkeypatch.setattr(pinned_buffers, "_release_threads", [])
    monkeypatch.setattr(pinned_buffers, "IDLE_SECONDS", 0.05)
    monkeypatch.setattr(pinned_buffers, "PAUSE_SECONDS", 0.0)
    made = allocate_blocks(5)
    allocate_blocks(5)  # their owners are collected at once
    (thread,) = pinned_buffers._release_threads
    assert wait_until(lambda: not pinned_buffers._free[KIND], 10, 0.01)
    time.sleep(0.2)
    del made[:]
    assert wait_until(lambda: count_free_blocks() == 0, 10, 0.01)
    assert thread.daemon and thread.is_alive()


def test_releasing_a_pinned_block_empties_the_host_cache_of_torch(monkeypatch):
    """Otherwise torch would keep the released block in its own free list."""
    emptied = []
    backend = type("TorchNpu", (), {})
    backend._C = type("C", (), {pinned_buffers.EMPTY_CACHE: lambda: emptied.append(1)})
    monkeypatch.setitem(pinned_buffers.sys.modules, "torch_npu", backend)
    for pinned, calls in ((False, 0), (True, 1)):
        pinned_buffers._free[SIZE, pinned].append(torch.empty(SIZE, dtype=torch.uint8))
        pinned_buffers.release_block((SIZE, pinned))
        assert len(emptied) == calls
