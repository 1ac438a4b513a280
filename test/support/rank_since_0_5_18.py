"""What the ranks of all releases after 0.5.9 share."""

import weakref
from types import SimpleNamespace

import numpy as np
from rank_base import RankBase
from rank_contents import AUX_SLOTS, decode_slot
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.utils import KVClassType
from sglang.srt.server_args import ServerArgs

from pd_harness.polling import wait_until
from pd_harness.ports import HOST

DEFERRED_SECONDS = 40  # longer than decode keeps an aborted request's pages


class LaterRank(RankBase):
    """A rank of a release after 0.5.9; `slots` has the metadata slot of each receiver."""

    def __init__(self, config: dict):
        self.slots = weakref.WeakKeyDictionary()
        super().__init__(config)

    def _queue_attributes(self) -> dict:
        return {"enable_staging": False}

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
        self.aux.bootstrap_room[slot] = 0
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

    def _metadata_message(self, receiver, room: int, pages: list[int]) -> None:
        receiver.send_metadata(np.array(pages, dtype=np.int32), decode_slot(room), None)

    def _send_further_messages(self, room: int, sent: list[list[bytes]]) -> None:
        """Adds to `sent` what prefill sends to decode beside statuses; see `_messages_to_decode`.

        `_send_multipart_locked` must add to it, too.
        """
        manager = self.manager
        if hasattr(manager, "arrived_units"):  # stock has none
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

    def _drop_room(self, room: int) -> None:
        for name in self.ROOM_TABLES:
            if (table := self._table(name)) is not None:
                table.pop(room, None)
        if self.is_prefill:
            self.manager.failures.rooms_without_sender.pop(room, None)

    def _state(self, room, pages):
        state = super()._state(room, pages)
        return None if state is None else [state]  # one kind of state


def server_args(config: dict) -> ServerArgs:
    """Returns the arguments of this process's server, with no model."""
    return ServerArgs(
        model_path="dummy",
        host=HOST,
        device=config["device"],
        tp_size=config["tp_size"],
        pp_size=config["pp_size"],
        page_size=config["page_size"],
        disaggregation_mode=config["role"],
        disaggregation_transfer_backend=config["backend"],
        disaggregation_bootstrap_port=config["bootstrap_port"],
        enable_metrics=True,  # shown if PROMETHEUS_MULTIPROC_DIR names a folder
    )
