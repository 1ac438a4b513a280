"""Prefill: chunks that wait to be sent, so that a decode server that takes none holds up no other.

scheduler: put    a lane for each group of decode ranks    workers: get, from a lane whose
                                                           ranks no other worker is sending to
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any, Deque, Dict, FrozenSet, List, Optional, Set

logger = logging.getLogger(__name__)

Peers = FrozenSet[str]


class PeerQueue:
    """One queue for all workers. Chunks of one group of ranks are sent in order, one at a time.

    A worker is done with its chunk when it comes for the next one. Lanes take turns.
    """

    def __init__(self, note_queued: Callable[[Any], Peers], note_taken: Callable[[Any], None]):
        """note_queued: called with each chunk as it is put; gives the decode ranks it goes to.

        note_taken: called by a worker with each chunk, before it gets that; may wait.
        """
        self._note_queued, self._note_taken = note_queued, note_taken
        self._changed = threading.Condition()
        self._lanes: OrderedDict[Peers, Deque[Any]] = OrderedDict()
        self._busy: Dict[int, Peers] = {}
        self._ends = 0

    def __len__(self) -> int:
        """Chunks that no worker has."""
        with self._changed:
            return sum(map(len, self._lanes.values()))

    def busy_peers(self) -> Set[str]:
        """Decode ranks that workers are sending to."""
        with self._changed:
            return set().union(*self._busy.values())

    def put(self, chunk: Any) -> None:
        """Queue a chunk; None ends a worker that finds nothing else to do."""
        peers: Peers = frozenset() if chunk is None else self._note_queued(chunk)
        with self._changed:
            if chunk is None:
                self._ends += 1
            else:
                self._lanes.setdefault(peers, deque()).append(chunk)
            self._changed.notify()

    def get(self) -> Any:
        """The next chunk of ranks that no other worker is sending to; waits for one."""
        worker = threading.get_ident()
        with self._changed:
            if self._busy.pop(worker, None):
                self._changed.notify_all()
            while (lane := self._free_lane()) is None:
                if self._ends:
                    self._ends -= 1
                    return None
                self._changed.wait()
            chunk = self._lanes[lane].popleft()
            if self._lanes[lane]:
                self._lanes.move_to_end(lane)
            else:
                del self._lanes[lane]
            self._busy[worker] = lane
        try:
            self._note_taken(chunk)
        except Exception:  # the worker will find its room as it is
            logger.exception(f"Room {chunk.room}: a chunk could not be prepared")
        return chunk

    def _free_lane(self) -> Optional[Peers]:
        for peers in self._lanes:
            if all(map(peers.isdisjoint, self._busy.values())):
                return peers
        return None


class WorkerState(threading.local):
    """Decode ranks that a worker is sending to, also when their room has been cleared."""

    peers: Peers = frozenset()


class PeerQueues:
    """A KV manager's `transfer_queues`, which the engine makes: all of them are one `PeerQueue`.

    With staging buffers, of which each worker has its own, each remains a queue of its own.
    """

    _queues: List[PeerQueue] = []
    enable_staging = False
    worker_state = WorkerState()

    @property
    def transfer_queues(self) -> List[PeerQueue]:
        return self._queues

    @transfer_queues.setter
    def transfer_queues(self, made: List[Any]) -> None:
        def queue() -> PeerQueue:
            return PeerQueue(self._note_queued, self._note_taken)

        own = self.enable_staging or not made
        self._queues = [queue() for _ in made] if own else [queue()] * len(made)

    def _note_queued(self, chunk: Any) -> Peers:
        return self._peers_of(chunk)

    def _note_taken(self, chunk: Any) -> None:
        self.worker_state.peers = self._peers_of(chunk)

    def _peers_of(self, chunk: Any) -> Peers:
        return frozenset(self.transfer_infos.get(chunk.room, ()))
