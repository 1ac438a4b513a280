"""One prefill or decode rank of a release from 0.5.20 on; `rank_0_5_9` is for 0.5.9.

In these releases a rank reads its TP and PP rank and its configuration from the engine's runtime
context.
"""

import contextlib
import json
import weakref
from types import SimpleNamespace

import numpy as np
import rank_process
import torch.distributed as dist
from rank_base import POLL_INTERVAL, RankBase, failure
from rank_contents import AUX_SLOTS, decode_slot
from rank_deferred_releases import DeferredReleases
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.utils import KVClassType
from sglang.srt.managers.disagg_service import start_disagg_service
from sglang.srt.runtime_context import SpawnRanks, get_parallel, publish
from sglang.srt.server_args import ServerArgs

from pd_harness.polling import wait_until
from pd_harness.ports import HOST

DEFERRED_SECONDS = 40  # longer than the engine defers the release of pages


class Rank(RankBase):
    """A rank of a release from 0.5.20 on."""

    # Without `_deferred_ack_poisoned_rooms`, in which a room that failed in mid-transfer stays
    # until its id is reused.
    ROOM_TABLES = (
        *("request_status", "failure_records", "transfer_infos", "req_to_decode_prefix_len"),
        *("required_prefill_response_num_table", "prefill_response_tracker"),
        *("addr_to_rooms_tracker", "sent_pages", "arrived_digests", "arrived_units"),
        *("_deferred_ack_targets", "_deferred_abort_ack_tracker"),
    )
    METADATA = {"max_sampling_mask_tokens": 16}

    def _enter_engine(self) -> None:
        c = self.config
        world_rank = c.pp_rank * c.tp_size + c.tp_rank
        self.server_args = published(vars(c), SpawnRanks(world_rank=world_rank, gpu_id=c.gpu_id))
        self.slots = weakref.WeakKeyDictionary()  # metadata slot of each receiver
        get_parallel().override_permanently(pp_group=Stages(c))

    def _queue_attributes(self) -> dict:
        return {"enable_staging": False}

    def _scheduler_attributes(self) -> dict:
        return {"server_args": self.server_args, "rust_server": None, "enable_hisparse": False}

    def _sender(self, room: int):
        return self._class(KVClassType.SENDER)(self.manager, self.bootstrap_address, room)

    def _receiver(self, room: int):
        address, known = self.bootstrap_address, self.manager.try_ensure_parallel_info
        receiver = self._class(KVClassType.RECEIVER)(self.manager, address, room)
        if wait_until(lambda: known(address), self.PREFILL_SECONDS, self.PREFILL_POLL_SECONDS):
            receiver.init(0)
        else:
            receiver.abort()
        return receiver

    def _send_metadata(self, receiver, pages, slot, state) -> None:
        if receiver.poll() != KVPoll.WaitingForInput:
            return  # the engine allocates nothing for it
        self.slots[receiver] = slot
        self.aux.clear_slot(slot)
        receiver.send_metadata(np.array(pages, dtype=np.int32), slot, state)

    def _poll(self, poller) -> int:
        """Polls; on decode, success also requires that the metadata has arrived."""
        state = super()._poll(poller)
        slot = self.slots.get(poller)
        if state == KVPoll.Success and slot is not None and not self.aux.bootstrap_room[slot, 0]:
            return KVPoll.Transferring
        return state

    def _await(self, poller, seconds, leave_at=None):
        end = super()._await(poller, seconds, leave_at)
        if end["state"] == "hang" and poller in self.slots and poller.poll() == KVPoll.Success:
            return {"state": "no metadata"}
        return end

    def _failed(self, poller) -> dict:
        """Returns a failed room's end; on decode, waits until its pages are released."""
        end = failure(poller)
        if not self.is_prefill and hasattr(poller, "bootstrap_infos"):
            deferred = DeferredReleases()
            deferred.defer(poller, self.group)
            wait_until(lambda: deferred.is_empty(self.group), DEFERRED_SECONDS, POLL_INTERVAL)
        return end

    def _leave_unsent(self, sender) -> str:
        sender.abort()
        return "left"

    def _messages_to_prefill(self, room: int, pages: list[int]) -> list[list[bytes]]:
        sent: list[list[bytes]] = []
        sock = SimpleNamespace(send_multipart=sent.append)
        receiver = self._receiver(room)
        receiver._connect_to_bootstrap_server = lambda info: (sock, contextlib.nullcontext())
        receiver._send_abort_notification()
        receiver._register_kv_args()
        receiver.send_metadata(np.array(pages, dtype=np.int32), decode_slot(room), None)
        receiver._send_abort_notification()
        self.manager.clear_deferred_abort_state(room)
        receiver.clear()
        not_opened, *others = sent
        return [*others, not_opened]

    def _messages_to_decode(self, room: int) -> list[list[bytes]]:
        manager, sent = self.manager, []
        manager._send_multipart_locked = lambda endpoint, frames, **_: sent.append(frames)
        for status, reason in ((KVPoll.Success, None), (KVPoll.Failed, "no memory")):
            manager.send_kv_status_message(
                targets=[(HOST, 0)], bootstrap_room=room, status=status, failure_reason=reason
            )
        if hasattr(manager, "arrived_units"):
            from sglang.srt.disaggregation.pd.unit_exchange import units_message

            sent.append(units_message(room, 0, 2, [(0, 3), (3, 4)]))
        if hasattr(manager, "send_aux_tcp"):
            session, info = next(iter(manager.decode_kv_args_table.items()))
            peer = SimpleNamespace(
                room=room,
                endpoint=HOST,
                dst_port=0,
                mooncake_session_id=session,
                dst_aux_index=decode_slot(room),
            )
            manager.send_aux_tcp(peer, room % AUX_SLOTS, info.dst_aux_ptrs)
        del manager._send_multipart_locked
        return sent

    def _drop_room(self, room: int) -> None:
        for name in self.ROOM_TABLES:
            if (table := self._table(name)) is not None:
                table.pop(room, None)
        if self.is_prefill:
            self.manager.failures.rooms_without_sender.pop(room, None)

    def _table(self, name):
        table = super()._table(name)
        return getattr(table, "_local_map", table)  # pipeline stages share some tables

    def _state(self, room, pages):
        state = super()._state(room, pages)
        return None if state is None else [state]  # one kind of state


class Stages:
    """Stands in for the engine's group of pipeline stages of one TP rank."""

    def __init__(self, c: SimpleNamespace):
        self.world_size, self.rank_in_group = c.pp_size, c.pp_rank
        self.is_last_rank = c.pp_rank == c.pp_size - 1
        self.store = c.stages_port and dist.TCPStore(HOST, c.stages_port, is_master=c.pp_rank == 0)

    def broadcast_object(self, thing, src: int):
        """Broadcasts an object from stage `src`; the engine sends the first stage's address."""
        if self.rank_in_group == src:
            self.store.set("thing", json.dumps(thing))
        return json.loads(self.store.get("thing"))


def published(config: dict, ranks: SpawnRanks | None = None) -> ServerArgs:
    """Publishes this process's configuration, as a server does, and returns it."""
    args = ServerArgs(
        model_path="dummy",
        host=HOST,
        device=config["device"],
        tp_size=config["tp_size"],
        pp_size=config["pp_size"],
        page_size=config["page_size"],
        disaggregation_mode=config["role"],
        disaggregation_transfer_backend=config["backend"],
        disaggregation_bootstrap_port=config["bootstrap_port"],
    )
    publish(args, role="scheduler", ranks=ranks)
    return args


def bootstrap(config: dict):
    """Starts what a prefill server starts: the bootstrap server, and MemFabric's store."""
    published(config)
    return start_disagg_service()


if __name__ == "__main__":
    rank_process.main({"start": Rank, "bootstrap": bootstrap})
