"""What every transfer backend shares: a plan for each peer, and refusing a peer with a reason."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import threading
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from typing import Dict, Iterable, List, Optional, Set, Tuple
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt
import requests
import zmq
from aiohttp import web
from sglang.srt.disaggregation.base.conn import KVArgs, KVPoll
from sglang.srt.disaggregation.common.messages import PeerSocket, bind_again, read_messages
from sglang.srt.disaggregation.kv_layout import (
    Buffer,
    LayoutError,
    PeerFacts,
    Pointers,
    connected_prefill_ranks,
    counted_layout,
    decode_layout,
    one_sided_draft,
    pair_layers,
    plan_for_peer,
    tp_size_conflict,
    unsent_rows,
)
from sglang.srt.utils import format_tcp_address, is_valid_ipv6_address

logger = logging.getLogger(__name__)

# First frame (after a backend's guard) of a message by which decode gives up a room: ABORT, room,
# reason, decode's name if it has opened the room, and decode's name. Sent only to servers that
# announce `takes_aborts`.
ABORT = b"ABORT"
# Failed rooms that prefill remembers, for ranks to which they come late; and open rooms in all.
MAX_GIVEN_UP = 4096
MAX_OPEN_ROOMS = 1 << 16
MAX_SESSION_NAME = 256
TWO_REQUESTS = "another request has this bootstrap_room; choose another number for each"
# Of a server's TP, DP, PP and page size.
MAX_SIZE = 1 << 16
# Seconds that a bootstrap server has for an answer, to connect and in all; a scheduler waits. One
# that let them pass is not asked again for some more.
ANSWER_SECONDS = (2, 5)
SILENT_SECONDS = 10.0
# Ranks of a prefill server whose addresses are asked for at a time.
MAX_ASKING = 16
# How long a failed room waits on decode for the other senders: pages are not freed under a write.
SENDERS_END_SECONDS = 5.0
ENDED = (KVPoll.Success, KVPoll.Failed)


@dataclasses.dataclass
class GivenUp:
    """A room that this prefill rank has failed, and the decode ranks that know."""

    reason: str
    told: Set[str]


class CommonKVManager:
    # Rooms are touched by the scheduler and by the bootstrap thread; a process has one manager.
    rooms_lock = threading.RLock()
    # Prefill's requests, by room.
    senders: WeakValueDictionary[int, CommonKVSender] = WeakValueDictionary()
    # Why prefill failed a room; why decode gave up one whose request has not come to prefill.
    given_up: OrderedDict[int, GivenUp] = OrderedDict()
    aborted: OrderedDict[int, str] = OrderedDict()
    # Bootstrap addresses of prefill servers that read ABORT frames.
    takes_aborts: Set[str] = set()
    # Those that did not answer, and when they are asked again.
    silent_until: Dict[str, float] = {}

    @property
    def sender(self) -> int:
        """This prefill rank's number among all that may serve a decode rank, over TP and PP."""
        return self.attn_tp_rank * self.pp_size + self.pp_rank

    def get_mha_kv_ptrs_with_pp(
        self, src_kv_ptrs: List[int], dst_kv_ptrs: List[int]
    ) -> Tuple[List[int], List[int], List[int], List[int], int]:
        """Our K and V pointers, the peer's of the same layers, and how many of each.

        Target layers first, then those of a draft that both sides have.

        Raises:
            LayoutError: The peer lacks one of our target layers.
        """
        pairs = self._pair_layers(src_kv_ptrs, dst_kv_ptrs, ("k", "v"))
        k_and_v = [[pair for pair in pairs if pair[0].component == name] for name in ("k", "v")]
        src_k, src_v = ([src for _, src, _ in part] for part in k_and_v)
        dst_k, dst_v = ([dst for _, _, dst in part] for part in k_and_v)
        return src_k, src_v, dst_k, dst_v, len(src_k)

    def get_mla_kv_ptrs_with_pp(
        self, src_kv_ptrs: List[int], dst_kv_ptrs: List[int]
    ) -> Tuple[List[int], List[int], int]:
        """Our pointers, the peer's of the same components and layers, and how many of each.

        On an NPU a layer has `kv_buf_groups` pointers (PR #23893). Raises as for MHA.
        """
        groups = getattr(self.kv_args, "kv_buf_groups", 1)
        components = ("kv",) if groups == 1 else ("k", "v", "index_k")[:groups]
        pairs = self._pair_layers(src_kv_ptrs, dst_kv_ptrs, components)
        return [src for _, src, _ in pairs], [dst for _, _, dst in pairs], len(pairs)

    def _pair_layers(
        self, src: List[int], dst: List[int], components: Tuple[str, ...]
    ) -> List[Tuple[Buffer, int, int]]:
        """By the two sides' descriptions; where there is none, by what their numbers tell."""
        args = self.kv_args
        own = getattr(args, "layout", None)
        if own is None:
            start, held = args.prefill_start_layer, len(src) // len(components)
            total = getattr(args, "total_kv_layers", None)
            total = total or max(start + held, len(dst) // len(components))
            own = counted_layout(components, start, total, len(src))
        known = list(getattr(self, "decode_kv_args_table", {}).values())
        described = (
            info.plan.layout
            for info in known
            if getattr(info, "plan", None) and info.dst_kv_ptrs == dst
        )
        peer = next(described, None)
        facts = PeerFacts(own.tp_rank, own.tp_size, len(dst), state_pointers=None)
        return pair_layers(own, src, peer or facts, dst)

    def plan_transfers(self, peer: str, info, facts: PeerFacts, pointers: Pointers) -> None:
        """Set a registering decode rank's `plan`, or its `refusal`.

        `info.layout_frame` is what the peer says of itself; of one that says nothing, as stock, or
        something that is not ours, `facts` are known.
        """
        own = Pointers(self.kv_args.kv_data_ptrs, self.kv_args.state_data_ptrs)
        info.plan, info.refusal, info.try_again = None, "", False
        try:
            layout = decode_layout(info.layout_frame)
            info.reads_reasons = layout is not None
            if layout is None:
                logger.warning(
                    f"Decode {peer} runs a release that does not describe its KV buffers; "
                    "they are taken to be those of the same model."
                )
            info.plan = plan_for_peer(self.kv_args.layout, own, layout or facts, pointers)
            for unsent in (one_sided_draft, unsent_rows):
                said = unsent(self.kv_args.layout, info.plan.layout)
                if said:
                    logger.warning(f"Decode {peer}: {said}")
            return
        except LayoutError as error:
            info.refusal = str(error)
        except Exception as error:
            # An entry that is missing would be worse: its rooms would wait for ever.
            logger.exception(f"Decode {peer} cannot be planned for")
            info.refusal = f"prefill cannot plan for this decode server: {error!r}"
            info.try_again = True
        logger.error(f"Decode {peer} is refused: {info.refusal}")

    def advance(self, room: int, status: KVPoll) -> None:
        """Move a room on. It never moves back, and a failed room stays failed."""
        with self.rooms_lock:
            current = self.request_status.get(room, status)
            failed = KVPoll.Failed in (current, status)
            self.request_status[room] = KVPoll.Failed if failed else max(current, status)

    def _connect(self, endpoint: str, is_ipv6: bool = False) -> PeerSocket:
        return PeerSocket(endpoint, is_ipv6)

    def fail(self, room: int, reason: str) -> None:
        """Mark a room as failed; its request is failed where the ranks look at it together."""
        with self.rooms_lock:
            if room in self.request_status:  # else it is over
                self.record_failure(room, reason)
                self.update_status(room, KVPoll.Failed)

    def limit_messages(self) -> None:
        """Take our messages on a socket that ends the connection of one that is too large."""
        self.rank_port, self.server_socket = bind_again(self.server_socket)

    def read_bootstrap_messages(self) -> None:
        """Prefill: start the thread that reads them; one that cannot be read is dropped."""
        read_messages(self.server_socket, self._take_bootstrap_message)

    def check_session(self, session: str) -> None:
        """Refuse a name that no decode rank has."""
        if not 0 < len(session) <= MAX_SESSION_NAME:
            raise LayoutError(f"a decode rank with a name of {len(session)} characters")

    def asking_peer(self, info, session: str):
        """The registration of the decode rank that asks for a room; refuse one that asks wrongly.

        A registration that failed for no fault of the peer is tried again.
        """
        known = self.decode_kv_args_table.get(session)
        if known is None:
            raise LayoutError(f"decode {session} asks for room {info.room} and is not registered")
        numbers = (info.room, info.required_dst_info_num - 1, info.dst_aux_index or 0)
        slots = np.concatenate([info.dst_kv_indices, info.dst_state_indices])
        if min(numbers) < 0 or slots.min(initial=0) < 0:
            raise LayoutError(f"decode {session} asks for room {info.room} with negative numbers")
        if known.try_again:
            self._register_decode(known)
        return known

    def add_peer(self, info, session: str, refusal: str) -> Optional[str]:
        """Note that this decode rank asks for the room; returns why it fails, if it does now.

        One that asks again after it was told so has a new request of that number.
        """
        with self.rooms_lock:
            failed = self.given_up.get(info.room)
            if failed is not None and session not in failed.told:
                failed.told.add(session)
                return failed.reason
            self.given_up.pop(info.room, None)
            self.aborted.pop(info.room, None)
            peers = self.transfer_infos.setdefault(info.room, {})
            peers[session] = info
            if refusal:
                self.fail_room(info.room, refusal)
            elif len(peers) == info.required_dst_info_num:
                self.update_status(info.room, KVPoll.WaitingForInput)
            if len(self.transfer_infos) > MAX_OPEN_ROOMS:
                oldest = next(iter(self.transfer_infos))
                logger.error(f"{MAX_OPEN_ROOMS} rooms are open; room {oldest} is forgotten")
                del self.transfer_infos[oldest]
                self.forget(oldest)
        return None

    def begin(self, room: int, sender: CommonKVSender) -> None:
        """Prefill: a request has come; one that decode has given up before has failed.

        So have two of one number at a time, for nobody can tell which of them decode asks for.
        """
        with self.rooms_lock:
            other = self.senders.get(room)
            self.senders[room] = sender
            self.given_up.pop(room, None)  # was another request of that number
            reason = self.aborted.pop(room, None)
            if other is not None and not other.is_over:
                reason = TWO_REQUESTS
            self.update_status(room, KVPoll.Bootstrapping)
            if reason is not None:
                self.fail(room, reason)

    def remember(self, room: int, reason: str, told: Iterable[str]) -> None:
        """Prefill: keep why a room was failed, for decode ranks that ask for it only now."""
        known = self.given_up.pop(room, None)
        self.given_up[room] = GivenUp(reason, {*told, *(known.told if known else ())})
        if len(self.given_up) > MAX_GIVEN_UP:
            self.given_up.popitem(last=False)

    def take_abort(
        self, room: bytes, reason: bytes, session: bytes = b"", name: bytes = b""
    ) -> None:
        """Fail the room that decode has given up, also if its request has yet to come.

        `session` is decode's name if it has opened the room: then it may be over. A decode rank
        that has not needs no telling; when it asks for the room, that is another request.
        """
        number, peer = int(room), session.decode("ascii")
        knows = {name.decode("ascii")} if name and not peer else set()
        why = f"Decode gave up this request: {reason.decode('utf-8', 'replace')}"
        with self.rooms_lock:
            if number in self.given_up:
                self.given_up[number].told |= knows
            elif not peer or peer in self.transfer_infos.get(number, ()):
                self.fail_room(number, why)
                if knows and number not in self.aborted:
                    self.remember(number, why, knows)

    def fail_room(self, room: int, reason: str) -> None:
        """Prefill: fail a room, also if its request has yet to come; decode is told why."""
        sender = self.senders.get(room)
        if sender is not None and sender.conclude_state is not None:
            return  # it is over
        if sender is not None:
            self.fail(room, reason)
        else:
            self.request_status.pop(room, None)
            self.aborted[room] = reason
            if len(self.aborted) > MAX_GIVEN_UP:
                self.aborted.popitem(last=False)
        self.end_when_unwritten(room, reason)

    def watch_prefill_servers(self) -> None:
        """Decode: start the thread that asks them for their health and notes which are lost."""

        def watch() -> None:
            failures: Dict[str, int] = {}
            while True:
                time.sleep(self.heartbeat_interval)
                for address in list(self.prefill_dp_size_table):
                    failures[address] = 0 if _is_healthy(address) else failures.get(address, 0) + 1
                    if failures[address] >= self.max_failures:
                        del failures[address]
                        self._handle_node_failure(address)

        threading.Thread(target=watch, daemon=True).start()

    def lose_prefill(self, address: str) -> None:
        """Decode: fail the rooms of a prefill server, and ask anew for its ranks if it returns."""
        names = ("attn_tp_size", "dp_size", "pp_size", "page_size")
        with self.connection_lock:
            for key in list(self.connection_pool):
                if key.startswith(f"{address}_"):
                    del self.connection_pool[key]
            for name in names:
                getattr(self, f"prefill_{name}_table").pop(address, None)
            self.takes_aborts.discard(address)
            rooms = self.addr_to_rooms_tracker.pop(address, set())
        over = (KVPoll.Success, None)
        lost = [room for room in list(rooms) if self.request_status.get(room) not in over]
        for room in lost:
            self.fail(room, f"Prefill server {address} does not answer any more")
        logger.error(f"Prefill server {address} does not answer; {len(lost)} requests fail")


def split_state(args: KVArgs) -> Tuple[List[int], List[int]]:
    """Pointers of the target's state and of the draft's, which stock peers do not have."""
    targets = sum(not buffer.draft for buffer in args.layout.state)
    return args.state_data_ptrs[:targets], args.state_data_ptrs[targets:]


def _is_healthy(address: str) -> bool:
    try:
        return requests.get(f"http://{address}/health", timeout=(2, 3)).status_code == 200
    except requests.RequestException as error:
        logger.info(f"Prefill server {address}: {error}")
        return False


def _is_size(number: object) -> bool:
    return type(number) is int and 0 < number <= MAX_SIZE


def _is_address(rank: dict) -> bool:
    return isinstance(rank.get("rank_ip"), str) and type(rank.get("rank_port")) is int


class CommonKVSender:
    conclude_state: Optional[KVPoll] = None
    # The room is given up or forgotten; `conclude_state` may say before how it will end.
    is_over = False

    def __init__(
        self,
        mgr: CommonKVManager,
        bootstrap_addr: str,
        bootstrap_room: int,
        dest_tp_ranks: List[int],
        pp_rank: int,
    ):
        self.kv_mgr = mgr
        self.bootstrap_room = bootstrap_room
        self.bootstrap_server_url = bootstrap_addr
        self.aux_index = None
        self.curr_idx = 0
        self.begun = time.monotonic()
        mgr.begin(bootstrap_room, self)

    def leave(self) -> None:
        """The request leaves before it is sent, for its client is gone: decode must not wait."""
        if not self.is_over and hasattr(self.kv_mgr, "give_up"):  # Mori has none
            self.kv_mgr.record_failure(self.bootstrap_room, "Aborted by AbortReq.")
            self._give_up()

    def _give_up(self) -> str:
        """End the room, which has failed; returns why. Decode is told when we write no more."""
        self.is_over, self.conclude_state = True, KVPoll.Failed
        return self.kv_mgr.give_up(self.bootstrap_room)

    def clear(self) -> None:
        """Forget the room, which has succeeded."""
        self.is_over = True
        self.kv_mgr.forget(self.bootstrap_room)

    def fail_too(self) -> None:
        """Another rank of this stage failed the room."""
        if self.conclude_state is None:
            self.kv_mgr.fail(self.bootstrap_room, "another prefill rank failed")


class CommonKVReceiver:
    init_time: Optional[float] = None
    conclude_state: Optional[KVPoll] = None
    # Another request has the room.
    is_second = False
    is_aborted = False
    # When the first sender gave up, or this side did.
    failing_since: Optional[float] = None
    gave_up = False

    def __init__(
        self,
        mgr: CommonKVManager,
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
            self.is_second, self.conclude_state = True, KVPoll.Failed
            return
        mgr.update_status(bootstrap_room, KVPoll.Bootstrapping)
        if not self._learn_prefill_sizes():
            self._fail(f"Bootstrap server {bootstrap_addr} does not tell prefill's sizes")
            return
        if prefill_dp_rank is None:
            prefill_dp_rank = bootstrap_room % self.prefill_dp_size
        self.prefill_dp_rank = self.target_dp_group = prefill_dp_rank
        conflict = self._conflict_with_prefill()
        if conflict:
            self._refuse(conflict)
            return
        self._choose_targets()
        mgr.required_prefill_response_num_table[bootstrap_room] = self.required_prefill_response_num
        key = f"{bootstrap_addr}_{self.target_dp_group}_{self.target_tp_rank}"
        # The heartbeat thread empties the pool and the tables when a prefill server is lost.
        self.bootstrap_infos = mgr.connection_pool.get(key)
        infos = None if self.bootstrap_infos else self._find_targets()
        if infos:
            self.bootstrap_infos = infos
            # Once for each prefill rank, not for each request.
            self._register_kv_args()
            if mgr.check_status(bootstrap_room) != KVPoll.Failed:
                mgr.connection_pool[key] = infos

    def _learn_prefill_sizes(self) -> bool:
        """Set `prefill_*` from the manager's tables, the first time from the bootstrap server."""
        names = ("attn_tp_size", "dp_size", "pp_size", "page_size")
        tables: List[Dict] = [getattr(self.kv_mgr, f"prefill_{name}_table") for name in names]
        sizes = [table.get(self.bootstrap_addr) for table in tables]
        if None in sizes[:3]:
            answer = self._ask_bootstrap_server(-1, -1, -1) or {}
            sizes = [answer.get(f"prefill_{name}") for name in names]
            if not all(map(_is_size, sizes if sizes[3] is not None else sizes[:3])):
                return False
            for table, size in zip(tables, sizes):
                table[self.bootstrap_addr] = size
            if answer.get("takes_aborts"):
                self.kv_mgr.takes_aborts.add(self.bootstrap_addr)
        for name, size in zip(names, sizes):
            setattr(self, f"prefill_{name}", size)
        return True

    def _conflict_with_prefill(self) -> Optional[str]:
        """Why this decode server cannot work with that prefill server; None if it can."""
        mgr = self.kv_mgr
        own_page_size = mgr.kv_args.page_size
        if self.prefill_page_size not in (None, own_page_size):
            return (
                f"prefill page size {self.prefill_page_size} and decode page size {own_page_size} "
                "differ; start both servers with the same --page-size"
            )
        if mgr.pp_size not in (1, self.prefill_pp_size):
            return (
                f"decode PP size {mgr.pp_size} is neither 1 nor prefill's PP size "
                f"{self.prefill_pp_size}; start decode with one of these"
            )
        return tp_size_conflict(self.prefill_attn_tp_size, mgr.attn_tp_size)

    def _choose_targets(self) -> None:
        """Which prefill ranks serve this decode rank, and how many answers each side awaits."""
        mgr, prefill_tp = self.kv_mgr, self.prefill_attn_tp_size
        if mgr.attn_tp_size != prefill_tp and not mgr.is_mla_backend:
            logger.warning_once(
                f"Prefill TP size {prefill_tp} and decode TP size {mgr.attn_tp_size} differ: KV is "
                "sent token by token, which is slower than with equal sizes."
            )
        own_rank = mgr.kv_args.engine_rank % mgr.attn_tp_size
        served_by = connected_prefill_ranks(own_rank, prefill_tp, mgr.attn_tp_size)
        self.target_tp_ranks = list(served_by)
        self.target_tp_rank = served_by.start
        same_stages = self.prefill_pp_size == mgr.pp_size
        self.target_pp_ranks = [mgr.pp_rank] if same_stages else list(range(self.prefill_pp_size))
        self.required_dst_info_num = max(1, mgr.attn_tp_size // prefill_tp)
        # MLA: every prefill rank has all of it, so one answers for its stage.
        senders = 1 if mgr.is_mla_backend else len(served_by)
        self.required_prefill_response_num = senders * (self.prefill_pp_size // mgr.pp_size)

    def _find_targets(self) -> Optional[List[dict]]:
        """The prefill ranks that serve this one; None, having failed, if one is unknown."""
        infos = []
        for tp_rank in self.target_tp_ranks:
            # The last stage first: it must be ready when the first one starts to compute.
            for pp_rank in reversed(self.target_pp_ranks):
                info = self._get_bootstrap_info_from_server(tp_rank, self.target_dp_group, pp_rank)
                if info is None or not _is_address(info):
                    self._fail(
                        f"Prefill {self.bootstrap_addr} has no rank DP {self.target_dp_group} "
                        f"TP {tp_rank} PP {pp_rank} yet"
                    )
                    return None
                # Ranks that hold a copy of MLA's KV are told of the room, and send nothing.
                info["is_dummy"] = self.kv_mgr.is_mla_backend and tp_rank != self.target_tp_rank
                infos.append(info)
        return infos

    def init(
        self,
        kv_indices: npt.NDArray[np.int32],
        aux_index: Optional[int] = None,
        state_indices: Optional[List[int]] = None,
    ):
        """Tell the prefill ranks where this room's pages, state slots and metadata go."""
        if self.is_second:
            return
        if self.bootstrap_infos is None:
            self._fail(f"Prefill {self.bootstrap_addr} could not be reached")
        if self.kv_mgr.check_status(self.bootstrap_room) == KVPoll.Failed:
            return  # its pages are freed
        self.init_time = time.time()
        state = b"" if state_indices is None else np.asarray(state_indices, np.int32).tobytes()
        where = (kv_indices.tobytes(), str(aux_index).encode("ascii"), state)
        for info in self.bootstrap_infos:
            error = self._tell_prefill(info, self._room_frames(info["is_dummy"], *where))
            if error:
                self._give_up(error)
                return

    def _register(self, frames: List[bytes]) -> None:
        """Tell each prefill rank that serves this one where our buffers are."""
        for info in self.bootstrap_infos:
            error = self._tell_prefill(info, frames)
            if error:
                self._fail(error)

    def _tell_prefill(self, info: dict, frames: List[bytes]) -> Optional[str]:
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

    def _lose_patience(self, failing: bool) -> None:
        """Fail a room that waits in vain: for KV, or for the end of those that still send it."""
        now = time.time()
        if failing or self.failing_since:
            # Our pages must not be freed while a sender still writes to them.
            self.failing_since = self.failing_since or now
            if now - self.failing_since >= SENDERS_END_SECONDS:
                self._fail("not all prefill ranks say that they write no more")
        elif now - self.init_time >= self.kv_mgr.waiting_timeout:
            self._give_up(
                f"KV did not arrive within {now - self.init_time:.0f} s; "
                "SGLANG_DISAGGREGATION_WAITING_TIMEOUT sets the limit"
            )

    def abort(self):
        """Nobody waits for this request any more; it fails when none of our pages is written to."""
        self.is_aborted = True
        if not (self.gave_up or self.is_second):
            self.poll()  # it may be over
            self._give_up("Aborted by AbortReq.")

    def _give_up(self, reason: str) -> None:
        """Have prefill end the room; if it may be writing, wait until it says that it is not."""
        self.gave_up = True
        manager, room = self.kv_mgr, self.bootstrap_room
        manager.record_failure(room, reason)
        if self.conclude_state is not None or manager.check_status(room) in ENDED:
            self.conclude_state = KVPoll.Failed
            return
        if self.init_time is None:
            manager.update_status(room, KVPoll.Failed)
        self._ask_to_end(reason)

    def _ask_to_end(self, reason: str) -> None:
        """Have our senders end the room; from now on it is waited for that."""
        self.failing_since = self.failing_since or time.time()
        self._tell_abort(reason, self.bootstrap_infos or ())

    def _tell_abort(self, reason: str, infos: Iterable[dict]) -> None:
        """Have these prefill ranks end the room, if their server reads that."""
        if self.bootstrap_addr in self.kv_mgr.takes_aborts:
            for info in infos:
                self._tell_prefill(info, self._abort_frames(reason))

    def _conclude(self) -> KVPoll:
        """The room's state, kept when it is over; one that was failing has failed."""
        status = self.kv_mgr.check_status(self.bootstrap_room)
        if status == KVPoll.Success and self.init_time is None:
            return KVPoll.WaitingForInput  # nobody was asked
        if status in ENDED:
            status = self.conclude_state = KVPoll.Failed if self.failing_since else status
        return status

    def is_open(self) -> bool:
        """Whether prefill was asked for the room."""
        return self.init_time is not None

    def is_busy(self) -> bool:
        """Whether our pages may be written to."""
        return False

    def fail_too(self) -> None:
        """Another decode rank failed the room: it ends when none of our pages is written to."""
        if self.conclude_state is None and self.failing_since is None:
            if self.init_time is None:
                self.kv_mgr.update_status(self.bootstrap_room, KVPoll.Failed)
            self._ask_to_end("another decode rank failed")

    def _end(self) -> Optional[str]:
        """Forget the room; returns why it failed, if it did."""
        if self.is_second:
            return TWO_REQUESTS
        self.kv_mgr.addr_to_rooms_tracker[self.bootstrap_addr].discard(self.bootstrap_room)
        return self.kv_mgr.forget(self.bootstrap_room)

    def _fail(self, reason: str) -> None:
        logger.error(f"Room {self.bootstrap_room}: {reason}")
        self.kv_mgr.fail(self.bootstrap_room, reason)

    def _refuse(self, reason: str) -> None:
        """Fail the room here, and on prefill where it would wait for us in vain."""
        self._fail(reason)
        if self.kv_mgr.kv_args.engine_rank == self.kv_mgr.pp_rank == 0:
            # Not in the scheduler's time: it asks the bootstrap server for every rank.
            threading.Thread(target=self._abort_on_prefill, args=(reason,), daemon=True).start()

    def _abort_on_prefill(self, reason: str) -> None:
        sizes = self.prefill_attn_tp_size, self.prefill_pp_size
        ranks = itertools.product(*map(range, sizes))

        def tell(rank: Tuple[int, int]) -> None:
            tp_rank, pp_rank = rank
            info = self._get_bootstrap_info_from_server(tp_rank, self.target_dp_group, pp_rank)
            if info is not None and _is_address(info):
                self._tell_abort(reason, [info])

        # All at once: a busy server takes its time for each answer.
        with ThreadPoolExecutor(MAX_ASKING) as pool:
            list(pool.map(tell, ranks))

    def _abort_frames(self, reason: str) -> List[bytes]:
        room, name = str(self.bootstrap_room).encode("ascii"), self._own_name()
        return [ABORT, room, reason.encode("utf-8"), b"" if self.init_time is None else name, name]

    def _ask_bootstrap_server(self, tp_rank: int, dp_group: int, pp_rank: int) -> Optional[dict]:
        """The bootstrap server's answer for one rank, or for the whole server with -1 thrice."""
        address, silent_until = self.bootstrap_addr, self.kv_mgr.silent_until
        if time.monotonic() < silent_until.get(address, 0.0):
            return None
        query = {"engine_rank": tp_rank, "target_dp_group": dp_group, "target_pp_rank": pp_rank}
        url = f"http://{address}/route"
        try:
            response = requests.get(url, params=query, timeout=ANSWER_SECONDS)
            answer = response.json() if response.status_code == 200 else None
            if isinstance(answer, dict):
                return answer
            error = f"{response.status_code}, {response.text[:200]}"
        except (requests.RequestException, ValueError) as exception:
            error = str(exception)
            if isinstance(exception, requests.Timeout):
                silent_until[address] = time.monotonic() + SILENT_SECONDS
                if len(silent_until) > MAX_GIVEN_UP:
                    del silent_until[next(iter(silent_until))]
        logger.error(f"Bootstrap server {address} on {query}: {error}")
        return None

    def _get_bootstrap_info_from_server(
        self, engine_rank: int, target_dp_group: int, target_pp_rank: int
    ) -> Optional[dict]:
        return self._ask_bootstrap_server(engine_rank, target_dp_group, target_pp_rank)


class CommonKVBootstrapServer:
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
                }
            )
        async with self.lock:
            rank = self.prefill_port_table.get(dp_group, {}).get(tp_rank, {}).get(pp_rank)
        if rank is None:
            return web.Response(text=f"DP {dp_group} TP {tp_rank} PP {pp_rank} unknown", status=404)
        return web.json_response(rank)
