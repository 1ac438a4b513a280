"""Over `device_rdma`, MemFabric gets batches that fit into its queue, one call at a time."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
from sglang.srt.disaggregation.ascend.transfer_engine import AscendTransferEngine
from sglang.srt.disaggregation.kv_layout import TransferPlan
from sglang.srt.disaggregation.kv_layout.plan import CopyGroup
from sglang.srt.disaggregation.pd import copy_batches
from sglang.srt.disaggregation.pd.device_rdma import CONCURRENT_CALLS_VARIABLE, COPIES_VARIABLE

pytestmark = pytest.mark.engine

PEER = "10.0.0.1:4000"


class FakeMemFabric:
    """Replaces MemFabric's transfer engine; records calls and how many of them run at a time."""

    def __init__(self, seconds: float = 0.0, statuses: tuple[int, ...] = (), callers: int = 1):
        """Each call waits for `callers` concurrent calls, then takes `seconds`."""
        self.seconds, self.statuses = seconds, list(statuses)
        self.meeting = threading.Barrier(callers, timeout=30)
        self.calls, self.threads = [], set()
        self.inside, self.max_concurrent_calls = 0, 0

    def batch_transfer_sync_write(self, session, src, dst, lengths) -> int:
        self.inside += 1
        self.max_concurrent_calls = max(self.max_concurrent_calls, self.inside)
        self.threads.add(threading.get_ident())
        self.meeting.wait()
        time.sleep(self.seconds)
        self.calls.append((session, src, dst, lengths))
        self.inside -= 1
        return self.statuses.pop(0) if self.statuses else 0

    @property
    def sizes(self) -> list[int]:
        return [len(src) for _, src, *_ in self.calls]


@pytest.fixture
def rdma(monkeypatch):
    monkeypatch.setenv("ASCEND_MF_TRANSFER_PROTOCOL", "DEVICE_RDMA")


def transfer_engine(library: FakeMemFabric) -> AscendTransferEngine:
    engine = AscendTransferEngine.__new__(AscendTransferEngine)
    engine.engine = library
    return engine


def write(library: FakeMemFabric, copies: int) -> int:
    lists = (list(range(copies)), list(range(copies, 2 * copies)), [8] * copies)
    return transfer_engine(library).batch_transfer_sync(PEER, *lists)


def write_from_four_threads(library: FakeMemFabric) -> None:
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda _: write(library, 3000), range(4))) == [0] * 4


def test_large_write_is_split_into_batches_of_queue_size(rdma):
    library = FakeMemFabric()
    assert write(library, 5000) == 0
    assert library.sizes == [2048, 2048, 904]
    assert {session for session, *_ in library.calls} == {PEER}
    for at, wanted in ((1, range(5000)), (2, range(5000, 10000)), (3, [8] * 5000)):
        assert [number for call in library.calls for number in call[at]] == list(wanted)


@pytest.mark.parametrize("text, size", [("100", 100), ("0", 2048), ("-1", 2048), ("many", 2048)])
def test_batch_size_is_configurable(rdma, monkeypatch, text, size):
    monkeypatch.setenv(COPIES_VARIABLE, text)
    library = FakeMemFabric()
    write(library, 3000)
    assert max(library.sizes) == size


def test_invalid_batch_size_is_logged_once(rdma, monkeypatch, caplog):
    monkeypatch.setenv(COPIES_VARIABLE, "2k")
    for _ in range(3):
        write(FakeMemFabric(), 3)
    assert caplog.text.count("SGLANG_PD_DEVICE_RDMA_COPIES is '2k'") == 1


def test_batches_after_an_error_are_not_written(rdma):
    library = FakeMemFabric(statuses=(0, -7, 0))
    assert write(library, 5000) == -7
    assert library.sizes == [2048, 2048]


def test_empty_write_returns_status_of_memfabric(rdma):
    library = FakeMemFabric(statuses=(-2000,))
    assert write(library, 0) == -2000


def test_calls_are_serialized(rdma):
    library = FakeMemFabric(seconds=0.01)
    write_from_four_threads(library)
    assert library.max_concurrent_calls == 1
    assert sum(library.sizes) == 12000


def test_concurrent_calls_can_be_enabled(rdma, monkeypatch):
    monkeypatch.setenv(CONCURRENT_CALLS_VARIABLE, "1")
    library = FakeMemFabric(seconds=0.1)
    write_from_four_threads(library)
    assert library.max_concurrent_calls > 1
    assert max(library.sizes) == 2048


@pytest.mark.parametrize("protocol", [None, "", "sdma", "device_urma"])
def test_other_protocols_are_not_batched(monkeypatch, protocol):
    monkeypatch.delenv("ASCEND_MF_TRANSFER_PROTOCOL", raising=False)
    if protocol is not None:
        monkeypatch.setenv("ASCEND_MF_TRANSFER_PROTOCOL", protocol)
    library = FakeMemFabric(seconds=0.1)
    write_from_four_threads(library)
    assert library.sizes == [3000] * 4
    assert library.max_concurrent_calls > 1


def test_part_that_raises_does_not_leave_others_writing():
    """Pages must not be freed during a write."""
    begun, written = threading.Barrier(2), []

    def transfer(session: str, src, dst, lengths) -> int:
        begun.wait(5)
        if src[0] == 0:
            raise RuntimeError("this transfer engine writes no batches")
        time.sleep(0.2)
        written.append(len(src))
        return 0

    token = CopyGroup(False, 1, 8, 8, 8, *np.zeros((2, 1), np.int64))
    copies = TransferPlan((token,)).copies(range(8), range(8))
    engine = SimpleNamespace(batch_transfer_sync=transfer)
    with ThreadPoolExecutor(2) as pool:
        with pytest.raises(RuntimeError, match="no batches"):
            copy_batches.write_copies(engine, PEER, copies, pool, True, True)
        assert written == [4]


def test_part_that_cannot_be_queued_does_not_leave_others_writing():
    """The system is out of threads for the second part."""
    written = []

    class Pool(ThreadPoolExecutor):
        def submit(self, write, part):
            if len(queued) == 1:
                raise RuntimeError("can't start new thread")
            queued.append(part)
            return super().submit(write, part)

    def transfer(session: str, src, dst, lengths) -> int:
        time.sleep(0.2)
        written.append(len(src))
        return 0

    queued: list = []
    token = CopyGroup(False, 1, 8, 8, 8, *np.zeros((2, 1), np.int64))
    copies = TransferPlan((token,)).copies(range(8), range(8))
    engine = SimpleNamespace(batch_transfer_sync=transfer)
    with Pool(2) as pool:
        with pytest.raises(RuntimeError, match="new thread"):
            copy_batches.write_copies(engine, PEER, copies, pool, True, True)
        assert written == [4]


@pytest.mark.parametrize("protocol, threads", [("device_rdma", 1), ("sdma", 4)])
def test_slices_use_one_thread_over_device_rdma_only(monkeypatch, protocol, threads):
    monkeypatch.setenv("ASCEND_MF_TRANSFER_PROTOCOL", protocol)
    library = FakeMemFabric(seconds=0.02, callers=threads)
    count = 4 * copy_batches.SLICE_BATCH
    token = CopyGroup(False, 1, 8, 8, 8, *np.zeros((2, 1), np.int64))
    copies = TransferPlan((token,)).copies(range(count), range(count))
    with ThreadPoolExecutor(4) as pool:
        engine = transfer_engine(library)
        assert copy_batches.write_copies(engine, PEER, copies, pool, True, False) == 0
    assert len(library.threads) == threads
    assert sum(library.sizes) == count
