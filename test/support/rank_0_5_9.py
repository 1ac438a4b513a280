"""One prefill or decode rank of 0.5.9 with the engine's real pools and KV manager, and no model.

Buffers are on the device that the configuration names. The module runs in the Python of the stock
or the patched engine; see `rank_process`.
"""

import uuid
from functools import partial
from types import SimpleNamespace

import numpy as np
import rank_process
from rank_base import RankBase
from rank_contents import AUX_SLOTS, decode_slot
from sglang.srt.disaggregation import prefill as prefill_module
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.utils import KVClassType, ReqToMetadataIdxAllocator
from sglang.srt.distributed import parallel_state
from sglang.srt.layers import dp_attention
from sglang.srt.managers.disagg_service import start_disagg_service

from pd_harness.polling import wait_until
from pd_harness.ports import HOST


class Rank(RankBase):
    """A rank of 0.5.9."""

    ROOM_TABLES = (
        *("request_status", "failure_records", "transfer_infos", "transfer_statuses"),
        *("required_prefill_response_num_table", "prefill_response_tracker"),
        *("addr_to_rooms_tracker", "requested_rooms", "failing_rooms", "arrived_units"),
        *("arrived_digests", "sent_pages"),
    )

    def _enter_engine(self) -> None:
        c = self.config
        parallel_state._ATTN_TP = SimpleNamespace(rank_in_group=c.tp_rank, world_size=c.tp_size)
        parallel_state._PP = SimpleNamespace(rank_in_group=c.pp_rank, world_size=c.pp_size)
        dp_attention._ATTN_DP_RANK, dp_attention._ATTN_DP_SIZE = 0, 1

    def _queue_attributes(self) -> dict:
        c = self.config
        return {
            "tp_size": c.tp_size,
            "prefill_pp_size": c.prefill_pp_size,
            "decode_tp_size": c.decode_tp_size,
            "decode_dp_size": 1,
        }

    def _make_manager(self):
        """Makes the manager; failed writes settle at once, so decode is notified without delay.

        Injected faults leave no write running.
        """
        manager = super()._make_manager()
        if hasattr(manager, "unsettled_seconds"):  # stock has none
            from sglang.srt.disaggregation.pd import nixl_transfers

            manager.unsettled_seconds = nixl_transfers.UNREADABLE_SECONDS = 0.0
        return manager

    def _scheduler_attributes(self) -> dict:
        server_args = SimpleNamespace(
            host=HOST,
            port=30000,
            disaggregation_bootstrap_port=self.config.bootstrap_port,
            disaggregation_ib_device=None,
            dist_init_addr=None,
            enable_dp_attention=False,
            dp_size=1,
            pp_size=self.config.pp_size,
        )
        return {"dp_rank": None, "server_args": server_args}

    def _send_metadata(self, receiver, pages, slot, state) -> None:
        receiver.init(np.array(pages, dtype=np.int32), slot, state)

    def _sender(self, room: int):
        return self._class(KVClassType.SENDER)(
            mgr=self.manager,
            bootstrap_addr=self.bootstrap_address,
            bootstrap_room=room,
            dest_tp_ranks=[self.config.tp_rank],
            pp_rank=self.config.pp_rank,
        )

    def _leave_unsent(self, sender) -> str:
        allocator = ReqToMetadataIdxAllocator(0)
        req = SimpleNamespace(disagg_kv_sender=sender, metadata_buffer_index=3)
        prefill_module.release_req_to_metadata_buffer(req, allocator)
        return "left" if list(allocator.free_slots) == [3] else "left its slot behind"

    def _receiver(self, room: int):
        receiver = self._class(KVClassType.RECEIVER)(
            mgr=self.manager,
            bootstrap_addr=self.bootstrap_address,
            bootstrap_room=room,
            prefill_dp_rank=0,
        )
        # The engine's queue, too, allocates nothing before it has found prefill.
        wait_until(
            lambda: receiver.poll() != KVPoll.Bootstrapping,
            self.PREFILL_SECONDS,
            self.PREFILL_POLL_SECONDS,
        )
        return receiver

    def is_aborted_before_request(self, room: int) -> bool:
        """Returns whether decode aborted this room before its request reached prefill."""
        return room in self.manager.aborted_before_request

    def register_decode_ranks(self, count: int) -> None:
        """Registers this rank with prefill `count` more times, as new decode servers would.

        Each registration has a new name and port, and opens no room.
        """
        manager, agent = self.manager, self.manager.agent
        port = manager.rank_port
        receiver = self._receiver(0)
        metadata = agent.get_agent_metadata()
        for number in range(count):
            manager.rank_port = number + 1
            name = str(uuid.uuid4())
            renamed = metadata.replace(agent.name.encode(), name.encode())
            manager.agent = SimpleNamespace(name=name, get_agent_metadata=partial(bytes, renamed))
            receiver._register_kv_args()
        manager.agent, manager.rank_port = agent, port
        receiver.clear()

    def _messages_to_prefill(self, room: int, pages: list[int]) -> list[list[bytes]]:
        sent, sock = recording_socket()
        receiver = self._receiver(room)
        receiver._socket = lambda info: sock
        not_opened = receiver._abort_frames("no time")
        receiver._register_kv_args()
        receiver.init(np.array(pages, dtype=np.int32), decode_slot(room), None)
        for frames in (receiver._abort_frames("no time"), not_opened):
            receiver._send_to_prefill(receiver.bootstrap_infos[0], frames)
        receiver.clear()
        return sent

    def _messages_to_decode(self, room: int) -> list[list[bytes]]:
        manager, (sent, sock) = self.manager, recording_socket()
        session = next(iter(manager.decode_kv_args_table))
        peer = SimpleNamespace(
            room=room,
            endpoint=HOST,
            dst_port=0,
            mooncake_session_id=session,
            dst_aux_index=decode_slot(room),
            digests=None,
            units=[],
        )
        manager._connect = lambda *_, **__: sock
        manager._send_status(peer, KVPoll.Success, "")
        manager._send_status(peer, KVPoll.Failed, "no memory")
        peer.digests, peer.units = b"digests", [(0, 3), (3, 4)]
        manager._send_status(peer, KVPoll.Success, "")
        pointers = manager.decode_kv_args_table[session].dst_aux_ptrs
        manager.send_aux_tcp(peer, room % AUX_SLOTS, pointers)
        del manager._connect
        return sent

    def _drop_room(self, room: int) -> None:
        self.manager.drop_room(room)

    def expect_status(self, room: int) -> None:
        if not self.is_prefill:
            self.manager.requested_rooms.add(room)
        super().expect_status(room)


def recording_socket() -> tuple[list[list[bytes]], SimpleNamespace]:
    """Returns a list, and a socket that appends messages to it instead of sending them."""
    sent: list[list[bytes]] = []
    return sent, SimpleNamespace(send_multipart=lambda frames, flags=0: sent.append(frames))


def bootstrap(config: dict):
    """Starts what a prefill server starts: the bootstrap server, and MemFabric's store."""
    return start_disagg_service(
        SimpleNamespace(
            disaggregation_mode="prefill",
            disaggregation_transfer_backend=config["backend"],
            host=HOST,
            disaggregation_bootstrap_port=config["bootstrap_port"],
            node_rank=0,
        )
    )


if __name__ == "__main__":
    rank_process.main({"start": Rank, "bootstrap": bootstrap})
