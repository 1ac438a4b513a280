"""Prefill's queue: sends to a group of decode ranks are in order, and no group delays another."""

import threading
import time
from queue import SimpleQueue
from types import SimpleNamespace

import pytest
from sglang.srt.disaggregation.common.utils import FastQueue
from sglang.srt.disaggregation.pd.peer_queue import PeerQueue, PeerQueues, WorkerState

from pd_harness.polling import wait_until

pytestmark = pytest.mark.engine

PATIENCE = 10.0


def chunk(room: int, *peers: str) -> SimpleNamespace:
    return SimpleNamespace(room=room, peers=frozenset(peers))


def new_queue(taken=lambda chunk: None) -> PeerQueue:
    return PeerQueue(lambda chunk: chunk.peers, taken)


@pytest.fixture
def start_workers():
    """A function that starts workers, which call `send(chunk)` on a queue's chunks until None."""
    started = []

    def start(queue: PeerQueue, count: int, send) -> None:
        def work() -> None:
            while (one := queue.get()) is not None:
                send(one)

        for _ in range(count):
            thread = threading.Thread(target=work, daemon=True)
            thread.start()
            started.append((queue, thread))

    yield start
    for queue, _ in started:
        queue.put(None)
    for _, thread in started:
        thread.join(PATIENCE)
        assert not thread.is_alive()


def test_chunks_to_the_same_ranks_are_sent_in_order_and_serially(start_workers):
    queue, sent, at_once = new_queue(), [], []
    sending = []

    def send(one) -> None:
        sending.append(one)
        at_once.append(len(sending))
        time.sleep(0.001)
        sent.append(one.room)
        sending.remove(one)

    start_workers(queue, 4, send)
    for room in range(50):
        queue.put(chunk(room, "a", "b"))
    assert wait_until(lambda: len(sent) == 50, PATIENCE, 0.01)
    assert sent == list(range(50))
    assert set(at_once) == {1}


def test_blocked_send_delays_only_its_own_ranks(start_workers):
    queue, sent, go_on = new_queue(), [], threading.Event()

    def send(one) -> None:
        if "stopped" in one.peers:
            go_on.wait(PATIENCE)
        sent.append(one.room)

    start_workers(queue, 2, send)
    for room in range(100):
        queue.put(chunk(room, "stopped"))
        queue.put(chunk(100 + room, f"live {room % 7}"))
        queue.put(chunk(200 + room, "stopped", "its neighbour"))
    assert wait_until(lambda: len(sent) == 100, PATIENCE, 0.01)
    assert min(sent) == 100 and len(queue) == 199
    go_on.set()
    assert wait_until(lambda: len(sent) == 300, PATIENCE, 0.01)


def test_overlapping_groups_of_ranks_are_serialized(start_workers):
    queue, sent, go_on = new_queue(), [], threading.Event()

    def send(one) -> None:
        if one.room == 0:
            go_on.wait(PATIENCE)
        sent.append(one.room)

    start_workers(queue, 2, send)
    queue.put(chunk(0, "a", "b"))
    assert wait_until(lambda: not len(queue), PATIENCE, 0.01)
    queue.put(chunk(1, "b"))
    queue.put(chunk(2, "c"))
    assert wait_until(lambda: sent == [2], PATIENCE, 0.01)
    go_on.set()
    assert wait_until(lambda: len(sent) == 3, PATIENCE, 0.01)
    assert sent[1:] == [0, 1]


def test_ranks_of_a_server_that_accepts_nothing_leave_a_worker(start_workers):
    """Each rank has a lane of its own; a server of one rank, and one of two, are live."""

    def to(room: int, peer: str, *server: str) -> SimpleNamespace:
        return SimpleNamespace(room=room, peers=frozenset([peer]), server=frozenset(server))

    queue = PeerQueue(lambda one: one.peers, lambda one: None, lambda one: one.server, workers=4)
    entered, sent, go_on = [], [], threading.Event()

    def send(one) -> None:
        entered.append(one.room)
        if "stopped 0" in one.server:
            go_on.wait(PATIENCE)
        sent.append(one.room)

    stopped = [f"stopped {number}" for number in range(5)]
    for room, peer in enumerate(stopped):
        queue.put(to(room, peer, *stopped))
    start_workers(queue, 4, send)
    assert wait_until(lambda: len(entered) == 3, PATIENCE, 0.01)
    for room in range(5, 15):
        queue.put(to(room, "live", "live"))
        queue.put(to(10 + room, f"live {room % 2}", "live 0", "live 1"))
    assert wait_until(lambda: len(sent) == 20, PATIENCE, 0.01)
    assert len(entered) == 23 and queue.busy_peers() < {*stopped}
    go_on.set()
    assert wait_until(lambda: len(sent) == 25, PATIENCE, 0.01)
    assert {*sent[20:]} == {*range(5)}


def test_groups_of_ranks_take_turns():
    queue = new_queue()
    for room in range(3):
        queue.put(chunk(room, "a"))
    for room in range(3, 5):
        queue.put(chunk(room, "b"))
    assert [queue.get().room for _ in range(5)] == [0, 3, 1, 4, 2]


def test_failure_before_a_send_does_not_stop_the_worker():
    def fail(one) -> None:
        raise OSError("no event")

    queue = new_queue(fail)
    queue.put(chunk(1, "a"))
    queue.put(None)
    assert queue.get().room == 1
    assert queue.get() is None


def test_chunks_that_are_left_over_are_dropped():
    left_over = {1, 2, 4}
    queue = PeerQueue(
        lambda chunk: chunk.peers,
        lambda chunk: None,
        is_left_over=lambda chunk: chunk.room in left_over,
    )
    for room, peer in ((1, "a"), (2, "b"), (3, "a"), (4, "b")):
        queue.put(chunk(room, peer))
    queue.put(None)
    assert queue.get().room == 3 and queue.busy_peers() == {"a"}
    assert queue.get() is None and len(queue) == 0


class Manager(PeerQueues):
    def __init__(self, enable_staging: bool):
        self.enable_staging = enable_staging
        self.worker_state = WorkerState()
        self.transfer_infos = {7: {"a": None, "b": None}}
        self.transfer_queues = [FastQueue() for _ in range(4)]


def test_transfer_queues_of_a_manager_are_one_peer_queue():
    manager = Manager(enable_staging=False)
    first, *others = manager.transfer_queues
    assert others == [first] * 3
    others[0].put(SimpleNamespace(room=7))
    assert list(first._lanes) == [frozenset("ab")]
    assert not manager.worker_state.peers and not first.busy_peers()
    assert first.get().room == 7
    assert manager.worker_state.peers == first.busy_peers() == {"a", "b"}
    manager.transfer_queues = []
    assert manager.transfer_queues == []


def test_queues_that_are_not_the_engines_stay():
    """As those of the engine's unit tests, which read them without a worker."""
    manager, queues = Manager(enable_staging=False), [SimpleQueue(), SimpleQueue()]
    manager.transfer_queues = queues
    assert manager.transfer_queues == queues


def test_transfer_queues_stay_separate_with_staging():
    queues = Manager(enable_staging=True).transfer_queues
    assert len(set(map(id, queues))) == 4
    queues[2].put(SimpleNamespace(room=7))
    assert [len(queue) for queue in queues] == [0, 0, 1, 0]
