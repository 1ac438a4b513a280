"""Decode: queries bootstrap servers in threads; a scheduler that waited would serve nobody.

unknown       is queried for its sizes, and then for every rank that serves this one
answered      usually at once, else when the scheduler checks again, a second later
lost          a rank has lost its connection: the server may have restarted, and is queried again
replaced      a heartbeat finds a rank elsewhere: another server has the address by now
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import threading
import time
from concurrent.futures import Future, TimeoutError

import requests
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.pd import peer_sockets
from sglang.srt.disaggregation.pd.compatibility import check_sizes, query_route
from sglang.srt.disaggregation.pd.peer_silence import VARIABLE, read_silent_seconds
from sglang.srt.disaggregation.pd.peer_sockets import ConnectionSnapshot, PeerSocket
from sglang.srt.disaggregation.pd.per_instance import PerInstance
from sglang.srt.disaggregation.pd.threads import start_thread

logger = logging.getLogger(__name__)

# How long the scheduler waits, once, for an answer that is about to arrive.
ANSWER_WAIT_SECONDS = 0.03
# How long a server counts as incompatible before it is queried again: it may have restarted.
INCOMPATIBLE_SECONDS = 10.0

RankNumbers = tuple[int, int, int, int]  # DP, CP, TP, PP


class PrefillServers:
    """Base of a decode rank's KV manager, before the engine's.

    Only the scheduler may call `try_ensure_parallel_info`. `placeholder_prefill_info`, the record
    of a server of which nothing is known, is `RankManager`'s.
    """

    silent_seconds = PerInstance(read_silent_seconds)
    pending_queries: dict[str, Future[bool]] = PerInstance(dict)
    # Held while a request starts, which looks a server up twice, and while one is dropped.
    servers_lock = PerInstance(threading.RLock)
    # By bootstrap address: why its prefill server is incompatible, and until when that holds.
    incompatible: dict[str, tuple[str, float]] = PerInstance(dict)
    # By bootstrap address: the server's record when it was queried, and its ranks.
    routes: dict[str, tuple[object, dict[RankNumbers, dict]]] = PerInstance(dict)
    # By room: the prefill ranks from which it was requested.
    requested_ranks: dict[int, list[dict]] = PerInstance(dict)

    def try_ensure_parallel_info(self, bootstrap_addr: str) -> bool:
        """Returns whether a server's sizes and ranks are known; False also during a query.

        Extends the engine's: queries the server in a thread. Also True for an incompatible server;
        `incompatibility` then says why it is.
        """
        query, patience = self.pending_queries.get(bootstrap_addr), 0.0
        if query is None:
            if bootstrap_addr in self.prefill_info_table:
                return True
            query, patience = Future(), ANSWER_WAIT_SECONDS
            self.pending_queries[bootstrap_addr] = query
            if not start_thread(self._query_server, bootstrap_addr, query):
                del self.pending_queries[bootstrap_addr]  # the next check tries again
                return False
        try:
            is_known = query.result(patience)
        except TimeoutError:
            return False
        del self.pending_queries[bootstrap_addr]
        return is_known and bootstrap_addr in self.prefill_info_table

    def _query_server(self, address: str, query: Future[bool]) -> None:
        is_known = False
        try:
            is_known = self._query_sizes(address)
            if is_known:
                peer_sockets.call_periodically(self.check_prefill_servers)
                self._query_ranks(address)
        except Exception as error:  # else the scheduler would query the rest, and wait
            logger.warning(
                f"Could not query the ranks of bootstrap server {address}, trying again: {error}"
            )
            with self.servers_lock:
                self.prefill_info_table.pop(address, None)
            is_known = False
        query.set_result(is_known)

    def _query_sizes(self, address: str) -> bool:
        """Queries a server that is not known; returns whether it has answered."""
        try:
            is_known = super().try_ensure_parallel_info(address)
            if is_known:
                self.incompatible.pop(address, None)
            return is_known
        except Exception as error:  # also for an invalid answer
            why = str(error) or repr(error)
        logger.error(f"Prefill {address} cannot serve this decode server: {why}")
        self.incompatible[address] = (why, time.monotonic() + INCOMPATIBLE_SECONDS)
        self.prefill_info_table[address] = self.placeholder_prefill_info()
        return True

    def _resolve_rank_mapping(self, info) -> None:
        """Maps this rank to the prefill ranks that serve it.

        Extends the engine's: raises RuntimeError for sizes that are invalid or leave a rank out.
        """
        names = ("attn_tp_size", "attn_cp_size", "pp_size", "dp_size")
        check_sizes({name: getattr(info, name) for name in names}, self.attn_tp_size)
        super()._resolve_rank_mapping(info)

    def incompatibility(self, bootstrap_addr: str) -> str | None:
        """Returns why this prefill server cannot serve this rank; None if it can."""
        known = self.incompatible.get(bootstrap_addr)
        if known is None:
            return None
        why, until = known
        if time.monotonic() > until:
            self.incompatible.pop(bootstrap_addr, None)
            self.prefill_info_table.pop(bootstrap_addr, None)
        return why

    def _query_ranks(self, address: str) -> None:
        """Queries the ranks that serve this one, of all DP ranks of the server."""
        info = self.prefill_info_table.get(address)
        if info is None or address in self.incompatible or not info.target_tp_ranks:
            return
        ranks: dict[RankNumbers, dict] = {}
        self.routes[address] = (info, ranks)
        targets = (info.target_cp_ranks, info.target_tp_ranks, info.target_pp_ranks)
        with requests.Session() as session:
            for numbers in itertools.product(range(info.dp_size), *targets):
                ranks[numbers] = {**query_route(address, *numbers, session), "pp_rank": numbers[-1]}

    def check_prefill_servers(self) -> None:
        """Drops servers that lost a rank's connection, and fails rooms that wait for silent ranks.

        Such a server may have restarted before heartbeats notice, so it is queried again. Requests
        that its new process already has do not fail.
        """
        look = ConnectionSnapshot(self.silent_seconds)
        with self.connection_lock:
            pools = dict(self.connection_pool)
        for key, ranks in pools.items():
            if any(map(look.is_lost, ranks)):
                self.drop_server(key.rsplit("_", 3)[0])  # without the rank numbers
        for room, ranks in list(self.requested_ranks.items()):
            silent = [rank for rank in ranks if look.is_silent(rank)]
            if silent:
                self.requested_ranks.pop(room, None)
                self.fail_room_waiting_for(room, silent[0])

    def drop_server(self, address: str) -> None:
        """Forgets a server, which the next request queries again; open rooms go on."""
        with self.servers_lock:
            if self.prefill_info_table.pop(address, None) is not None:
                logger.warning(
                    f"Prefill {address} lost a rank or was replaced; querying its ranks again at "
                    "the next request"
                )
            self.routes.pop(address, None)
            with self.session_pool_lock:  # its heartbeats stop with the entry above
                self.session_pool.pop(address, None)
                self.heartbeat_failures.pop(address, None)
            with self.connection_lock:
                for key in [one for one in self.connection_pool if one.startswith(f"{address}_")]:
                    del self.connection_pool[key]

    def _on_heartbeat_success(self, bootstrap_addr: str):
        """Notes a heartbeat. Extends the engine's: drops a server that another one has replaced.

        The old server may live on for a while, as when Kubernetes replaces what is behind a
        service, so that no connection is lost.
        """
        super()._on_heartbeat_success(bootstrap_addr)
        _, ranks = self.routes.get(bootstrap_addr, (None, {}))
        for numbers, known in list(ranks.items())[:1]:
            with contextlib.suppress(Exception), requests.Session() as session:
                if _endpoint(query_route(bootstrap_addr, *numbers, session)) != _endpoint(known):
                    self.drop_server(bootstrap_addr)

    def _handle_node_failure(self, failed_bootstrap_addr: str):
        """Drops a failed server and its ranks. Extends the engine's: not while a request starts."""
        with self.servers_lock:
            super()._handle_node_failure(failed_bootstrap_addr)
            self.routes.pop(failed_bootstrap_addr, None)
            self.incompatible.pop(failed_bootstrap_addr, None)

    def has_gone_silent(self, rank: dict) -> bool:
        """Returns whether this prefill rank is silent; False for one that was sent nothing yet."""
        socket = PeerSocket.to(rank["rank_ip"], rank["rank_port"])
        return self.silent_seconds <= socket.silent_for() < math.inf

    def is_silent(self, rank: dict) -> bool:
        """Returns whether requests to this prefill rank must fail; keeps trying to reach it."""
        socket = PeerSocket.to(rank["rank_ip"], rank["rank_port"])
        socket.open()
        return socket.silent_for() >= self.silent_seconds

    def fail_room_waiting_for(self, room: int, rank: dict) -> None:
        if self.request_status.get(room) in (KVPoll.Success, KVPoll.Failed, None):
            return
        self.record_failure(
            room,
            f"prefill rank {rank['rank_ip']}:{rank['rank_port']} has not answered for "
            f"{self.silent_seconds:g} s ({VARIABLE})",
        )
        self.update_status(room, KVPoll.Failed)

    def cached_rank(self, address: str, numbers: RankNumbers) -> dict | None:
        """Returns the bootstrap server's answer for this rank; None if unknown or outdated."""
        info, ranks = self.routes.get(address, (None, {}))
        if info is None or self.prefill_info_table.get(address) is not info:
            return None
        rank = ranks.get(numbers)
        return None if rank is None else dict(rank)


def _endpoint(rank: dict) -> tuple[str, int]:
    return rank["rank_ip"], rank["rank_port"]
