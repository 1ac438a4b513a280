"""One prefill or decode rank of 0.5.9 with the engine's real pools and KV manager, and no model.

Buffers lie on the device that its configuration names. Runs under the Python of the stock or the
patched engine; `rank_process` says how.
"""

import os
import time
import uuid
from functools import partial
from types import SimpleNamespace

import numpy as np
import rank_process
from rank_base import AUX_SLOTS, HOST, PAUSE, RankBase, failure
from rank_faults import fail_once
from sglang.srt.disaggregation import prefill as prefill_module
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.utils import (
    KVClassType,
    ReqToMetadataIdxAllocator,
    poll_and_all_reduce,
)
from sglang.srt.distributed import parallel_state
from sglang.srt.layers import dp_attention
from sglang.srt.managers.disagg_service import start_disagg_service

from pd_harness.waiting import awaited

try:
    from sglang.srt.disaggregation.pd import messages
except ImportError:  # stock has none
    messages = None


class Rank(RankBase):
    """A rank of 0.5.9."""

    TABLES = (
        *("request_status", "failure_records", "transfer_infos", "transfer_statuses"),
        *("required_prefill_response_num_table", "prefill_response_tracker"),
        *("addr_to_rooms_tracker", "asked_rooms", "failing_rooms", "arrived_digests", "sent_pages"),
    )

    def _enter_engine(self) -> None:
        c = self.config
        parallel_state._ATTN_TP = SimpleNamespace(rank_in_group=c.tp_rank, world_size=c.tp_size)
        parallel_state._PP = SimpleNamespace(rank_in_group=c.pp_rank, world_size=c.pp_size)
        dp_attention._ATTN_DP_RANK, dp_attention._ATTN_DP_SIZE = 0, 1

    def _queue(self) -> dict:
        c = self.config
        return {
            "tp_size": c.tp_size,
            "prefill_pp_size": c.prefill_pp_size,
            "decode_tp_size": c.decode_tp_size,
            "decode_dp_size": 1,
        }

    def _scheduler(self) -> dict:
        server_args = SimpleNamespace(
            host=HOST,
            disaggregation_bootstrap_port=self.config.bootstrap_port,
            disaggregation_ib_device=None,
            dist_init_addr=None,
            enable_dp_attention=False,
            dp_size=1,
            pp_size=self.config.pp_size,
        )
        return {"dp_rank": None, "server_args": server_args}

    def _set_aside(self, receiver, pages, slot, state) -> None:
        receiver.init(np.array(pages, dtype=np.int32), slot, state)

    def _state_buffers(self):
        args = self.manager.kv_args
        return args.state_data_ptrs, args.state_data_lens

    def _peer_sockets(self) -> int:
        return len(messages.PeerSocket._open) if messages else 0

    def _sender(self, room: int):
        return self._class(KVClassType.SENDER)(
            mgr=self.manager,
            bootstrap_addr=f"{HOST}:{self.config.bootstrap_port}",
            bootstrap_room=room,
            dest_tp_ranks=[self.config.tp_rank],
            pp_rank=self.config.pp_rank,
        )

    def leave(self, room: int, state: str, seconds: float) -> dict:
        """A request that leaves prefill's queue unsent, once it has this state.

        The scheduler frees its metadata slot, and says nothing to its sender.
        """
        sender = self._sender(room)
        wanted = {"waiting": KVPoll.WaitingForInput, "failed": KVPoll.Failed}[state]
        if not awaited(lambda: sender.poll() == wanted, seconds, PAUSE):
            return {"state": "hang"}
        allocator = ReqToMetadataIdxAllocator(0)
        req = SimpleNamespace(disagg_kv_sender=sender, metadata_buffer_index=3)
        prefill_module.release_req_to_metadata_buffer(req, allocator)
        return {"state": "left", "slots": list(allocator.free_slots)}

    def _state(self, room: int, pages: list[int]) -> np.ndarray | None:
        slots = self._state_slots(room, pages)
        return None if slots is None else np.array(slots, dtype=np.int32)

    def lose(self, rooms: list[int], knows: bool) -> dict:
        """The prefill server of these rooms is lost, which another rank may know first.

        Polls all of them in turns, as a scheduler does, until they have failed. `longest` is the
        longest turn in seconds.
        """
        receivers = [self.asked.pop(room) for room in rooms]
        if knows:
            self.manager._handle_node_failure(f"{HOST}:{self.config.bootstrap_port}")
        longest, failed = 0.0, 0
        while receivers:
            begun = time.monotonic()
            polls = poll_and_all_reduce(receivers, self.group)
            ended = [one for one, poll in zip(receivers, polls) if poll == KVPoll.Failed]
            for receiver in ended:
                failed += failure(receiver)["state"] == "failed"
                receivers.remove(receiver)
            longest = max(longest, time.monotonic() - begun)
            time.sleep(0.002)
        return {"failed": failed, "longest": longest}

    def _receiver(self, room: int):
        return self._class(KVClassType.RECEIVER)(
            mgr=self.manager,
            bootstrap_addr=f"{HOST}:{self.config.bootstrap_port}",
            bootstrap_room=room,
            prefill_dp_rank=0,
        )

    def fail_once(self, what: str) -> dict:
        """See `rank_faults.fail_once`."""
        fail_once(self.manager, what)
        return {"state": "planned"}

    def knows_aborted(self, room: int) -> bool:
        """Whether decode gave up this room, of which no request has come to prefill."""
        return room in self.manager.aborted_early

    def forget_idle_sockets(self, seconds: float) -> dict:
        """Let those be closed that were unused for so long, instead of a minute."""
        messages.IDLE_SECONDS = seconds
        return {"state": "set"}

    def back_off(self, seconds: float) -> dict:
        """How long Mooncake leaves a failing peer alone at first."""
        from sglang.srt.disaggregation.pd import back_off

        back_off.BACK_OFF_SECONDS = seconds
        return {"state": "set"}

    def join(self, count: int) -> dict:
        """Register so many more decode ranks with prefill, as new servers do, and one's like.

        They are this rank under other names, none of which asks for a room.
        """
        manager, agent = self.manager, self.manager.agent
        receiver = self._receiver(0)
        metadata = agent.get_agent_metadata()
        for _ in range(count):
            name = str(uuid.uuid4())
            renamed = metadata.replace(agent.name.encode(), name.encode())
            manager.agent = SimpleNamespace(name=name, get_agent_metadata=partial(bytes, renamed))
            receiver._register_kv_args()
        manager.agent = agent
        receiver.clear()
        return {"state": "joined"}

    def messages(self, room: int, pages: list[int]) -> list[list[str]]:
        """What this rank would send for a room, each frame in hexadecimal; nobody gets it."""
        sent: list[list[str]] = []
        sock = SimpleNamespace(
            send_multipart=lambda frames, flags=0: sent.append([bytes(f).hex() for f in frames])
        )
        if self.is_prefill:
            self._tell_decode(room, sock)
        else:
            self._tell_prefill(room, pages, sock)
        return sent

    def _tell_prefill(self, room: int, pages: list[int], sock) -> None:
        """A registration, an open room, and ABORTs of a room that was opened and that was not."""
        receiver = self._receiver(room)
        receiver._socket = lambda info: sock
        not_opened = receiver._abort_frames("no time")
        receiver._register_kv_args()
        receiver.init(np.array(pages, dtype=np.int32), room % AUX_SLOTS, None)
        for frames in (receiver._abort_frames("no time"), not_opened):
            receiver._tell_prefill(receiver.bootstrap_infos[0], frames)
        receiver.clear()

    def _tell_decode(self, room: int, sock) -> None:
        """Mooncake: the room's end, good and bad, and its metadata."""
        manager = self.manager
        session = next(iter(manager.decode_kv_args_table))
        peer = SimpleNamespace(
            room=room,
            endpoint=HOST,
            dst_port=0,
            mooncake_session_id=session,
            dst_aux_index=room % AUX_SLOTS,
        )
        manager._connect = lambda *_, **__: sock
        manager._send_status(peer, KVPoll.Success, "")
        manager._send_status(peer, KVPoll.Failed, "no memory")
        pointers = manager.decode_kv_args_table[session].dst_aux_ptrs
        manager.send_aux_tcp(peer, room % AUX_SLOTS, pointers)
        del manager._connect

    def expect(self, room: int) -> dict:
        """Open a room that a message is to end."""
        self.manager.update_status(room, KVPoll.Bootstrapping)
        if not self.is_prefill:
            self.manager.required_prefill_response_num_table[room] = 1
            self.manager.asked_rooms.add(room)
        return {"state": "open"}

    def await_end(self, room: int, seconds: float) -> dict:
        """Wait for that message, with which all that its sender sent before has been read."""
        over = (KVPoll.Success, KVPoll.Failed)
        if not awaited(lambda: self.manager.check_status(room) in over, seconds, PAUSE):
            return {"state": "hang"}
        self.manager.forget(room)
        return {"state": "ended"}


def bootstrap(config: dict):
    """What a prefill server starts: the bootstrap server, and for MemFabric its store."""
    os.environ.update(config["environment"], ASCEND_MF_STORE_URL=config["store"])
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
