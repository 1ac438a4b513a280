"""Prefill: queues chunks so that a decode server that accepts none does not delay the others.

scheduler: put    a lane for each group of decode ranks    workers: get, from a lane whose
                                                           ranks no other worker is sending to
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any, Deque, Dict, FrozenSet, List, Optional, Set, Tuple

from sglang.srt.disaggregation.pd.per_instance import PerInstance

logger = logging.getLogger(__name__)

Peers = FrozenSet[str]

# The type of the engine's queues; those of another type, as in its unit tests, are kept.
ENGINE_QUEUE = "FastQueue"


class PeerQueue:
    """One queue for all workers. Chunks for one group of ranks are sent in order, one at a time.

    A worker has finished its chunk when it gets the next one. Lanes take turns.

    If the ranks of one server have lanes of their own, `server_of` and `workers` keep a server that
    accepts nothing from holding all workers: the last one that is free sends only to a server to
    which no other is sending.
    """

    def __init__(
        self,
        note_queued: Callable[[Any], Peers],
        note_taken: Callable[[Any], None],
        server_of: Callable[[Any], Peers] = lambda chunk: frozenset(),
        workers: int = 0,
        note_done: Callable[[Any], None] = lambda chunk: None,
        is_left_over: Callable[[Any], bool] = lambda chunk: False,
    ):
        """Creates an empty queue.

        Args:
            note_queued: Called with each chunk that is put; returns the decode ranks it goes to.
            note_taken: Called by a worker with each chunk before `get` returns it; may wait.
            server_of: Returns the decode ranks of the server that a chunk goes to.
            workers: How many threads will call `get`; 0 if a server may hold all of them.
            note_done: Called by the worker with its chunk when it has finished it.
            is_left_over: Returns whether no worker may get a chunk any more; must not wait.
        """
        self._note_queued, self._note_taken, self._note_done = note_queued, note_taken, note_done
        self._server_of, self._workers = server_of, workers
        self._is_left_over = is_left_over
        self._changed = threading.Condition()
        self._lanes: OrderedDict[Peers, Deque[Any]] = OrderedDict()
        # By worker: the ranks to which it is sending, and all ranks of their server.
        self._busy: Dict[int, Tuple[Peers, Peers]] = {}
        self._taken = threading.local()  # the worker's chunk
        self._ends = 0

    def __len__(self) -> int:
        """Returns the number of chunks that no worker has taken."""
        with self._changed:
            return sum(map(len, self._lanes.values()))

    def busy_peers(self) -> Set[str]:
        """Returns the decode ranks to which workers are sending."""
        with self._changed:
            return set().union(*(peers for peers, _ in self._busy.values()))

    def put(self, chunk: Any) -> None:
        """Queues a chunk; None stops one worker that has nothing else to do."""
        peers: Peers = frozenset() if chunk is None else self._note_queued(chunk)
        with self._changed:
            if chunk is None:
                self._ends += 1
            else:
                self._lanes.setdefault(peers, deque()).append(chunk)
            self._changed.notify()

    def get(self) -> Any:
        """Waits for a chunk to whose ranks no other worker is sending; None stops the worker."""
        worker = threading.get_ident()
        done, self._taken.chunk = getattr(self._taken, "chunk", None), None
        if done is not None:
            self._note(self._note_done, done)
        with self._changed:
            if self._busy.pop(worker, None):
                self._changed.notify_all()
            while True:
                while (lane := self._free_lane()) is None:
                    if self._ends:
                        self._ends -= 1
                        return None
                    self._changed.wait()
                chunk = self._take(lane)
                if not self._is_left_over(chunk):
                    break
            self._busy[worker] = lane, self._server_of(chunk)
        self._taken.chunk = chunk
        self._note(self._note_taken, chunk)
        return chunk

    @staticmethod
    def _note(note: Callable[[Any], None], chunk: Any) -> None:
        try:
            note(chunk)
        except Exception:  # the worker handles the room as it finds it
            logger.exception(f"Room {chunk.room}: a chunk could not be prepared or finished")

    def _take(self, lane: Peers) -> Any:
        chunk = self._lanes[lane].popleft()
        if self._lanes[lane]:
            self._lanes.move_to_end(lane)
        else:
            del self._lanes[lane]
        return chunk

    def _free_lane(self) -> Optional[Peers]:
        is_last_worker = len(self._busy) + 1 == self._workers
        for peers, chunks in self._lanes.items():
            server = self._server_of(chunks[0]) if is_last_worker else frozenset()
            if all(
                peers.isdisjoint(sending) and server.isdisjoint(others)
                for sending, others in self._busy.values()
            ):
                return peers
        return None


class WorkerState(threading.local):
    """The room that a worker is sending, and its decode ranks, even after it was cleared."""

    room = -1
    peers: Peers = frozenset()


class PeerQueues:
    """Base of a KV manager: makes the engine's `transfer_queues` one and the same `PeerQueue`.

    With staging buffers, of which each worker has its own, makes each a `PeerQueue` of its own.
    """

    _queues: List[PeerQueue] = []
    # Set once the engine has made its queues, which may be after the first message from decode.
    queues_made = PerInstance(threading.Event)
    enable_staging = False
    worker_state = WorkerState()

    @property
    def transfer_queues(self) -> List[PeerQueue]:
        return self._queues

    @transfer_queues.setter
    def transfer_queues(self, made: List[Any]) -> None:
        def queue() -> PeerQueue:
            notes = self._note_queued, self._note_taken
            done, left_over = self._note_done, self._is_left_over
            return PeerQueue(*notes, note_done=done, is_left_over=left_over)

        if any(type(one).__name__ != ENGINE_QUEUE for one in made):
            self._queues = list(made)
        elif self.enable_staging or not made:
            self._queues = [queue() for _ in made]
        else:
            self._queues = [queue()] * len(made)
        self.queues_made.set()

    def _note_queued(self, chunk: Any) -> Peers:
        return self._peers_of(chunk)

    def _note_taken(self, chunk: Any) -> None:
        self.worker_state.room = chunk.room
        self.worker_state.peers = self._peers_of(chunk)

    def _note_done(self, chunk: Any) -> None:
        """Called by a worker that has finished a chunk; does nothing unless overridden."""

    def _is_left_over(self, chunk: Any) -> bool:
        """Returns whether to drop a queued chunk; False unless overridden."""
        return False

    def _peers_of(self, chunk: Any) -> Peers:
        return frozenset(self.transfer_infos.get(chunk.room, ()))
