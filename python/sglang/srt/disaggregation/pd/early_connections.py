"""NIXL, prefill: connects to a decode rank when it registers, not with the first large write.

rank added      NIXL makes an endpoint for each of its threads and sends the first message over it;
                UCX needs some more round trips before the endpoint carries data
later           a thread makes these round trips only while it has something to send

So each thread is given something to send: it reads a byte of the rank's metadata, which the rank
does not notice. It does so several times: over TCP, NIXL's progress thread spins until UCX's last
round trip, and takes a core from the scheduler.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Dict, List, Optional, Tuple

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
# Reads after the first one, and how long before each.
MORE_READS = 4
PAUSE_SECONDS = 0.2
# Time limit of these reads: during one, NIXL cannot remove the rank to replace a lost connection.
MORE_READS_SECONDS = 5.0


@dataclass
class Connection:
    """A connection that is being made to a decode rank; times are on the monotonic clock.

    Attributes:
        started_at: When the first read was prepared; after that read, when it ended.
    """

    peer: str
    handle: Any  # NIXL's, of a transfer that is started anew for each read
    started_at: float
    next_read_at: Optional[float]  # None during a read
    reads: int = 0  # completed


class EarlyConnections:
    """Base of a prefill rank's KV manager, which has NIXL's `agent`.

    One thread connects to all decode ranks, and waits for none of them. It holds `agent_lock`, if
    NIXL's callers must take turns, only while NIXL begins a transfer or reports its state.
    """

    agent_lock: Any = contextlib.nullcontext()
    to_connect: SimpleQueue[Tuple[str, int]] = PerInstance(SimpleQueue)
    connects = False  # whether its thread runs
    # By decode rank; `connect_lock`, taken after `agent_lock`, is held while NIXL uses a handle.
    connecting: Dict[str, Connection] = PerInstance(dict)
    connect_lock = PerInstance(threading.Lock)

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
                self.connects = True  # first: the thread resets it if it cannot connect
                threading.Thread(
                    target=self._connect_ranks, name="nixl-connect", daemon=True
                ).start()
            self.to_connect.put((peer, aux_pointers[0]))
        except Exception as error:
            self.connects = False
            logger.warning(f"Decode {peer} is connected only at its first request: {error}")

    def end_early_connection(self, peer: str) -> bool:
        """Ends the reads from a decode rank, which NIXL may then remove.

        Returns False during a read, in which NIXL must not remove it; it is then the last one.
        """
        with self.connect_lock:
            connection = self.connecting.get(peer)
            if connection is not None and connection.next_read_at is None:
                connection.reads = MORE_READS
                return False
            self._forget(peer)
            return True

    def handle_connect_failure(self, peer: str) -> None:
        """Called if NIXL could not connect to a decode rank, which it may have removed."""

    def _connect_ranks(self) -> None:
        byte = np.zeros(1, np.uint8)
        try:
            with self.agent_lock:
                self.agent.register_memory([(byte.ctypes.data, 1, 0, "")], "DRAM")
        except Exception as error:
            logger.warning(f"Decode ranks are connected only at their first requests: {error}")
            self.connects = False  # the next registration tries again
            return
        while True:
            with contextlib.suppress(Empty):
                asked = self.to_connect.get(timeout=_seconds_to_next(self.connecting))
                self._begin(*asked, byte.ctypes.data)
            for connection in list(self.connecting.values()):
                self._continue(connection)

    def _begin(self, peer: str, theirs: int, ours: int) -> None:
        """Prepares the reads, the first of which is due at once."""
        started_at = time.monotonic()
        try:
            threads = int(self.agent.get_backend_params("UCX").get("num_threads", 0))
            copies = max(1, threads * COPIES_OF_A_THREAD)
            own, peers = (
                self.agent.get_xfer_descs(np.tile(np.uint64([at, 1, 0]), (copies, 1)), "DRAM")
                for at in (ours, theirs)
            )
            with self.agent_lock, self.connect_lock:
                handle = self.agent.initialize_xfer("READ", own, peers, peer)
                if not handle:
                    raise RuntimeError("NIXL did not start the read")
                self._forget(peer)
                self.connecting[peer] = Connection(peer, handle, started_at, started_at)
        except Exception as error:
            self._note_failed(peer, str(error))

    def _continue(self, connection: Connection) -> None:
        """Looks after the current read, or starts the next one if it is due."""
        now, reason = time.monotonic(), "NIXL reported an error"
        seconds = now - connection.started_at
        if connection.next_read_at is not None and now < connection.next_read_at:
            return
        with self.agent_lock, self.connect_lock:
            if connection.handle is None:  # ended meanwhile
                return
            try:
                state = self._advance(connection)
            except Exception as error:
                state, reason = "ERR", str(error)
            if state == "DONE":
                connection.reads += 1
                connection.next_read_at = now + PAUSE_SECONDS
                if connection.reads == 1:
                    logger.info(f"Connected to decode {connection.peer} in {seconds:.1f} s")
                    connection.started_at, seconds = now, 0.0
            is_late = seconds > (MORE_READS_SECONDS if connection.reads else CONNECT_SECONDS)
            if state != "ERR" and not is_late and connection.reads <= MORE_READS:
                return
            self._forget(connection.peer)
        if not connection.reads and state == "ERR":
            self._note_failed(connection.peer, reason)
        elif not connection.reads:
            logger.warning(f"Decode {connection.peer} has not answered NIXL for {seconds:.0f} s")

    def _forget(self, peer: str) -> None:
        """Frees or cancels the transfer of a connection, if there is one."""
        connection = self.connecting.pop(peer, None)
        if connection is not None:
            connection.handle = None

    def _advance(self, connection: Connection) -> str:
        """Starts the next read if it is due; returns the state of the current one."""
        if connection.next_read_at is None:
            return self.agent.check_xfer_state(connection.handle)
        connection.next_read_at = None
        if self.agent.transfer(connection.handle) == "ERR":
            raise RuntimeError("NIXL did not start the read")
        return "PROC"

    def _note_failed(self, peer: str, reason: str) -> None:
        logger.warning(
            f"NIXL could not connect to decode {peer}; a request will try again: {reason}"
        )
        try:
            self.handle_connect_failure(peer)
        except Exception:
            logger.exception(f"Decode {peer} could not be added to NIXL again; a request will try")


def _seconds_to_next(connecting: Dict[str, Connection]) -> Optional[float]:
    """Returns how long none of these connections needs attention; None without connections."""
    now, due = time.monotonic(), [one.next_read_at for one in list(connecting.values())]
    waits = [POLL_SECONDS if at is None else max(POLL_SECONDS, at - now) for at in due]
    return min(waits, default=None)
