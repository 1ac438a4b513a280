"""Tracks prefill servers for a decode server: sizes, addresses of ranks, and lost servers.

not known     a thread queries the server; a scheduler that waited would serve no request
lost          a rank's connection is lost: the server may have been replaced, so query it again
replaced      a heartbeat finds a rank elsewhere: another server has the address now
silent        requests fail that have waited some seconds for a rank without a connection
unhealthy     so do requests to a server that answers no heartbeat; its ranks may write for a while
"""

from __future__ import annotations

import logging
import math
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

import requests
from aiohttp import web
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.pd import peer_sockets
from sglang.srt.disaggregation.pd.peer_silence import VARIABLE
from sglang.srt.disaggregation.pd.peer_sockets import ConnectionSnapshot, PeerSocket
from sglang.srt.disaggregation.pd.per_instance import PerInstance
from sglang.srt.disaggregation.pd.threads import start_thread
from sglang.srt.disaggregation.pd.verify_mode import verify_mode

logger = logging.getLogger(__name__)

# Largest valid TP, DP, PP or page size of a server.
MAX_SIZE = 1 << 16
# How long a bootstrap server may take to connect and to answer. After a timeout it is not queried
# for `BOOTSTRAP_RETRY_SECONDS`.
HTTP_TIMEOUT_SECONDS = (2, 5)
BOOTSTRAP_RETRY_SECONDS = 10.0
MAX_UNREACHABLE = 4096
HEALTH_TIMEOUT_SECONDS = (2, 3)
PROBE_SECONDS = 2.0


@dataclass(frozen=True)
class PrefillServer:
    """Sizes of a prefill server; `page_size` is None from a stock server that does not report it.

    `takes_aborts`: its ranks read ABORT messages. `verifies`: they send digests.
    """

    attn_tp_size: int
    dp_size: int
    pp_size: int
    page_size: int | None
    takes_aborts: bool
    verifies: bool = False

    @classmethod
    def read(cls, answer: dict) -> PrefillServer | None:
        """Reads a bootstrap server's answer; returns None if its sizes are invalid."""
        names = ("attn_tp_size", "dp_size", "pp_size", "page_size")
        sizes = [answer.get(f"prefill_{name}") for name in names]
        given = sizes if sizes[3] is not None else sizes[:3]
        if not all(type(size) is int and 0 < size <= MAX_SIZE for size in given):
            return None
        announced = {name: bool(answer.get(name)) for name in ("takes_aborts", "verifies")}
        return cls(*sizes, **announced)


class PrefillServers:
    """Queries and watches prefill servers for a decode rank's KV manager.

    The manager has `heartbeat_interval` (seconds) and `max_failures` (heartbeats in a row), and is
    `NotedTransfers`, too.
    """

    # By bootstrap address: servers in use, and when to query those again that timed out.
    prefill_servers: dict[str, PrefillServer] = PerInstance(dict)
    retry_bootstrap_at: dict[str, float] = PerInstance(dict)
    # By bootstrap address: one rank's numbers (TP, DP, PP), and its last known endpoint.
    seen_ranks: dict[str, tuple[tuple[int, int, int], tuple[str, int]]] = PerInstance(dict)
    pending_queries: dict[str, Future] = PerInstance(dict)
    # By room: the prefill ranks that it was requested from, and why it waits no longer.
    requested_ranks: dict[int, list[dict]] = PerInstance(dict)
    silent_rooms: dict[int, str] = PerInstance(dict)
    lost_rooms: dict[int, str] = PerInstance(dict)

    def query_in_thread(self, address: str, ask: Callable[[], None]) -> Future:
        """Has a thread query a bootstrap server with `ask`, one at a time.

        Returns a future that is done when this query, or one already under way, has finished.
        """
        query = self.pending_queries.get(address)
        if query is None:
            query = self.pending_queries[address] = Future()

            def serve() -> None:
                try:
                    ask()
                finally:
                    del self.pending_queries[address]
                    query.set_result(None)

            if not start_thread(serve):  # the next poll queries again
                del self.pending_queries[address]
                query.set_result(None)
        return query

    def prefill_server(self, address: str) -> PrefillServer | None:
        """Returns a server's sizes, queried the first time; None if the query fails."""
        known = self.prefill_servers.get(address)
        if known is None:
            known = PrefillServer.read(self.query_route(address, -1, -1, -1) or {})
            if known is not None:
                self.note_prefill(address)
                self.prefill_servers[address] = known
        return known

    def prefill_rank(self, address: str, tp_rank: int, dp_group: int, pp_rank: int) -> dict | None:
        """Returns where a rank reads messages (`rank_ip`, `rank_port`); None if it is unknown."""
        numbers = (tp_rank, dp_group, pp_rank)
        rank = self.query_route(address, *numbers)
        if rank is None or _endpoint(rank) is None:
            return None
        self.seen_ranks[address] = (numbers, _endpoint(rank))
        return rank

    def query_route(self, address: str, tp_rank: int, dp_group: int, pp_rank: int) -> dict | None:
        """Queries a bootstrap server for one rank, or for the server's sizes if all three are -1.

        Returns None if the query fails, or if the last one timed out a short time ago.
        """
        if time.monotonic() < self.retry_bootstrap_at.get(address, 0.0):
            return None
        url = f"http://{address}/route"
        query = {"engine_rank": tp_rank, "target_dp_group": dp_group, "target_pp_rank": pp_rank}
        try:
            response = requests.get(url, params=query, timeout=HTTP_TIMEOUT_SECONDS)
            answer = response.json() if response.status_code == 200 else None
            if isinstance(answer, dict):
                return answer
            error = f"{response.status_code}, {response.text[:200]}"
        except (requests.RequestException, ValueError) as exception:
            error = str(exception)
            if isinstance(exception, requests.Timeout):
                self.retry_bootstrap_at[address] = time.monotonic() + BOOTSTRAP_RETRY_SECONDS
                if len(self.retry_bootstrap_at) > MAX_UNREACHABLE:
                    del self.retry_bootstrap_at[next(iter(self.retry_bootstrap_at))]
        logger.error(f"Bootstrap server {address} failed to answer {query}: {error}")
        return None

    def prefill_kinds(self) -> dict[str, int]:
        """Returns how many prefill servers are `patched`, `stock` and `silent`; none is refused."""
        kinds = {}
        for address, known in list(self.prefill_servers.items()):
            kinds[address] = "patched" if known.takes_aborts else "stock"
            _, place = self.seen_ranks.get(address, (None, None))
            # Infinite: it was sent nothing yet.
            if place and self.silent_seconds <= PeerSocket.to(*place).silent_for() < math.inf:
                kinds[address] = "silent"
        return self.count_prefills(kinds)

    def start_heartbeat(self) -> None:
        """Starts the thread that checks servers' health, and the periodic check for lost ones."""

        def check_health(address: str, failures: dict[str, int]) -> None:
            is_healthy = _is_healthy(address)
            failures[address] = 0 if is_healthy else failures.get(address, 0) + 1
            if is_healthy and self.is_replaced(address):
                self._drop_server(address)
            if failures[address] >= self.max_failures:
                del failures[address]
                self._handle_node_failure(address)

        def watch() -> None:
            failures: dict[str, int] = {}
            while True:
                time.sleep(self.heartbeat_interval)
                tracked = list(self.addr_to_rooms_tracker.items())
                # A dropped server may still have rooms here.
                for address in {*self.prefill_servers, *(one for one, rooms in tracked if rooms)}:
                    try:
                        check_health(address, failures)
                    except Exception:  # one address must not stop the others' heartbeats
                        logger.exception(f"Could not check prefill server {address}")

        threading.Thread(target=watch, daemon=True).start()
        peer_sockets.call_periodically(self.check_prefill_servers)

    def is_replaced(self, address: str) -> bool:
        """Whether another server has this address now, while the old one's ranks may live on.

        This happens when Kubernetes replaces the pods behind a service.
        """
        numbers, place = self.seen_ranks.get(address, ((), None))
        rank = self.query_route(address, *numbers) if place is not None else None
        return rank is not None and _endpoint(rank) not in (place, None)

    def check_prefill_servers(self) -> None:
        """Drops servers that lost a rank's connection, and records rooms of silent ranks.

        Such a server may have restarted, faster than heartbeats notice.
        """
        snapshot = ConnectionSnapshot(self.silent_seconds)
        with self.connection_lock:
            pools = dict(self.connection_pool)
        for key, ranks in pools.items():
            if any(map(snapshot.is_lost, ranks)):
                self._drop_server(key.rpartition("_")[0].rpartition("_")[0])
        silent = {}
        for room, ranks in list(self.requested_ranks.items()):
            for rank in filter(snapshot.is_silent, ranks):
                silent[room] = (
                    f"prefill rank {rank['rank_ip']}:{rank['rank_port']} has not answered for "
                    f"{self.silent_seconds:g} s ({VARIABLE})"
                )
        self.silent_rooms = silent

    def _drop_server(self, address: str) -> None:
        """Drops a server's sizes and ranks, so that the next request queries them again."""
        with self.connection_lock:
            for key in list(self.connection_pool):
                if key.startswith(f"{address}_"):
                    del self.connection_pool[key]
            self.seen_ranks.pop(address, None)
            if self.prefill_servers.pop(address, None) is not None:
                logger.warning(
                    f"Prefill {address} was lost or replaced; querying its ranks again at the next "
                    "request"
                )

    def _handle_node_failure(self, failed_bootstrap_addr: str) -> None:
        """Fails a prefill server's rooms, and drops its ranks in case it returns.

        Ranks whose ports are open may still write to their rooms; receivers abort those.
        """
        self._drop_server(failed_bootstrap_addr)
        with self.connection_lock:
            rooms: set[int] = set(self.addr_to_rooms_tracker.pop(failed_bootstrap_addr, ()))
        asked = {room: ranks for room, ranks in list(self.requested_ranks.items()) if room in rooms}
        places = {_endpoint(rank) for ranks in asked.values() for rank in ranks}
        gone = asked if all(map(_is_port_closed, places)) else {}
        reason = f"Lost connection to prefill server {failed_bootstrap_addr}"
        over = (KVPoll.Success, KVPoll.Failed, None)
        lost = [room for room in rooms if self.request_status.get(room) not in over]
        for room in lost:
            with self.rooms_lock:
                if room in gone or room not in self.requested_ranks:
                    self.fail(room, reason)
                elif room in self.request_status:  # otherwise it has concluded
                    self.lost_rooms[room] = reason
        logger.error(
            f"Lost connection to prefill server {failed_bootstrap_addr}; {len(lost)} requests fail"
        )


def _endpoint(rank: dict) -> tuple[str, int] | None:
    """Returns where a rank reads messages; None if the answer does not contain it."""
    host, port = rank.get("rank_ip"), rank.get("rank_port")
    return (host, port) if isinstance(host, str) and type(port) is int else None


def _is_port_closed(place: tuple[str, int]) -> bool:
    """Whether no process listens there; a suspended or unreachable rank may still write."""
    try:
        socket.create_connection(place, PROBE_SECONDS).close()
    except ConnectionRefusedError:
        return True
    except Exception as error:  # its address may be invalid
        logger.info(f"Prefill rank {place[0]}:{place[1]}: {error}")
    return False


def _is_healthy(address: str) -> bool:
    try:
        response = requests.get(f"http://{address}/health", timeout=HEALTH_TIMEOUT_SECONDS)
        return response.status_code == 200
    except Exception as error:  # `requests` also raises exceptions of other libraries
        logger.info(f"Prefill server {address}: {error}")
        return False


class BootstrapServer:
    """Answers decode ranks' queries on a prefill server."""

    # Whether this backend's prefill ranks read ABORT frames.
    takes_aborts = False

    async def _handle_route_get(self, request: web.Request) -> web.Response:
        """Answers with one rank's address, or with the server's sizes if each number is -1."""
        names = ("target_dp_group", "engine_rank", "target_pp_rank")
        try:
            dp_group, tp_rank, pp_rank = (int(request.query[name]) for name in names)
        except (KeyError, ValueError):
            return web.Response(text=f"/route expects integers {', '.join(names)}", status=400)
        if dp_group == tp_rank == pp_rank == -1:
            return web.json_response(
                {
                    "prefill_attn_tp_size": self.attn_tp_size,
                    "prefill_dp_size": self.dp_size,
                    "prefill_pp_size": self.pp_size,
                    "prefill_page_size": self.page_size,
                    "takes_aborts": self.takes_aborts,
                    "verifies": self.takes_aborts and bool(verify_mode()),
                }
            )
        async with self.lock:
            rank = self.prefill_port_table.get(dp_group, {}).get(tp_rank, {}).get(pp_rank)
        if rank is None:
            return web.Response(text=f"DP {dp_group} TP {tp_rank} PP {pp_rank} unknown", status=404)
        return web.json_response(rank)
