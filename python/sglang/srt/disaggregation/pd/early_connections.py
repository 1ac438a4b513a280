"""NIXL, prefill: connects to a decode rank when it registers, not with the first large write.

rank added      NIXL makes an endpoint for each of its threads and sends the first message over it;
                UCX needs some more round trips before the endpoint carries data
later           a thread makes these round trips only while it has something to send

So each thread is given something to send: it reads a byte of the rank's metadata, which the rank
does not notice.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, List, Set, Tuple

import numpy as np
from sglang.srt.disaggregation.pd.per_instance import PerInstance
from sglang.srt.environ import envs

logger = logging.getLogger(__name__)

VARIABLE = "SGLANG_PD_CONNECT_EARLY"  # "0": with the first request, like the engine
# NIXL divides a transfer among its threads if each of them gets this many copies.
COPIES_OF_A_THREAD = 1024
# A rank that does not answer in this time is connected with its first request.
CONNECT_SECONDS = 60.0
POLL_SECONDS = 0.01


@dataclass
class PendingRead:
    """A read from a decode rank; `started_at` is on the monotonic clock."""

    peer: str
    handle: Any
    started_at: float


class EarlyConnections:
    """Base of a prefill rank's KV manager, which has NIXL's `agent`.

    One thread connects to all decode ranks, and waits for none of them. It holds `agent_lock`, if
    NIXL's callers must take turns, only while NIXL begins a transfer or reports its state.
    """

    agent_lock: Any = contextlib.nullcontext()
    to_connect: SimpleQueue[Tuple[str, int]] = PerInstance(SimpleQueue)
    connects = False
    # Decode ranks with a pending read; NIXL must not remove one of them meanwhile.
    connecting: Set[str] = PerInstance(set)

    def connect_early(self, peer: str, aux_pointers: List[int]) -> None:
        """Makes NIXL connect to a decode rank; returns at once.

        Args:
            peer: The rank's name; the agent must already have its metadata.
            aux_pointers: Addresses of the rank's metadata buffers, in host memory.
        """
        is_ucx = envs.SGLANG_DISAGGREGATION_NIXL_BACKEND.get() == "UCX"
        if not aux_pointers or not is_ucx or os.environ.get(VARIABLE) == "0":
            return
        try:
            if not self.connects:
                threading.Thread(
                    target=self._connect_ranks, name="nixl-connect", daemon=True
                ).start()
                self.connects = True
            self.to_connect.put((peer, aux_pointers[0]))
        except Exception as error:
            logger.warning(f"Decode {peer} is connected only at its first request: {error}")

    def handle_connect_failure(self, peer: str) -> None:
        """Called if NIXL could not connect to a decode rank, which it may have removed."""

    def _connect_ranks(self) -> None:
        byte, readings = np.zeros(1, np.uint8), []
        try:
            with self.agent_lock:
                self.agent.register_memory([(byte.ctypes.data, 1, 0, "")], "DRAM")
        except Exception as error:
            logger.warning(f"Decode ranks are connected only at their first requests: {error}")
            return
        while True:
            with contextlib.suppress(Empty):
                asked = self.to_connect.get(timeout=POLL_SECONDS if readings else None)
                readings += self._begin(*asked, byte.ctypes.data)
            readings = [one for one in readings if not self._is_over(one)]

    def _begin(self, peer: str, theirs: int, ours: int) -> List[PendingRead]:
        """Begins to read; returns an empty list if that fails."""
        started_at = time.monotonic()
        try:
            threads = int(self.agent.get_backend_params("UCX").get("num_threads", 0))
            copies = max(1, threads * COPIES_OF_A_THREAD)
            own, peers = (
                self.agent.get_xfer_descs(np.tile(np.uint64([at, 1, 0]), (copies, 1)), "DRAM")
                for at in (ours, theirs)
            )
            with self.agent_lock:
                self.connecting.add(peer)
                handle = self.agent.initialize_xfer("READ", own, peers, peer)
                if not handle or self.agent.transfer(handle) == "ERR":
                    raise RuntimeError("NIXL did not start the read")
        except Exception as error:
            self.connecting.discard(peer)
            self._note_failed(peer, str(error))
            return []
        return [PendingRead(peer, handle, started_at)]

    def _is_over(self, reading: PendingRead) -> bool:
        seconds = time.monotonic() - reading.started_at
        reason = "NIXL reported an error"
        with self.agent_lock:
            try:
                state = self.agent.check_xfer_state(reading.handle)
            except Exception as error:
                state, reason = "ERR", str(error)
            if state not in ("DONE", "ERR") and seconds < CONNECT_SECONDS:
                return False
            reading.handle = None  # freed, or cancelled
            self.connecting.discard(reading.peer)
        if state == "DONE":
            logger.info(f"Connected to decode {reading.peer} in {seconds:.1f} s")
        elif state == "ERR":
            self._note_failed(reading.peer, reason)
        else:
            logger.warning(f"Decode {reading.peer} has not answered NIXL for {seconds:.0f} s")
        return True

    def _note_failed(self, peer: str, reason: str) -> None:
        logger.warning(
            f"NIXL could not connect to decode {peer}; a request will try again: {reason}"
        )
        try:
            self.handle_connect_failure(peer)
        except Exception:
            logger.exception(f"Decode {peer} could not be added to NIXL again; a request will try")
