"""Records where a prefill rank writes, according to its transfer engine."""

import numpy as np
from rank_faults import nixl_agent


class WriteLog:
    """Records the destinations of a manager's successful writes from now on."""

    def __init__(self, manager):
        self._done = []
        self._under_way = {}
        if hasattr(manager, "agent"):
            agent = nixl_agent(manager)
            self._initialize, self._is_done = agent.initialize_xfer, agent.check_xfer_state
            agent.initialize_xfer, agent.check_xfer_state = self._begin_nixl, self._check_nixl
        else:
            self._run = manager.engine.batch_transfer_sync
            manager.engine.batch_transfer_sync = self._run_mooncake

    def outside(self, ranges: list[list[int]]) -> list[list[int]]:
        """Returns the writes outside of these ranges; both are lists of [address, bytes]."""
        starts, lengths = np.array(sorted(ranges), dtype=np.uint64).T
        ends = starts + lengths
        written = np.array(self._done, dtype=np.uint64).reshape(-1, 2)
        first, last = written[:, 0], written.sum(axis=1)
        within = np.searchsorted(starts, first, side="right").astype(int) - 1
        stray = (within < 0) | (last > ends[within]) | (last < first)
        return written[stray].tolist()

    def __len__(self) -> int:
        return len(self._done)

    def size(self) -> int:
        """Returns the bytes of all writes."""
        return sum(int(length) for _, length in self._done)

    def _begin_nixl(self, operation, src, dst, *args):
        handle = self._initialize(operation, src, dst, *args)
        if operation == "WRITE":  # else it probes a connection
            # Keeps the handle, so that no later handle gets its id.
            self._under_way[id(handle)] = (handle, [dst[i][:2] for i in range(dst.descCount())])
        return handle

    def _check_nixl(self, handle) -> str:
        state = self._is_done(handle)
        if state != "PROC":
            _, where = self._under_way.pop(id(handle), (None, []))
            self._done += where if state == "DONE" else []
        return state

    def _run_mooncake(self, session, src, dst, lengths) -> int:
        status = self._run(session, src, dst, lengths)
        if status == 0:
            self._done += zip(dst, lengths)
        return status
