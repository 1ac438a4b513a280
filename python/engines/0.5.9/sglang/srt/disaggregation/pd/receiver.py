"""One request on a decode rank: which ranks send it, where its pages are, how it concludes."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait

import numpy as np
import numpy.typing as npt
import zmq
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.kv_layout import (
    LayoutError,
    agreed_units,
    pp_size_conflict,
    prefill_ranks_of,
    tp_size_conflict,
)
from sglang.srt.disaggregation.pd.interleaving import InterleavingJob
from sglang.srt.disaggregation.pd.peer_sockets import PeerSocket
from sglang.srt.disaggregation.pd.prefill_servers import PrefillServer, PrefillServers
from sglang.srt.disaggregation.pd.room_failures import ABORT, DUPLICATE_ROOM, ENDED
from sglang.srt.disaggregation.pd.sender import ABORTED
from sglang.srt.disaggregation.pd.threads import start_thread
from sglang.srt.disaggregation.pd.verify_mode import VARIABLE
from sglang.srt.utils import format_tcp_address, is_valid_ipv6_address

logger = logging.getLogger(__name__)

# Queries for addresses of a prefill server's ranks that run at a time.
MAX_PARALLEL_QUERIES = 16
# How long the scheduler waits for a bootstrap server's answer before it polls instead.
ANSWER_WAIT_SECONDS = 0.03


class Receiver:
    """The base of every backend's KV receiver.

    A backend provides `_register_kv_args()`; `_metadata_frames(is_dummy, pages, aux, state)`, the
    message that requests a room; `_reset_room_state(has_state)`, called before that message is
    sent; `_read_results()`, which returns whether a sender has failed the room;
    `_arrived_units()`, the chunks to interleave by sender; and `_rank_name()`, by which prefill
    knows this rank. Mori polls, requests and clears rooms in the engine's way.

    Attributes:
        init_time: When the room was requested from prefill, on the monotonic clock; None before.
        conclude_state: How the room concluded; None before.
        failing_since: When the first sender failed, or this side aborted; None before.
    """

    init_time: float | None = None
    conclude_state: KVPoll | None = None
    failing_since: float | None = None
    is_aborted = False
    aborted_by_engine = False
    prefill: PrefillServer | None = None
    # False for a backend whose `__init__` needs prefill's ranks at once.
    queries_in_thread = True
    # The query to prefill's bootstrap server while it runs, and the ranks that it has found.
    pending_query: Future | None = None
    found_ranks: list[dict] | None = None
    # Another request has the room.
    is_duplicate_room = False
    # Prefill ranks send digests of their pages (`verify`).
    expects_digests = False
    # The thread's work on the pages before they may be read, and whether it is done.
    interleaving: InterleavingJob | None = None
    is_interleaved = False

    def __init__(
        self,
        mgr: PrefillServers,
        bootstrap_addr: str,
        bootstrap_room: int | None = None,
        prefill_dp_rank: int | None = None,
    ):
        self.bootstrap_room = bootstrap_room
        self.bootstrap_addr = bootstrap_addr
        self.kv_mgr = mgr
        self.bootstrap_infos: list[dict] | None = None
        if bootstrap_room in mgr.request_status:
            # Only this request fails: the room's entries belong to the first one.
            self.is_duplicate_room, self.conclude_state = True, KVPoll.Failed
            return
        mgr.update_status(bootstrap_room, KVPoll.Bootstrapping)
        self.prefill_dp_rank = prefill_dp_rank
        is_first = bootstrap_addr not in mgr.pending_queries
        self._locate_prefill()
        if self.pending_query is not None and is_first:
            wait([self.pending_query], ANSWER_WAIT_SECONDS)
            self.is_querying()

    def is_querying(self) -> bool:
        """Whether the query for prefill's ranks still runs; uses its answer once it arrives."""
        if self.pending_query is None:
            return False
        has_failed = self.kv_mgr.check_status(self.bootstrap_room) == KVPoll.Failed
        if not self.pending_query.done():
            return not has_failed
        self.pending_query = None
        if has_failed:
            return False
        if self.found_ranks is None:  # another request's query, maybe for another DP rank
            self._locate_prefill()
        else:
            self._use_ranks(self.found_ranks)
        return self.pending_query is not None

    def _locate_prefill(self) -> None:
        """Uses prefill's known ranks, or queries their bootstrap server, usually in a thread."""
        known = self.kv_mgr.prefill_servers.get(self.bootstrap_addr)
        if known is not None:
            if not self._check_compatibility(known):
                return
            ranks = self.kv_mgr.connection_pool.get(self._pool_key())
            if ranks:
                self._use_ranks(ranks)
                return
        if self.queries_in_thread:
            ask = self._query_prefill
            self.pending_query = self.kv_mgr.query_in_thread(self.bootstrap_addr, ask)
            return
        self._query_prefill()
        if self.found_ranks is not None:
            self._use_ranks(self.found_ranks)

    def _query_prefill(self) -> None:
        """Queries prefill's sizes and ranks, in a thread; an error fails the room."""
        try:
            known = self.kv_mgr.prefill_server(self.bootstrap_addr)
            if known is None:
                self._fail(f"Bootstrap server {self.bootstrap_addr} did not return prefill's sizes")
            elif self._check_compatibility(known):
                self.found_ranks = self._fetch_bootstrap_infos()
        except Exception as error:
            self._fail(f"Could not query bootstrap server {self.bootstrap_addr}: {error!r}")

    def _check_compatibility(self, prefill: PrefillServer) -> bool:
        """Maps prefill's ranks to this one; if incompatible, fails the room and returns False."""
        self.prefill = prefill
        if self.prefill_dp_rank is None:
            self.prefill_dp_rank = self.bootstrap_room % prefill.dp_size
        self.target_dp_group = self.prefill_dp_rank
        conflict = self._incompatibility(prefill)
        if conflict:
            self._fail_incompatible(conflict)
            return False
        self._resolve_rank_mapping(prefill)
        return True

    def _pool_key(self) -> str:
        return f"{self.bootstrap_addr}_{self.target_dp_group}_{self.target_tp_rank}"

    def _use_ranks(self, ranks: list[dict]) -> None:
        """Uses these prefill ranks; registers our buffers with them once, not for each request."""
        manager = self.kv_mgr
        manager.required_prefill_response_num_table[self.bootstrap_room] = (
            self.required_prefill_response_num
        )
        self.expects_digests = manager.verifier is not None and self.prefill.verifies
        if manager.verifier is not None and not self.prefill.verifies:
            logger.warning_once(
                f"Prefill {self.bootstrap_addr} sends no digests, and its KV is not verified; "
                f"set {VARIABLE} there, too"
            )
        self.bootstrap_infos = ranks
        # Another thread empties the pool when a prefill server is lost.
        if manager.connection_pool.get(self._pool_key()) is not ranks:
            self._register_kv_args()
            if manager.check_status(self.bootstrap_room) != KVPoll.Failed:
                manager.connection_pool[self._pool_key()] = ranks

    def _incompatibility(self, prefill: PrefillServer) -> str | None:
        """Returns why this decode server cannot work with that prefill server; None if it can."""
        own = self.kv_mgr
        if prefill.page_size not in (None, own.kv_args.page_size):
            return (
                f"prefill page size {prefill.page_size} and decode page size "
                f"{own.kv_args.page_size} differ; start both servers with the same --page-size"
            )
        pp_conflict = pp_size_conflict(prefill.pp_size, own.pp_size)
        return pp_conflict or tp_size_conflict(prefill.attn_tp_size, own.attn_tp_size)

    def _resolve_rank_mapping(self, prefill: PrefillServer) -> None:
        """Finds which prefill ranks serve this one, and how many answers each side awaits."""
        own, prefill_tp = self.kv_mgr, prefill.attn_tp_size
        if own.attn_tp_size != prefill_tp and not own.is_mla_backend:
            logger.warning_once(
                f"Prefill TP size {prefill_tp} and decode TP size {own.attn_tp_size} differ: KV "
                "heads are interleaved, packed, or sent token by token, which takes longer than "
                "with equal sizes."
            )
        own_rank = own.kv_args.engine_rank % own.attn_tp_size
        served_by = prefill_ranks_of(own_rank, prefill_tp, own.attn_tp_size)
        self.target_tp_ranks = list(served_by)
        self.target_tp_rank = served_by.start
        same_stages = prefill.pp_size == own.pp_size
        self.target_pp_ranks = [own.pp_rank] if same_stages else list(range(prefill.pp_size))
        self.required_dst_info_num = max(1, own.attn_tp_size // prefill_tp)
        # With MLA every prefill rank has the whole KV, so one answers for its stage.
        senders = 1 if own.is_mla_backend else len(served_by)
        self.required_prefill_response_num = senders * (prefill.pp_size // own.pp_size)

    def _fetch_bootstrap_infos(self) -> list[dict] | None:
        """Returns the prefill ranks that serve this one; fails the room if one is unknown."""
        infos = []
        for tp_rank in self.target_tp_ranks:
            # The last stage first: it must be ready when the first one starts to compute.
            for pp_rank in reversed(self.target_pp_ranks):
                info = self._prefill_rank(tp_rank, pp_rank)
                if info is None:
                    self._fail(
                        f"Prefill {self.bootstrap_addr} did not return the address of rank "
                        f"DP {self.target_dp_group} TP {tp_rank} PP {pp_rank}: it is not "
                        "registered yet, or the bootstrap server did not answer"
                    )
                    return None
                # Other ranks with a copy of MLA's KV are notified of the room, and send nothing.
                info["is_dummy"] = self.kv_mgr.is_mla_backend and tp_rank != self.target_tp_rank
                infos.append(info)
        return infos

    def _prefill_rank(self, tp_rank: int, pp_rank: int) -> dict | None:
        return self.kv_mgr.prefill_rank(self.bootstrap_addr, tp_rank, self.target_dp_group, pp_rank)

    def init(
        self,
        kv_indices: npt.NDArray[np.int32],
        aux_index: int | None = None,
        state_indices: list[int] | None = None,
    ):
        """Requests the room: sends prefill ranks its pages, state slots and metadata row.

        Args:
            kv_indices: Pages of this rank's pool, int32, `[pages]`.
            aux_index: Row of the metadata buffers.
            state_indices: Slots or pages of the state's pool, if the model has state.
        """
        if self.is_duplicate_room:
            return
        if self.bootstrap_infos is not None:  # otherwise it failed, maybe before it found senders
            self._reset_room_state(state_indices is not None)
        else:
            self._fail(f"Prefill {self.bootstrap_addr} could not be reached")
        with self.kv_mgr.rooms_lock:  # after this, a lost server does not fail the room at once
            if self.kv_mgr.check_status(self.bootstrap_room) == KVPoll.Failed:
                return  # the engine frees its pages
            self.kv_mgr.requested_ranks[self.bootstrap_room] = self.bootstrap_infos
        self.kv_mgr.note_requested(self.bootstrap_room, self.bootstrap_addr)
        self.init_time = time.monotonic()
        self.pages, self.state_pages = kv_indices, state_indices
        state = b"" if state_indices is None else np.asarray(state_indices, np.int32).tobytes()
        where = (kv_indices.tobytes(), str(aux_index).encode("ascii"), state)
        for info in self.bootstrap_infos:
            error = self._send_to_prefill(info, self._metadata_frames(info["is_dummy"], *where))
            if error:
                self._abort(error)
                return

    def _register(self, frames: list[bytes]) -> None:
        """Sends the registration to each prefill rank that serves this one."""
        for info in self.bootstrap_infos:
            error = self._send_to_prefill(info, frames)
            if error:
                self._fail(error)

    def _own_address(self) -> list[bytes]:
        """Returns where and under which name a prefill rank reaches this rank."""
        manager = self.kv_mgr
        place = (manager.local_ip.encode("ascii"), str(manager.rank_port).encode("ascii"))
        return [*place, self._rank_name()]

    def _send_to_prefill(self, info: dict, frames: list[bytes]) -> str | None:
        """Sends a message without waiting; returns why the rank does not accept it, or None."""
        try:
            self._socket(info).send_multipart(frames)
        except zmq.ZMQError as error:
            place = f"{info['rank_ip']}:{info['rank_port']}"
            return f"Could not send a message to prefill rank {place}: {error}"
        return None

    @staticmethod
    def _socket(info: dict) -> PeerSocket:
        address, port = info["rank_ip"], info["rank_port"]
        return PeerSocket(format_tcp_address(address, port), is_valid_ipv6_address(address))

    def _check_timeout(self, failing: bool) -> None:
        """Fails a room that waits too long, for KV or, if `failing`, for senders to conclude."""
        now, manager = time.monotonic(), self.kv_mgr
        room = self.bootstrap_room
        lost = manager.silent_rooms.get(room) or manager.lost_rooms.get(room)
        if failing or self.failing_since:
            # Our pages must not be freed while a sender still writes to them.
            self.failing_since = self.failing_since or now
            if now - self.failing_since >= manager.release_seconds + manager.unsettled_seconds:
                self._fail("not all prefill ranks confirmed that they stopped writing")
        elif lost:
            self._abort(lost)
        elif now - self.init_time >= manager.waiting_timeout:
            self._abort(
                f"KV did not arrive within {now - self.init_time:.0f} s; "
                "SGLANG_DISAGGREGATION_WAITING_TIMEOUT sets the limit"
            )

    def abort(self):
        """Aborts the request for the engine; it fails once no sender writes to our pages."""
        self.aborted_by_engine = True
        if not (self.is_aborted or self.is_duplicate_room):
            self.poll()  # it may have concluded
            self._abort(ABORTED)

    def _abort(self, reason: str) -> None:
        """Aborts the room on prefill; it stays open until no prefill rank writes any more."""
        self.is_aborted = True
        self._stop_interleaving()
        manager, room = self.kv_mgr, self.bootstrap_room
        manager.record_failure(room, reason)
        if self.conclude_state is not None or manager.check_status(room) in ENDED:
            self.conclude_state = KVPoll.Failed
            return
        if self.init_time is None:
            manager.update_status(room, KVPoll.Failed)
        self._await_senders(reason)

    def _await_senders(self, reason: str) -> None:
        """Aborts the room on our senders; from now on it waits for them to conclude."""
        self.failing_since = self.failing_since or time.monotonic()
        if self.pending_query is None:
            self._send_abort(reason, self.bootstrap_infos or ())
        else:
            scheduler = threading.get_ident()

            def abort(_: Future) -> None:
                """Runs in the query's thread, or in the scheduler's if the query has finished."""
                if threading.get_ident() == scheduler:
                    start_thread(self._abort_when_known, reason)
                else:
                    self._abort_when_known(reason)

            self.pending_query.add_done_callback(abort)

    def _abort_when_known(self, reason: str) -> None:
        if self.found_ranks is None:  # the query was another request's
            self._query_prefill()
        self._send_abort(reason, self.found_ranks or ())

    def _send_abort(self, reason: str, infos: Iterable[dict]) -> None:
        """Sends an abort to these prefill ranks, if their server reads aborts."""
        if self.prefill is not None and self.prefill.takes_aborts:
            for info in infos:
                self._send_to_prefill(info, self._abort_frames(reason))

    def _abort_frames(self, reason: str) -> list[bytes]:
        room, name = str(self.bootstrap_room).encode("ascii"), self._rank_name()
        return [ABORT, room, reason.encode("utf-8"), b"" if self.init_time is None else name, name]

    def poll(self) -> KVPoll:
        """Returns the room's status; it concludes once every prefill rank has sent its result."""
        if self.conclude_state is None:
            if self.is_querying():
                return KVPoll.Bootstrapping
            if self.init_time is not None:
                is_failing = self._read_results()
                if self.kv_mgr.check_status(self.bootstrap_room) not in ENDED:
                    self._check_timeout(is_failing)
            self._update_conclude_state()
        return KVPoll.WaitingForInput if self.conclude_state is None else self.conclude_state

    def _update_conclude_state(self) -> None:
        """Records how the room concluded, once it has; a failing room has failed."""
        manager, room = self.kv_mgr, self.bootstrap_room
        status = manager.check_status(room)
        if status not in ENDED or (status == KVPoll.Success and self.init_time is None):
            return  # success of a room that was not requested is an earlier request's
        if self.failing_since:
            status = KVPoll.Failed
        if status == KVPoll.Success and not self.is_interleaved:
            try:
                self.is_interleaved = self._has_interleaved()
            except Exception as error:
                if not isinstance(error, LayoutError):
                    logger.exception(f"Room {room}: KV heads could not be interleaved")
                self._fail(f"decode could not interleave KV heads: {error}")
                status = KVPoll.Failed
            else:
                if not self.is_interleaved:
                    return
        if status == KVPoll.Success and self.expects_digests:
            seconds = time.monotonic() - self.init_time
            pages = (self.pages, self.state_pages)
            reason = manager.verify(room, self.bootstrap_addr, *pages, seconds)
            if reason:
                self._fail(reason)
                status = KVPoll.Failed
        self.conclude_state = status
        if status == KVPoll.Failed:
            self._stop_interleaving()
        else:
            manager.transfer_log.entered(room, "queued")

    def _has_interleaved(self) -> bool:
        """Returns whether the pages may be read; the first call starts to interleave them.

        Raises:
            LayoutError: The senders' chunks differ, or do not fit the pages.
        """
        if self.interleaving is None:
            senders = self.required_prefill_response_num
            units = agreed_units(self._arrived_units(), senders, len(self.pages))
            if not units:
                return True
            pages = (self.pages, self.state_pages)
            interleaver = self.kv_mgr.interleaver
            self.interleaving = interleaver.start(self.prefill.attn_tp_size, units, *pages)
            self.kv_mgr.transfer_log.entered(self.bootstrap_room, "interleaving")
        return self.interleaving.is_done()

    def _stop_interleaving(self) -> None:
        """Has the thread stop after the buffer at hand, for which only `_end` waits."""
        if self.interleaving is not None:
            self.interleaving.is_cancelled = True

    def is_open(self) -> bool:
        """Whether the room was requested from prefill."""
        return self.init_time is not None

    def fail_with_group(self) -> None:
        """Fails a room that another decode rank failed, once no sender writes to our pages."""
        if self.conclude_state is None and self.failing_since is None:
            if self.init_time is None:
                self.kv_mgr.update_status(self.bootstrap_room, KVPoll.Failed)
            self._await_senders("another decode rank failed")
        self._stop_interleaving()

    def clear(self) -> None:
        """Drops the room, which has succeeded."""
        self._end()

    def _close_failed_room(self) -> str:
        """Drops the failed room and returns why it failed."""
        self.conclude_state = KVPoll.Failed
        reason = self._end()
        self.kv_mgr.transfer_log.dropped(self.bootstrap_room, reason or "")
        return reason or "another decode rank failed"

    def _end(self) -> str | None:
        """Drops the room; returns why it failed, if it did."""
        manager, room, tracked = self.kv_mgr, self.bootstrap_room, self.kv_mgr.addr_to_rooms_tracker
        if self.is_duplicate_room:
            # The engine tracks rooms by server; this entry may be the first request's.
            noted = [room in rooms for rooms in list(tracked.values())]
            if sum(noted) > 1 or room not in manager.request_status:
                tracked[self.bootstrap_addr].discard(room)
            return DUPLICATE_ROOM
        if self.interleaving is not None:
            self.interleaving.cancel()
        manager.requested_ranks.pop(room, None)
        tracked[self.bootstrap_addr].discard(room)
        reason = manager.drop_room(room)
        manager.lost_rooms.pop(room, None)
        return reason

    def _fail(self, reason: str) -> None:
        """Fails the room, unless it has concluded: another request may have it by now."""
        if self.conclude_state is None:
            logger.error(f"Room {self.bootstrap_room}: {reason}")
            self.kv_mgr.fail(self.bootstrap_room, reason)

    def _fail_incompatible(self, reason: str) -> None:
        """Fails the room here, and on prefill, where it would wait for us in vain."""
        self._fail(reason)
        if self.kv_mgr.kv_args.engine_rank == self.kv_mgr.pp_rank == 0:
            # Not in the scheduler's thread: it queries the bootstrap server for every rank.
            start_thread(self._abort_on_all_ranks, reason)

    def _abort_on_all_ranks(self, reason: str) -> None:
        ranks = itertools.product(range(self.prefill.attn_tp_size), range(self.prefill.pp_size))

        def abort(rank: tuple[int, int]) -> None:
            info = self._prefill_rank(*rank)
            if info is not None:
                self._send_abort(reason, [info])

        # In parallel: a busy server answers each query slowly.
        with ThreadPoolExecutor(MAX_PARALLEL_QUERIES) as pool:
            list(pool.map(abort, ranks))
