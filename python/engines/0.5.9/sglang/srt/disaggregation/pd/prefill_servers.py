"""What a decode server knows of prefill servers: sizes, where their ranks are, who is lost.

not known     asked in a thread; a scheduler that waited would serve nobody
lost          a rank's connection is lost: the server may be another one by now, and is asked again
replaced      a rank is elsewhere at a heartbeat: the address is another server's by now
silent        requests that have waited for a rank without a connection for some seconds fail
unhealthy     so do those of a server that answers no heartbeat; its ranks may write for a while
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Dict, List, Optional, Set, Tuple

import requests
from aiohttp import web
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.pd import peer_sockets
from sglang.srt.disaggregation.pd.peer_silence import VARIABLE
from sglang.srt.disaggregation.pd.peer_sockets import ConnectionSnapshot
from sglang.srt.disaggregation.pd.verify_mode import verify_mode

logger = logging.getLogger(__name__)

# Of a server's TP, DP, PP and page size.
MAX_SIZE = 1 << 16
# Seconds that a bootstrap server has for an answer, to connect and in all. One that let them pass
# is not asked again for some more.
HTTP_TIMEOUT_SECONDS = (2, 5)
BOOTSTRAP_RETRY_SECONDS = 10.0
MAX_UNREACHABLE = 4096
HEALTH_TIMEOUT_SECONDS = (2, 3)
PROBE_SECONDS = 2.0


@dataclass(frozen=True)
class PrefillServer:
    """Sizes of a prefill server; `page_size` is None from a stock one that does not tell."""

    attn_tp_size: int
    dp_size: int
    pp_size: int
    page_size: Optional[int]
    takes_aborts: bool
    verifies: bool = False

    @classmethod
    def read(cls, answer: dict) -> Optional[PrefillServer]:
        """From a bootstrap server's answer; None if these are no sizes."""
        names = ("attn_tp_size", "dp_size", "pp_size", "page_size")
        sizes = [answer.get(f"prefill_{name}") for name in names]
        if not all(map(_is_size, sizes if sizes[3] is not None else sizes[:3])):
            return None
        announced = {name: bool(answer.get(name)) for name in ("takes_aborts", "verifies")}
        return cls(*sizes, **announced)


def _is_size(number: object) -> bool:
    return type(number) is int and 0 < number <= MAX_SIZE


def start_thread(act: Callable[..., None], *args) -> bool:
    """Do it in a thread of its own; False if there are no more threads, of which nobody dies."""
    try:
        threading.Thread(target=act, args=args, daemon=True).start()
        return True
    except RuntimeError as error:
        logger.warning_once(f"A prefill server is not asked or told: {error}")
        return False


class PrefillServers:
    """A decode rank's KV manager, which has `heartbeat_interval` (seconds) and `max_failures`."""

    def __new__(cls, *args, **kwargs):
        self = super().__new__(cls)
        # By bootstrap address: those in use, and when those that did not answer are asked again.
        self.prefill_servers: Dict[str, PrefillServer] = {}
        self.retry_bootstrap_at: Dict[str, float] = {}
        # By bootstrap address: the numbers of one rank (TP, DP, PP), and where it was.
        self.seen_ranks: Dict[str, Tuple[Tuple[int, int, int], Tuple[str, int]]] = {}
        self.asking: Dict[str, Future] = {}
        # By room: the prefill ranks that were asked for it, and why it is not waited for any more.
        self.requested_ranks: Dict[int, List[dict]] = {}
        self.silent_rooms: Dict[int, str] = {}
        self.lost_rooms: Dict[int, str] = {}
        return self

    def query_in_thread(self, address: str, ask: Callable[[], None]) -> Future:
        """Have a thread ask a bootstrap server by `ask`, which does not raise; one at a time.

        Returns what ends when it has been asked, by this `ask` or one that was under way.
        """
        asking = self.asking.get(address)
        if asking is None:
            asking = self.asking[address] = Future()

            def serve() -> None:
                ask()
                del self.asking[address]
                asking.set_result(None)

            if not start_thread(serve):  # the next poll has it asked again
                del self.asking[address]
                asking.set_result(None)
        return asking

    def prefill_server(self, address: str) -> Optional[PrefillServer]:
        """Its sizes, the first time from its bootstrap server; None if that does not tell."""
        known = self.prefill_servers.get(address)
        if known is None:
            known = PrefillServer.read(self.query_route(address, -1, -1, -1) or {})
            if known is not None:
                self.prefill_servers[address] = known
        return known

    def prefill_rank(
        self, address: str, tp_rank: int, dp_group: int, pp_rank: int
    ) -> Optional[dict]:
        """Where that rank reads our messages (`rank_ip`, `rank_port`); None if it is not known."""
        numbers = (tp_rank, dp_group, pp_rank)
        rank = self.query_route(address, *numbers)
        if rank is None or _endpoint(rank) is None:
            return None
        self.seen_ranks[address] = (numbers, _endpoint(rank))
        return rank

    def query_route(
        self, address: str, tp_rank: int, dp_group: int, pp_rank: int
    ) -> Optional[dict]:
        """Its answer for one rank, or for the whole server with -1 thrice."""
        if time.monotonic() < self.retry_bootstrap_at.get(address, 0.0):
            return None
        query = {"engine_rank": tp_rank, "target_dp_group": dp_group, "target_pp_rank": pp_rank}
        try:
            response = requests.get(
                f"http://{address}/route", params=query, timeout=HTTP_TIMEOUT_SECONDS
            )
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
        logger.error(f"Bootstrap server {address} on {query}: {error}")
        return None

    def start_heartbeat(self) -> None:
        """Start the thread that asks them for their health and notes which are lost."""

        def look(address: str, failures: Dict[str, int]) -> None:
            is_healthy = _is_healthy(address)
            failures[address] = 0 if is_healthy else failures.get(address, 0) + 1
            if is_healthy and self.is_replaced(address):
                self._drop_server(address)
            if failures[address] >= self.max_failures:
                del failures[address]
                self._handle_node_failure(address)

        def watch() -> None:
            failures: Dict[str, int] = {}
            while True:
                time.sleep(self.heartbeat_interval)
                for address in self._addresses():
                    try:
                        look(address, failures)
                    except Exception:  # one address must not end the others' heartbeats
                        logger.exception(f"Prefill server {address} could not be watched")

        threading.Thread(target=watch, daemon=True).start()
        peer_sockets.call_periodically(self.check_prefill_servers)

    def _addresses(self) -> List[str]:
        """Of servers in use, and of those that were forgotten and have rooms here still."""
        tracked = list(self.addr_to_rooms_tracker.items())
        return list({*self.prefill_servers, *(address for address, rooms in tracked if rooms)})

    def is_replaced(self, address: str) -> bool:
        """Whether another server is behind this address than before, whose ranks may live on.

        So it is where Kubernetes replaces what is behind a service.
        """
        numbers, place = self.seen_ranks.get(address, ((), None))
        rank = self.query_route(address, *numbers) if place is not None else None
        return rank is not None and _endpoint(rank) not in (place, None)

    def check_prefill_servers(self) -> None:
        """Forget servers of which a rank's connection is lost, and note whose requests wait.

        Such a server may have been started anew, sooner than heartbeats tell.
        """
        look = ConnectionSnapshot(self.silent_seconds)
        with self.connection_lock:
            pools = dict(self.connection_pool)
        for key, ranks in pools.items():
            if any(map(look.is_lost, ranks)):
                self._drop_server(key.rpartition("_")[0].rpartition("_")[0])
        silent = {}
        for room, ranks in list(self.requested_ranks.items()):
            for rank in filter(look.is_silent, ranks):
                silent[room] = (
                    f"prefill rank {rank['rank_ip']}:{rank['rank_port']} has not answered for "
                    f"{self.silent_seconds:g} s ({VARIABLE})"
                )
        self.silent_rooms = silent

    def _drop_server(self, address: str) -> None:
        """Ask anew for its sizes and ranks."""
        with self.connection_lock:
            for key in list(self.connection_pool):
                if key.startswith(f"{address}_"):
                    del self.connection_pool[key]
            self.seen_ranks.pop(address, None)
            if self.prefill_servers.pop(address, None) is not None:
                logger.warning(f"Prefill server {address} is asked for its ranks again")

    def _handle_node_failure(self, failed_bootstrap_addr: str) -> None:
        """End the rooms of a prefill server, and ask anew for its ranks if it returns.

        Of those that were asked for, its ranks may write on, unless they are gone.
        """
        self._drop_server(failed_bootstrap_addr)
        with self.connection_lock:
            rooms: Set[int] = set(self.addr_to_rooms_tracker.pop(failed_bootstrap_addr, ()))
        asked = {room: ranks for room, ranks in list(self.requested_ranks.items()) if room in rooms}
        places = {_endpoint(rank) for ranks in asked.values() for rank in ranks}
        gone = asked if all(map(_is_port_closed, places)) else {}
        reason = f"Prefill server {failed_bootstrap_addr} does not answer any more"
        over = (KVPoll.Success, None)
        lost = [room for room in rooms if self.request_status.get(room) not in over]
        for room in lost:
            with self.rooms_lock:
                if room in gone or room not in self.requested_ranks:
                    self.fail(room, reason)
                elif room in self.request_status:  # else it is over
                    self.lost_rooms[room] = reason
        logger.error(
            f"Prefill server {failed_bootstrap_addr} does not answer; {len(lost)} requests fail"
        )


def _endpoint(rank: dict) -> Optional[Tuple[str, int]]:
    """Where it reads our messages; None if the answer does not say so."""
    host, port = rank.get("rank_ip"), rank.get("rank_port")
    return (host, port) if isinstance(host, str) and type(port) is int else None


def _is_port_closed(place: Tuple[str, int]) -> bool:
    """Whether nothing reads there any more; a rank that is stopped, or cut off, may write."""
    try:
        socket.create_connection(place, PROBE_SECONDS).close()
    except ConnectionRefusedError:
        return True
    except Exception as error:  # its address may be none
        logger.info(f"Prefill rank {place[0]}:{place[1]}: {error}")
    return False


def _is_healthy(address: str) -> bool:
    try:
        return (
            requests.get(f"http://{address}/health", timeout=HEALTH_TIMEOUT_SECONDS).status_code
            == 200
        )
    except Exception as error:  # not all that `requests` raises is its own
        logger.info(f"Prefill server {address}: {error}")
        return False


class BootstrapServer:
    """A prefill server's, which decode ranks ask."""

    # Whether this backend's prefill ranks read ABORT frames.
    takes_aborts = False

    async def _handle_route_get(self, request: web.Request) -> web.Response:
        """One rank's address, or with -1 for each number the server's sizes."""
        names = ("target_dp_group", "engine_rank", "target_pp_rank")
        try:
            dp_group, tp_rank, pp_rank = (int(request.query[name]) for name in names)
        except (KeyError, ValueError):
            return web.Response(text=f"/route takes whole numbers {', '.join(names)}", status=400)
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
