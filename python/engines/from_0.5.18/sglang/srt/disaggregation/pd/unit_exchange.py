"""Prefill names to decode which chunks it has sent as whole rows; decode interleaves these.

prefill                                            decode
all chunks written
(PD_UNITS, room, prefill rank, TP size, chunks) -> stored
the engine's status                             -> the room is done; the receiver's next polls
                                                   interleave (`pd.interleaving`), then succeed
"""

from __future__ import annotations

import logging
from collections.abc import Container, Iterable

from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.kv_layout import (
    LayoutError,
    Unit,
    agreed_units,
    decode_units,
    encode_units,
)
from sglang.srt.disaggregation.pd.interleaving import InterleavingJob

logger = logging.getLogger(__name__)

UNITS = b"PD_UNITS"
MAX_TP_SIZE = 1 << 12  # of a server; a larger number is not one


def units_message(room: int, sender: int, tp_size: int, units: Iterable[Unit]) -> list[bytes]:
    """Returns the frames that name what prefill rank `sender` has sent as whole rows."""
    return [UNITS, b"%d" % room, b"%d" % sender, b"%d" % tp_size, encode_units(units)]


class UnitInbox(dict[int, dict[int, tuple[int, list[Unit]]]]):
    """Decode: prefill's TP size and the chunks, by open room and by prefill rank."""

    def store(self, frames: list[bytes], open_rooms: Container[int]) -> bool:
        """Stores the chunks in a message; returns whether it has any.

        Raises:
            ValueError or IndexError: The message is invalid.
        """
        if frames[0] != UNITS:
            return False
        room, sender, tp_size = (int(frame) for frame in frames[1:4])
        units = decode_units(frames[4])
        if not 0 < tp_size <= MAX_TP_SIZE:
            raise ValueError(f"prefill TP size {tp_size}, expected 1 to {MAX_TP_SIZE}")
        if room in open_rooms:  # else the room is over
            self.setdefault(room, {})[sender] = (tp_size, units)
        return True


class InterleavingReceiver:
    """Base of a decode rank's KV receiver, before the engine's: interleaves what has arrived."""

    # Pages and state pages that were requested.
    requested_pages: tuple | None = None
    interleaving: InterleavingJob | None = None

    def send_metadata(self, kv_indices, aux_index=None, state_indices=None, *more, **options):
        """Sends the metadata. Extends the engine's: notes the pages, which may be interleaved."""
        self.requested_pages = (kv_indices, state_indices[0] if state_indices else None)
        self.kv_mgr.note_requested(self.bootstrap_room, self.bootstrap_addr)
        return super().send_metadata(kv_indices, aux_index, state_indices, *more, **options)

    def poll(self) -> KVPoll:
        """Returns the status. Extends the engine's: `Success` once the pages may be read."""
        status = super().poll()
        if status != KVPoll.Success or self.requested_pages is None:
            return status
        try:
            if self.interleaving is None:
                self.interleaving = self._start_interleaving(*self.requested_pages)
                if self.interleaving is not None:
                    self.kv_mgr.transfer_log.entered(self.bootstrap_room, "interleaving")
            if self.interleaving is not None and not self.interleaving.is_done():
                return KVPoll.Transferring
        except Exception as error:
            if not isinstance(error, LayoutError):
                logger.exception(f"Room {self.bootstrap_room}: KV heads could not be interleaved")
            self.kv_mgr.record_failure(
                self.bootstrap_room, f"decode could not interleave KV heads: {error}"
            )
            self.kv_mgr.update_status(self.bootstrap_room, KVPoll.Failed)
            self.conclude_state = KVPoll.Failed
            return KVPoll.Failed
        self.requested_pages = self.interleaving = None
        self.kv_mgr.transfer_log.entered(self.bootstrap_room, "queued")
        return status

    def _start_interleaving(self, pages, state_pages) -> InterleavingJob | None:
        manager = self.kv_mgr
        arrived = manager.arrived_units.pop(self.bootstrap_room, {})
        senders = self.required_prefill_response_num
        if self._expects_units() and len(arrived) != senders:
            raise LayoutError(
                f"{len(arrived)} of {senders} prefill ranks named the chunks to interleave: a "
                "message was lost with a connection; send the request again"
            )
        units = agreed_units([units for _, units in arrived.values()], senders, len(pages))
        tp_size = self.prefill_info.attn_tp_size
        if others := {size for size, _ in arrived.values()} - {tp_size}:
            raise LayoutError(
                f"prefill ranks report TP size {sorted(others)}, but their server registered "
                f"{tp_size}: another server has its address; send the request again"
            )
        if not units:
            return None
        state = state_pages if manager.layout.state else None
        return manager.interleaver.start(tp_size, units, pages, state)

    def _expects_units(self) -> bool:
        """Whether each prefill rank names the chunks to interleave, even if there are none."""
        layout, infos = self.kv_mgr.layout, getattr(self, "bootstrap_infos", None) or ()
        senders = [info for info in infos if not info["is_dummy"]]
        if layout is None or not layout.whole_rows or not senders:
            return False
        if not all(info.get("names_units") for info in senders):
            return False
        return self.prefill_info.attn_tp_size > layout.tp_size

    def abort(self):
        """Aborts the request. Extends the engine's: has the thread stop, but does not wait."""
        if self.interleaving is not None:
            self.interleaving.is_cancelled = True
        super().abort()

    def stop_interleaving(self) -> None:
        """Returns once no thread writes to the request's pages."""
        if self.interleaving is not None:
            self.interleaving.cancel()
