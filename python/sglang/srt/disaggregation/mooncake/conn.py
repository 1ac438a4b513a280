"""Mooncake (and what derives from it): KV is sent by the peer's plan, whatever the TP sizes."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import logging
import os
import struct
import sys
import threading
from typing import TYPE_CHECKING, List, Optional, Tuple

import numpy as np
import numpy.typing as npt
import zmq
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import (
    ABORT,
    CommonKVBootstrapServer,
    CommonKVManager,
    CommonKVReceiver,
)
from sglang.srt.disaggregation.kv_layout import (
    Copies,
    LayoutError,
    PeerFacts,
    PeerPlan,
    Pointers,
    TransferPlan,
    encode_layout,
)
from sglang.srt.utils import format_tcp_address, is_valid_ipv6_address

if TYPE_CHECKING:
    from sglang.srt.disaggregation.mooncake.conn import TransferInfo

logger = logging.getLogger(__name__)

# Copies in one call to the engine where token slices number a million a chunk.
SLICE_BATCH = 16384
# Mooncake's TCP transport (MC_FORCE_TCP) fails with some 2,000 copies under way in a process, and
# a caller spins until its copies have ended: with more callers than cores none ends in time.
TCP_BATCH = 512
_TCP_TURN = threading.Lock()


@dataclasses.dataclass
class KVArgsRegisterInfo:
    # What the decode rank says of its buffers; empty from a stock one.
    layout_frame: bytes = b""
    # Set by the manager: the copies to this rank, or why there can be none.
    plan: Optional[PeerPlan] = None
    refusal: str = ""

    @classmethod
    def from_zmq(cls, msg: List[bytes]):
        """Read a registration; frames are known by position, the 13th is our description."""

        def numbers(position: int, code: str) -> List[int]:
            frame = msg[position] if len(msg) > position else b""
            return [number for (number,) in struct.iter_unpack(code, frame)]

        return cls(
            room=msg[0].decode("ascii"),
            endpoint=msg[1].decode("ascii"),
            dst_port=int(msg[2]),
            mooncake_session_id=msg[3].decode("ascii"),
            dst_kv_ptrs=numbers(4, "Q"),
            dst_aux_ptrs=numbers(5, "Q"),
            dst_state_data_ptrs=numbers(6, "Q"),
            dst_tp_rank=int(msg[7]),
            dst_attn_tp_size=int(msg[8]),
            dst_kv_item_len=int(msg[9]),
            dst_state_item_lens=numbers(10, "I"),
            dst_state_dim_per_tensor=numbers(11, "I"),
            layout_frame=msg[12] if len(msg) > 12 else b"",
        )


class MooncakeKVManager(CommonKVManager):
    def register_buffer_to_engine(self) -> None:
        """Register KV, aux and state in one batch: of some transports, ranges that touch merge.

        Raises:
            RuntimeError: A buffer cannot be registered; the text names it.
        """
        args, layout = self.kv_args, self.kv_args.layout
        names = [
            *(f"KV {buffer.name}" for buffer in layout.kv),
            *(f"aux {i}" for i in range(len(args.aux_data_ptrs))),
            *(f"state {buffer.name}" for buffer in layout.state),
        ]
        ptrs = [*args.kv_data_ptrs, *args.aux_data_ptrs, *args.state_data_ptrs]
        lens = [*args.kv_data_lens, *args.aux_data_lens, *args.state_data_lens]
        if self.engine.batch_register(ptrs, lens) == 0:
            return
        each = zip(names, ptrs, lens)
        alone = [one for one in each if self.engine.batch_register([one[1]], [one[2]]) != 0]
        failed = [f"{name} ({length:,} bytes)" for name, _, length in alone]
        raise RuntimeError(
            f"The transfer engine did not register this rank's {len(ptrs)} buffers of "
            f"{sum(lens):,} bytes in one batch; one by one it fails for: "
            f"{', '.join(failed) or 'none'}. Without them no KV can be transferred; look for "
            "limits of locked memory and of memory regions, or choose a smaller KV pool"
        )

    def send_kvcache(
        self,
        mooncake_session_id: str,
        prefill_kv_indices: npt.NDArray[np.int32],
        dst_kv_ptrs: List[int],
        dst_kv_indices: npt.NDArray[np.int32],
        executor: concurrent.futures.ThreadPoolExecutor,
    ) -> int:
        """Write these pages of all layers to the peer. Returns 0, or not 0 if it failed."""
        info = self.decode_kv_args_table[mooncake_session_id]
        if info.plan is None:
            logger.error(f"No KV is sent to {mooncake_session_id}: {info.refusal}")
            return -1
        pages = (prefill_kv_indices, dst_kv_indices)
        try:
            return self._write(mooncake_session_id, info.plan.kv, *pages, executor)
        except LayoutError as error:
            logger.error(f"No KV is sent to {mooncake_session_id}: {error}")
            return -1

    def _send_kvcache_generic(
        self,
        mooncake_session_id: str,
        src_data_ptrs: List[int],
        dst_data_ptrs: List[int],
        item_lens: List[int],
        prefill_data_indices: npt.NDArray[np.int32],
        dst_data_indices: npt.NDArray[np.int32],
        executor: concurrent.futures.ThreadPoolExecutor,
    ) -> int:
        """Write pages of state, which alone still comes this way. 0, or not 0 if it failed."""
        plan = self.decode_kv_args_table[mooncake_session_id].plan.state
        pages = (prefill_data_indices, dst_data_indices)
        return self._write(mooncake_session_id, plan, *pages, executor)

    def send_kvcache_slice(
        self,
        mooncake_session_id: str,
        prefill_kv_indices: npt.NDArray[np.int32],
        dst_kv_ptrs: List[int],
        dst_kv_indices: npt.NDArray[np.int32],
        dst_tp_rank: int,
        dst_attn_tp_size: int,
        dst_kv_item_len: int,
        executor: concurrent.futures.ThreadPoolExecutor,
    ) -> int:
        """The same between different TP sizes: the plan made at registration knows the heads."""
        return self.send_kvcache(
            mooncake_session_id, prefill_kv_indices, dst_kv_ptrs, dst_kv_indices, executor
        )

    def _write(
        self,
        session: str,
        plan: TransferPlan,
        src_pages: npt.NDArray[np.int32],
        dst_pages: npt.NDArray[np.int32],
        executor: concurrent.futures.ThreadPoolExecutor,
    ) -> int:
        """Whole pages in one call, which is best over RDMA, unless something speaks against it."""
        copies = plan.copies(src_pages, dst_pages)
        at_most = SLICE_BATCH if plan.is_sliced else sys.maxsize
        if self.enable_custom_mem_pool:  # NVLink gains from several threads
            at_most = min(at_most, -(-len(copies) // executor._max_workers))

        def write(part: Copies) -> int:
            lists = part.lists()
            if os.environ.get("MC_FORCE_TCP"):
                return self._write_over_tcp(session, lists)
            return self.engine.batch_transfer_sync(session, *lists) if lists[0] else 0

        parts = copies.parts(at_most)
        if len(parts) == 1 or executor._max_workers == 1:
            results = map(write, parts)  # one after the other, for which no thread is needed
        else:
            # All are waited for, also when one fails: pages must not be freed under a write.
            results = list(executor.map(write, parts))
        return next((status for status in results if status != 0), 0)

    def _write_over_tcp(self, session: str, lists: Tuple[List[int], List[int], List[int]]) -> int:
        for start in range(0, len(lists[0]), TCP_BATCH):
            few = [column[start : start + TCP_BATCH] for column in lists]
            with _TCP_TURN:
                status = self.engine.batch_transfer_sync(session, *few)
            if status != 0:
                return status
        return 0

    def update_status(self, bootstrap_room: int, status: KVPoll):
        """Move a room on. It never moves back, and a failed room stays failed."""
        self.advance(bootstrap_room, status)

    def start_prefill_thread(self):
        """Read what decode ranks register, which rooms they open and which they give up."""
        self.read_bootstrap_messages()

    def _take_bootstrap_message(self, frames: List[bytes]) -> None:
        if frames[0] == ABORT:
            self.take_abort(*frames[1:3])
        elif frames[0] == b"None":
            self._register_decode(KVArgsRegisterInfo.from_zmq(frames))
        else:
            self._open_room(TransferInfo.from_zmq(frames))

    def _open_room(self, info: TransferInfo) -> None:
        refusal = self.decode_kv_args_table[info.mooncake_session_id].refusal
        if refusal:
            self.record_failure(info.room, refusal)
            self.update_status(info.room, KVPoll.Failed)
            self._tell_failure(info)
            return
        peers = self.transfer_infos.setdefault(info.room, {})
        peers[info.mooncake_session_id] = info
        if len(peers) == info.required_dst_info_num:
            self.update_status(info.room, KVPoll.WaitingForInput)

    def _tell_failure(self, info: TransferInfo) -> None:
        """As `sync_status_to_decode_endpoint`, whose sockets belong to the transfer threads."""
        numbers = (info.room, KVPoll.Failed, self.sender)
        with zmq.Context.instance().socket(zmq.PUSH) as sock:
            sock.setsockopt(zmq.IPV6, int(is_valid_ipv6_address(info.endpoint)))
            sock.connect(format_tcp_address(info.endpoint, info.dst_port))
            sock.send_multipart([str(number).encode("ascii") for number in numbers])

    def _register_decode(self, info: KVArgsRegisterInfo) -> None:
        session = info.mooncake_session_id
        # Recurrent state is sent without a plan: between TP sizes it is cut along its dimensions.
        state = None if self.kv_args.state_type == "mamba" else info.dst_state_data_ptrs
        info.plan, info.refusal = self.plan_transfers(
            session,
            info.layout_frame,
            PeerFacts(
                tp_rank=info.dst_tp_rank % info.dst_attn_tp_size,
                tp_size=info.dst_attn_tp_size,
                kv_pointers=len(info.dst_kv_ptrs),
                state_pointers=None if state is None else len(state),
                page_bytes=info.dst_kv_item_len,
            ),
            Pointers(info.dst_kv_ptrs, state),
        )
        self.decode_kv_args_table[session] = info
        with self.session_lock:
            self.failed_sessions.discard(session)
            self.session_failures.pop(session, None)


class MooncakeKVReceiver(CommonKVReceiver):
    def _register_kv_args(self):
        """Tell each prefill rank that serves this one where our buffers are and what they hold."""
        args = self.kv_mgr.kv_args

        def packed(code: str, numbers: List[int]) -> bytes:
            return struct.pack(f"{len(numbers)}{code}", *numbers)

        frames = [
            b"None",
            self.kv_mgr.local_ip.encode("ascii"),
            str(self.kv_mgr.rank_port).encode("ascii"),
            self.session_id.encode("ascii"),
            packed("Q", args.kv_data_ptrs),
            packed("Q", args.aux_data_ptrs),
            packed("Q", args.state_data_ptrs),
            str(args.engine_rank).encode("ascii"),
            str(self.kv_mgr.attn_tp_size).encode("ascii"),
            str(args.kv_item_lens[0]).encode("ascii"),
            packed("I", args.state_item_lens),
            packed("I", getattr(args, "state_dim_per_tensor", [])),
            encode_layout(args.layout),
        ]
        for bootstrap_info in self.bootstrap_infos:
            sock, lock = self._connect_to_bootstrap_server(bootstrap_info)
            with lock:
                sock.send_multipart(frames)


class MooncakeKVBootstrapServer(CommonKVBootstrapServer):
    takes_aborts = True
