"""One prefill or decode rank of 0.5.23; other releases have their own modules.

A rank reads its TP and PP rank and its configuration from the engine's runtime context.
"""

import contextlib
import json
from types import SimpleNamespace

import rank_process
import torch.distributed as dist
from rank_base import POLL_INTERVAL, failure
from rank_deferred_releases import DeferredReleases
from rank_since_0_5_18 import DEFERRED_SECONDS, LaterRank, server_args
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.utils import KVClassType
from sglang.srt.managers.disagg_service import start_disagg_service
from sglang.srt.runtime_context import SpawnRanks, get_parallel, publish
from sglang.srt.server_args import ServerArgs

from pd_harness.polling import wait_until
from pd_harness.ports import HOST


class Rank(LaterRank):
    """A rank of 0.5.23."""

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
        get_parallel().override_permanently(pp_group=Stages(c))

    def _scheduler_attributes(self) -> dict:
        return {"server_args": self.server_args, "rust_server": None, "enable_hisparse": False}

    def _sender(self, room: int):
        return self._class(KVClassType.SENDER)(self.manager, self.bootstrap_address, room)

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
        self._metadata_message(receiver, room, pages)
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
        self._send_further_messages(room, sent)
        del manager._send_multipart_locked
        return sent

    def _table(self, name):
        table = super()._table(name)
        return getattr(table, "_local_map", table)  # pipeline stages share some tables


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
    args = server_args(config)
    publish(args, role="scheduler", ranks=ranks)
    return args


def bootstrap(config: dict):
    """Starts what a prefill server starts: the bootstrap server, and MemFabric's store."""
    published(config)
    return start_disagg_service()


if __name__ == "__main__":
    rank_process.main({"start": Rank, "bootstrap": bootstrap})
