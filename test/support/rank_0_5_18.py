"""One prefill or decode rank of 0.5.18; other releases have their own modules.

A rank reads its configuration from the engine's runtime context, and its TP and PP rank from the
engine's process groups, for which the context has overrides.
"""

import contextlib
from types import SimpleNamespace
from unittest import mock

import rank_process
from rank_base import failure
from rank_since_0_5_18 import DEFERRED_SECONDS, LaterRank, server_args
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.utils import KVClassType
from sglang.srt.distributed import parallel_state
from sglang.srt.layers import dp_attention
from sglang.srt.managers.disagg_service import start_disagg_service
from sglang.srt.runtime_context import get_parallel, publish
from sglang.srt.server_args import ServerArgs

from pd_harness.ports import HOST

try:
    from sglang.srt.disaggregation.pd import held_pages
except ImportError:  # stock has none
    held_pages = None


class Rank(LaterRank):
    """A rank of 0.5.18."""

    # Without `_deferred_ack_poisoned_rooms`, in which a room that failed in mid-transfer stays
    # until its id is reused.
    ROOM_TABLES = (
        *("request_status", "failure_records", "transfer_infos", "req_to_decode_prefix_len"),
        *("required_prefill_response_num_table", "prefill_response_tracker"),
        *("addr_to_rooms_tracker", "sent_pages", "arrived_digests", "arrived_units"),
        *("exceptions", "transfer_statuses", "requested_ranks", "acks"),
        *("ack_targets", "late_notices", "writing"),
    )

    def _enter_engine(self) -> None:
        c = self.config
        self.server_args = published(vars(c))
        parallel_state._PP = SimpleNamespace(
            rank_in_group=c.pp_rank, world_size=c.pp_size, is_last_rank=c.pp_rank == c.pp_size - 1
        )
        dp_attention._ATTN_DP_RANK, dp_attention._ATTN_DP_SIZE = 0, 1
        ranks = {
            **{"tp_rank": c.tp_rank, "attn_tp_rank": c.tp_rank, "pp_rank": c.pp_rank},
            **dict.fromkeys(("attn_cp_rank", "dcp_rank", "attn_dcp_rank", "attn_dp_rank"), 0),
        }
        sizes = {
            **{"tp_size": c.tp_size, "attn_tp_size": c.tp_size, "pp_size": c.pp_size},
            **dict.fromkeys(("attn_cp_size", "dcp_size", "attn_dcp_size", "attn_dp_size"), 1),
        }
        self.overrides = contextlib.ExitStack()  # for the life of this process
        self.overrides.enter_context(get_parallel().override(**ranks, **sizes, dcp_enabled=False))

    def _scheduler_attributes(self) -> dict:
        place = SimpleNamespace(dp_rank=None, gpu_id=self.config.gpu_id)
        return {"server_args": self.server_args, "ps": place, "enable_hisparse": False}

    def _sender(self, room: int):
        return self._class(KVClassType.SENDER)(
            mgr=self.manager,
            bootstrap_addr=self.bootstrap_address,
            bootstrap_room=room,
            dest_tp_ranks=[self.config.tp_rank],
            pp_rank=self.config.pp_rank,
        )

    def _poll(self, poller) -> int:
        """Polls; a failed room whose pages decode holds is still transferring.

        With a group of TP ranks, the engine's poll holds them itself.
        """
        state = super()._poll(poller)
        if state == KVPoll.Failed and self.group is None and hasattr(poller, "is_held"):
            return KVPoll.Transferring if poller.is_held() else state
        return state

    def _await(self, poller, seconds, leave_at=None):
        end = super()._await(poller, seconds, leave_at)
        if end["state"] == "hang" and getattr(poller, "held_until", None) is not None:
            return super()._await(poller, DEFERRED_SECONDS, leave_at)
        return end

    def _failed(self, poller) -> dict:
        """Returns a failed room's end; decode's scheduler then clears the room."""
        end = failure(poller)
        if not self.is_prefill:
            poller.clear()
        return end

    def _leave_unsent(self, sender) -> str:
        return "left"  # the scheduler only forgets a request that decode has requested

    def _messages_to_prefill(self, room: int, pages: list[int]) -> list[list[bytes]]:
        sent: list[list[bytes]] = []
        sock = SimpleNamespace(send_multipart=lambda frames: sent.append(list(frames)))
        receiver = self._receiver(room)
        with self._recorded(receiver, sock):
            receiver._register_kv_args()
            self._metadata_message(receiver, room, pages)
            receiver._send_abort_notification()
            receiver._send_abort_notification()
        receiver.clear()
        return sent

    @staticmethod
    def _recorded(receiver, sock):
        """Returns a context in which this receiver's messages go to `sock`."""
        if held_pages is not None:
            sockets = SimpleNamespace(to=lambda host, port: sock)
            return mock.patch.object(held_pages, "PeerSocket", sockets)
        connection = (sock, contextlib.nullcontext())
        connect = "_connect_to_bootstrap_server"
        return mock.patch.object(receiver, connect, lambda info: connection)

    def _messages_to_decode(self, room: int) -> list[list[bytes]]:
        manager, sent, decode = self.manager, [], (HOST, 0)
        manager._send_multipart_locked = lambda endpoint, frames, *_, **__: sent.append(frames)
        manager.status_readers.add(decode)
        for status, reason in ((KVPoll.Success, None), (KVPoll.Failed, "no memory")):
            manager.send_kv_status_message(
                targets=[decode], bootstrap_room=room, status=status, failure_reason=reason
            )
        manager.status_readers.discard(decode)
        self._send_further_messages(room, sent)
        del manager._send_multipart_locked
        return sent

    def _table(self, name):
        table = super()._table(name)
        return getattr(table, "rooms", table)  # `acks`


def published(config: dict) -> ServerArgs:
    """Publishes this process's configuration, as a server does, and returns it."""
    args = server_args(config)
    publish(args, role="scheduler")
    return args


def bootstrap(config: dict):
    """Starts what a prefill server starts: the bootstrap server, and MemFabric's store."""
    return start_disagg_service(published(config))


if __name__ == "__main__":
    rank_process.main({"start": Rank, "bootstrap": bootstrap})
