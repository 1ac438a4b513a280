"""One request on a decode rank: who sends it, where its pages are, and how it ends."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Iterable, List, Optional, Tuple

import numpy as np
import numpy.typing as npt
import zmq
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.kv_layout import prefill_ranks_of, tp_size_conflict
from sglang.srt.disaggregation.pd.peer_sockets import PeerSocket
from sglang.srt.disaggregation.pd.prefill_servers import PrefillServer, start_thread
from sglang.srt.disaggregation.pd.room_failures import ABORT, DUPLICATE_ROOM, ENDED
from sglang.srt.disaggregation.pd.sender import ABORTED
from sglang.srt.disaggregation.pd.verify_mode import VARIABLE
from sglang.srt.utils import format_tcp_address, is_valid_ipv6_address

if TYPE_CHECKING:
    from sglang.srt.disaggregation.pd.prefill_servers import PrefillServers

logger = logging.getLogger(__name__)

# Ranks of a prefill server whose addresses are asked for at a time.
MAX_PARALLEL_QUERIES = 16
# For how long the scheduler waits for an answer that is nearly there.
ANSWER_WAIT_SECONDS = 0.03


class Receiver:
    """What every backend's KV receiver is.

    A backend has `_register_kv_args()`, `_metadata_frames(is_dummy, pages, aux, state)`, the message
    that opens a room, `_reset_room_state(has_state)`, done before that is sent, and `_rank_name()`, what
    prefill knows this rank by.

    Attributes:
        init_time: When prefill was asked for the room, on the monotonic clock; None before.
        conclude_state: How the room ended; None before.
        failing_since: When the first sender failed, or this side aborted; None before.
    """

    init_time: Optional[float] = None
    conclude_state: Optional[KVPoll] = None
    failing_since: Optional[float] = None
    abort_sent = False
    aborted_by_engine = False  # by the engine
    prefill: Optional[PrefillServer] = None
    # While prefill's bootstrap server is being asked; what it has said of the ranks.
    asking: Optional[Future] = None
    found_ranks: Optional[List[dict]] = None
    # Another request has the room.
    is_duplicate_room = False
    # Prefill ranks send digests of their pages (`verify`).
    expects_digests = False

    def __init__(
        self,
        mgr: PrefillServers,
        bootstrap_addr: str,
        bootstrap_room: Optional[int] = None,
        prefill_dp_rank: Optional[int] = None,
    ):
        self.bootstrap_room = bootstrap_room
        self.bootstrap_addr = bootstrap_addr
        self.kv_mgr = mgr
        self.bootstrap_infos: Optional[List[dict]] = None
        if bootstrap_room in mgr.request_status:
            # Fails alone: what is known of the room is the first one's.
            self.is_duplicate_room, self.conclude_state = True, KVPoll.Failed
            return
        mgr.update_status(bootstrap_room, KVPoll.Bootstrapping)
        self.prefill_dp_rank = prefill_dp_rank
        is_first = bootstrap_addr not in mgr.asking
        self._locate_prefill()
        if self.asking is not None and is_first:
            wait([self.asking], ANSWER_WAIT_SECONDS)
            self.is_querying()

    def is_querying(self) -> bool:
        """Whether it is not known yet where prefill's ranks are; nobody waits for that."""
        if self.asking is None:
            return False
        has_failed = self.kv_mgr.check_status(self.bootstrap_room) == KVPoll.Failed
        if not self.asking.done():
            return not has_failed
        self.asking = None
        if has_failed:
            return False
        if self.found_ranks is None:  # another request had it asked, for ranks of another DP rank
            self._locate_prefill()
        else:
            self._use_ranks(self.found_ranks)
        return self.asking is not None

    def _locate_prefill(self) -> None:
        """Take what is known of prefill's ranks, or have their bootstrap server asked."""
        known = self.kv_mgr.prefill_servers.get(self.bootstrap_addr)
        if known is not None:
            if not self._check_compatibility(known):
                return
            ranks = self.kv_mgr.connection_pool.get(self._pool_key())
            if ranks:
                self._use_ranks(ranks)
                return
        self.asking = self.kv_mgr.query_in_thread(self.bootstrap_addr, self._query_prefill)

    def _query_prefill(self) -> None:
        """In a thread: ask the bootstrap server for its sizes and ranks; fail the room without."""
        try:
            known = self.kv_mgr.prefill_server(self.bootstrap_addr)
            if known is None:
                self._fail(f"Bootstrap server {self.bootstrap_addr} does not tell prefill's sizes")
            elif self._check_compatibility(known):
                self.found_ranks = self._fetch_bootstrap_infos()
        except Exception as error:
            self._fail(f"Bootstrap server {self.bootstrap_addr} could not be asked: {error!r}")

    def _check_compatibility(self, prefill: PrefillServer) -> bool:
        """Map its ranks to this one; False, and the room fails, where the servers do not fit."""
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

    def _use_ranks(self, ranks: List[dict]) -> None:
        """Take these prefill ranks; they are told of our buffers once, not for each request."""
        manager = self.kv_mgr
        manager.required_prefill_response_num_table[self.bootstrap_room] = (
            self.required_prefill_response_num
        )
        self.expects_digests = self._expects_digests()
        self.bootstrap_infos = ranks
        # The thread that looks after peers empties the pool when a prefill server is lost.
        if manager.connection_pool.get(self._pool_key()) is not ranks:
            self._register_kv_args()
            if manager.check_status(self.bootstrap_room) != KVPoll.Failed:
                manager.connection_pool[self._pool_key()] = ranks

    def _expects_digests(self) -> bool:
        """Whether prefill ranks send digests of their pages, which are compared with ours."""
        if self.kv_mgr.verifier is not None and not self.prefill.verifies:
            logger.warning_once(
                f"Prefill {self.bootstrap_addr} does not verify; what it sends is not compared: "
                f"start it with {VARIABLE}, too"
            )
        return self.kv_mgr.verifier is not None and self.prefill.verifies

    def _incompatibility(self, prefill: PrefillServer) -> Optional[str]:
        """Why this decode server cannot work with that prefill server; None if it can."""
        own = self.kv_mgr
        if prefill.page_size not in (None, own.kv_args.page_size):
            return (
                f"prefill page size {prefill.page_size} and decode page size "
                f"{own.kv_args.page_size} differ; start both servers with the same --page-size"
            )
        if own.pp_size not in (1, prefill.pp_size):
            return (
                f"decode PP size {own.pp_size} is neither 1 nor prefill's PP size "
                f"{prefill.pp_size}; start decode with one of these"
            )
        return tp_size_conflict(prefill.attn_tp_size, own.attn_tp_size)

    def _resolve_rank_mapping(self, prefill: PrefillServer) -> None:
        """Which prefill ranks serve this decode rank, and how many answers each side awaits."""
        own, prefill_tp = self.kv_mgr, prefill.attn_tp_size
        if own.attn_tp_size != prefill_tp and not own.is_mla_backend:
            logger.warning_once(
                f"Prefill TP size {prefill_tp} and decode TP size {own.attn_tp_size} differ: KV is "
                "sent token by token, which is slower than with equal sizes."
            )
        own_rank = own.kv_args.engine_rank % own.attn_tp_size
        served_by = prefill_ranks_of(own_rank, prefill_tp, own.attn_tp_size)
        self.target_tp_ranks = list(served_by)
        self.target_tp_rank = served_by.start
        same_stages = prefill.pp_size == own.pp_size
        self.target_pp_ranks = [own.pp_rank] if same_stages else list(range(prefill.pp_size))
        self.required_dst_info_num = max(1, own.attn_tp_size // prefill_tp)
        # MLA: every prefill rank has all of it, so one answers for its stage.
        senders = 1 if own.is_mla_backend else len(served_by)
        self.required_prefill_response_num = senders * (prefill.pp_size // own.pp_size)

    def _fetch_bootstrap_infos(self) -> Optional[List[dict]]:
        """The prefill ranks that serve this one; None, having failed, if one is unknown."""
        infos = []
        for tp_rank in self.target_tp_ranks:
            # The last stage first: it must be ready when the first one starts to compute.
            for pp_rank in reversed(self.target_pp_ranks):
                info = self._prefill_rank(tp_rank, pp_rank)
                if info is None:
                    self._fail(
                        f"Prefill {self.bootstrap_addr} has no rank DP {self.target_dp_group} "
                        f"TP {tp_rank} PP {pp_rank} yet"
                    )
                    return None
                # Ranks that hold a copy of MLA's KV are told of the room, and send nothing.
                info["is_dummy"] = self.kv_mgr.is_mla_backend and tp_rank != self.target_tp_rank
                infos.append(info)
        return infos

    def _prefill_rank(self, tp_rank: int, pp_rank: int) -> Optional[dict]:
        return self.kv_mgr.prefill_rank(self.bootstrap_addr, tp_rank, self.target_dp_group, pp_rank)

    def init(
        self,
        kv_indices: npt.NDArray[np.int32],
        aux_index: Optional[int] = None,
        state_indices: Optional[List[int]] = None,
    ):
        """Tell the prefill ranks where this room's pages, state slots and metadata row go.

        Args:
            kv_indices: Pages of this rank's pool, int32, `[pages]`.
            aux_index: Row of the metadata buffers.
            state_indices: Slots or pages of the state's pool, if the model has state.
        """
        if self.is_duplicate_room:
            return
        if self.bootstrap_infos is not None:  # else it failed, maybe without knowing its senders
            self._reset_room_state(state_indices is not None)
        else:
            self._fail(f"Prefill {self.bootstrap_addr} could not be reached")
        with self.kv_mgr.rooms_lock:  # from now on a lost server's room does not fail at once
            if self.kv_mgr.check_status(self.bootstrap_room) == KVPoll.Failed:
                return  # its pages are freed
            self.kv_mgr.requested_ranks[self.bootstrap_room] = self.bootstrap_infos
        self.init_time = time.monotonic()
        if self.expects_digests:
            self.pages, self.state_pages = kv_indices, state_indices
        state = b"" if state_indices is None else np.asarray(state_indices, np.int32).tobytes()
        where = (kv_indices.tobytes(), str(aux_index).encode("ascii"), state)
        for info in self.bootstrap_infos:
            error = self._send_to_prefill(info, self._metadata_frames(info["is_dummy"], *where))
            if error:
                self._abort(error)
                return

    def _register(self, frames: List[bytes]) -> None:
        """Tell each prefill rank that serves this one where our buffers are."""
        for info in self.bootstrap_infos:
            error = self._send_to_prefill(info, frames)
            if error:
                self._fail(error)

    def _send_to_prefill(self, info: dict, frames: List[bytes]) -> Optional[str]:
        """Send a message; returns why a rank takes none, for nobody may wait for that."""
        try:
            self._socket(info).send_multipart(frames)
        except zmq.ZMQError as error:
            return f"Prefill rank {info['rank_ip']}:{info['rank_port']} takes no messages: {error}"
        return None

    @staticmethod
    def _socket(info: dict) -> PeerSocket:
        address, port = info["rank_ip"], info["rank_port"]
        return PeerSocket(format_tcp_address(address, port), is_valid_ipv6_address(address))

    def _check_timeout(self, failing: bool) -> None:
        """Fail a room that waits in vain: for KV, or for the end of those that still send it."""
        now, manager = time.monotonic(), self.kv_mgr
        room = self.bootstrap_room
        lost = manager.silent_rooms.get(room) or manager.lost_rooms.get(room)
        if failing or self.failing_since:
            # Our pages must not be freed while a sender still writes to them.
            self.failing_since = self.failing_since or now
            if now - self.failing_since >= manager.release_seconds + manager.unsettled_seconds:
                self._fail("not all prefill ranks say that they write no more")
        elif lost:
            self._abort(lost)
        elif now - self.init_time >= manager.waiting_timeout:
            self._abort(
                f"KV did not arrive within {now - self.init_time:.0f} s; "
                "SGLANG_DISAGGREGATION_WAITING_TIMEOUT sets the limit"
            )

    def abort(self):
        """Nobody waits for this request any more; it fails when none of our pages is written to."""
        self.aborted_by_engine = True
        if not (self.abort_sent or self.is_duplicate_room):
            self.poll()  # it may be over
            self._abort(ABORTED)

    def _abort(self, reason: str) -> None:
        """Have prefill end the room; if it may be writing, wait until it says that it is not."""
        self.abort_sent = True
        manager, room = self.kv_mgr, self.bootstrap_room
        manager.record_failure(room, reason)
        if self.conclude_state is not None or manager.check_status(room) in ENDED:
            self.conclude_state = KVPoll.Failed
            return
        if self.init_time is None:
            manager.update_status(room, KVPoll.Failed)
        self._await_senders(reason)

    def _await_senders(self, reason: str) -> None:
        """Have our senders end the room; from now on it is waited for that."""
        self.failing_since = self.failing_since or time.monotonic()
        if self.asking is None:
            self._send_abort(reason, self.bootstrap_infos or ())
        else:
            scheduler = threading.get_ident()

            def tell(_: Future) -> None:
                """In the thread that has asked; in the scheduler's if that has ended by now."""
                if threading.get_ident() == scheduler:
                    start_thread(self._abort_when_known, reason)
                else:
                    self._abort_when_known(reason)

            self.asking.add_done_callback(tell)

    def _abort_when_known(self, reason: str) -> None:
        if self.found_ranks is None:  # another request had them asked for
            self._query_prefill()
        self._send_abort(reason, self.found_ranks or ())

    def _send_abort(self, reason: str, infos: Iterable[dict]) -> None:
        """Have these prefill ranks end the room, if their server reads that."""
        if self.prefill is not None and self.prefill.takes_aborts:
            for info in infos:
                self._send_to_prefill(info, self._abort_frames(reason))

    def _abort_frames(self, reason: str) -> List[bytes]:
        room, name = str(self.bootstrap_room).encode("ascii"), self._rank_name()
        return [ABORT, room, reason.encode("utf-8"), b"" if self.init_time is None else name, name]

    def _update_conclude_state(self) -> KVPoll:
        """The room's state, kept when it is over; one that was failing has failed."""
        status = self.kv_mgr.check_status(self.bootstrap_room)
        if status == KVPoll.Success and self.init_time is None:
            return KVPoll.WaitingForInput  # nobody was asked
        if status in ENDED and self.failing_since:
            status = KVPoll.Failed
        if status == KVPoll.Success and self.expects_digests:
            room, pages = self.bootstrap_room, (self.pages, self.state_pages)
            seconds = time.monotonic() - self.init_time
            reason = self.kv_mgr.verify(room, self.bootstrap_addr, *pages, seconds)
            if reason:
                self._fail(reason)
                status = KVPoll.Failed
        if status in ENDED:
            self.conclude_state = status
        return status

    def is_open(self) -> bool:
        """Whether prefill was asked for the room."""
        return self.init_time is not None

    def has_pending_transfers(self) -> bool:
        """Whether our pages may be written to."""
        return False

    def fail_with_group(self) -> None:
        """Another decode rank failed the room: it ends when none of our pages is written to."""
        if self.conclude_state is None and self.failing_since is None:
            if self.init_time is None:
                self.kv_mgr.update_status(self.bootstrap_room, KVPoll.Failed)
            self._await_senders("another decode rank failed")

    def clear(self) -> None:
        """Forget the room, which has succeeded."""
        self._end()

    def _end(self) -> Optional[str]:
        """Forget the room; returns why it failed, if it did."""
        if self.is_duplicate_room:
            self._untrack_room()
            return DUPLICATE_ROOM
        self.kv_mgr.requested_ranks.pop(self.bootstrap_room, None)
        self.kv_mgr.addr_to_rooms_tracker[self.bootstrap_addr].discard(self.bootstrap_room)
        reason = self.kv_mgr.drop_room(self.bootstrap_room)
        self.kv_mgr.lost_rooms.pop(self.bootstrap_room, None)
        return reason

    def _untrack_room(self) -> None:
        """Take the room off this server, which the engine notes, unless it is the first one's."""
        manager, room = self.kv_mgr, self.bootstrap_room
        noted = [room in rooms for rooms in list(manager.addr_to_rooms_tracker.values())]
        if sum(noted) > 1 or room not in manager.request_status:
            manager.addr_to_rooms_tracker[self.bootstrap_addr].discard(room)

    def _fail(self, reason: str) -> None:
        logger.error(f"Room {self.bootstrap_room}: {reason}")
        self.kv_mgr.fail(self.bootstrap_room, reason)

    def _fail_incompatible(self, reason: str) -> None:
        """Fail the room here, and on prefill where it would wait for us in vain."""
        self._fail(reason)
        if self.kv_mgr.kv_args.engine_rank == self.kv_mgr.pp_rank == 0:
            # Not in the scheduler's time: it asks the bootstrap server for every rank.
            start_thread(self._abort_on_all_ranks, reason)

    def _abort_on_all_ranks(self, reason: str) -> None:
        ranks = itertools.product(range(self.prefill.attn_tp_size), range(self.prefill.pp_size))

        def tell(rank: Tuple[int, int]) -> None:
            info = self._prefill_rank(*rank)
            if info is not None:
                self._send_abort(reason, [info])

        # All at once: a busy server takes its time for each answer.
        with ThreadPoolExecutor(MAX_PARALLEL_QUERIES) as pool:
            list(pool.map(tell, ranks))
