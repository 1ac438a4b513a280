"""Decode: an incompatible prefill server fails only its own requests, on both sides."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable

import requests
from sglang.srt.disaggregation.kv_layout import tp_size_conflict
from sglang.srt.disaggregation.pd.threads import start_thread

logger = logging.getLogger(__name__)

# How long to wait for a bootstrap server to accept a connection, and to answer.
HTTP_TIMEOUT_SECONDS = (2, 5)
# How long after a failure prefill is notified, each time anew: it ignores the abort of a request
# that has not arrived, and on a busy server it may arrive after decode has refused it.
NOTIFY_AFTER_SECONDS = (0.5, 2.0, 10.0, 30.0)
POLL_INTERVAL_SECONDS = 0.1
MAX_PENDING_NOTICES = 4096
# How long a server's ranks are cached, of up to `MAX_KNOWN_SERVERS` servers.
RANKS_VALID_SECONDS = 60.0
# How long a server that did not answer is not queried; its ranks are not notified meanwhile.
UNANSWERED_RETRY_SECONDS = 10.0
MAX_KNOWN_SERVERS = 1024


def check_sizes(sizes: dict[str, int], own_tp_size: int) -> None:
    """Raises RuntimeError if a prefill server's sizes are invalid or leave one of its ranks out."""
    if min(sizes.values()) < 1:
        raise RuntimeError(f"prefill's bootstrap server returned invalid sizes: {sizes}")
    conflict = tp_size_conflict(sizes["attn_tp_size"], own_tp_size)
    if conflict:
        raise RuntimeError(conflict)


class AbortNotifier:
    """Aborts failed requests on the prefill ranks from which decode never requested them.

    Those ranks would otherwise wait for decode. It aborts each room at each of
    `NOTIFY_AFTER_SECONDS`, in one thread, which queries bootstrap servers for every rank, once a
    minute.
    """

    def __init__(self, send_abort: Callable[[dict, int], None]):
        """send_abort: Sends one rank, given its bootstrap server's answer, the abort of a room."""
        self.send_abort = send_abort
        # For each of `NOTIFY_AFTER_SECONDS`: when a room failed, its bootstrap address, the room.
        self.rooms: list[deque[tuple[float, str, int]]] = [
            deque(maxlen=MAX_PENDING_NOTICES) for _ in NOTIFY_AFTER_SECONDS
        ]
        self.arrived = threading.Event()
        # By bootstrap address: its ranks, and until when they are valid.
        self.known: dict[str, tuple[list[dict], float]] = {}
        self.is_serving = False

    def add(self, bootstrap_addr: str, room: int) -> None:
        """Schedules the aborts of a failed room on this server's ranks."""
        self.rooms[0].append((time.monotonic(), bootstrap_addr, room))
        self.arrived.set()
        if not self.is_serving:
            self.is_serving = start_thread(self._serve)  # if not, the next call tries again

    def _serve(self) -> None:
        while self.arrived.wait():
            self.arrived.clear()
            while any(self.rooms):
                for attempt, seconds in enumerate(NOTIFY_AFTER_SECONDS):
                    self._notify_due(attempt, seconds)
                time.sleep(POLL_INTERVAL_SECONDS)

    def _notify_due(self, attempt: int, seconds: float) -> None:
        rooms, *later = self.rooms[attempt:]
        while rooms and time.monotonic() >= rooms[0][0] + seconds:
            failed = rooms.popleft()
            _, address, room = failed
            if later:
                later[0].append(failed)
            try:
                for rank in self._known_ranks(address):
                    self.send_abort(rank, room)
            except Exception as error:
                if not later:
                    logger.warning(
                        f"Could not notify prefill {address} that room {room} failed: {error}"
                    )

    def _known_ranks(self, address: str) -> list[dict]:
        ranks, until = self.known.get(address, ([], 0.0))
        if time.monotonic() >= until:
            if len(self.known) >= MAX_KNOWN_SERVERS:
                self.known.clear()
            try:
                ranks = _query_all_ranks(address)
            except Exception:
                self.known[address] = ([], time.monotonic() + UNANSWERED_RETRY_SECONDS)
                raise
            self.known[address] = (ranks, time.monotonic() + RANKS_VALID_SECONDS)
        return ranks


def _query_all_ranks(address: str) -> list[dict]:
    """Returns where each rank of a prefill server reads messages, as its bootstrap server says."""
    with requests.Session() as session:
        whole = query_route(address, -1, -1, -1, -1, session)
        names = ("dp_size", "attn_cp_size", "attn_tp_size", "pp_size")
        sizes = [int(whole[name]) for name in names]
        numbers = itertools.product(*map(range, sizes))
        return [query_route(address, *number, session) for number in numbers]


def query_route(
    address: str, dp: int, cp: int, tp: int, pp: int, session: requests.Session
) -> dict:
    """Queries a bootstrap server for a rank, or for the whole server if each number is -1.

    Returns:
        The rank's address and what it supports, or the server's sizes.

    Raises:
        requests.RequestException: It does not answer, or does not know the rank.
    """
    names = ("prefill_dp_rank", "prefill_cp_rank", "target_tp_rank", "target_pp_rank")
    query = dict(zip(names, (dp, cp, tp, pp)))
    response = session.get(f"http://{address}/route", params=query, timeout=HTTP_TIMEOUT_SECONDS)
    response.raise_for_status()
    return response.json()
