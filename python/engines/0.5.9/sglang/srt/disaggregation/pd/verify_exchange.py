"""`SGLANG_PD_VERIFY`: prefill's last message for a room carries digests of the pages it sent.

prefill                                  decode
each chunk is noted
digests ride with the room's end    ->   stored by prefill rank; once all has arrived, compared:
                                         `pd.verify`
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence

import numpy as np
import numpy.typing as npt
from sglang.srt.disaggregation.pd.peers import PeerRegistration
from sglang.srt.disaggregation.pd.per_instance import PerInstance
from sglang.srt.disaggregation.pd.verify import Chunk, Verifier


class VerifyingManager:
    """Base of a KV manager; its `verifier`, from `KVArgs`, is None if nothing is compared."""

    # By room: on prefill its chunks, on decode its digests by prefill rank.
    sent_pages: dict[int, list[Chunk]] = PerInstance(lambda: defaultdict(list))
    arrived_digests: dict[int, dict[Hashable, bytes]] = PerInstance(lambda: defaultdict(dict))

    @property
    def verifier(self) -> Verifier | None:
        return getattr(getattr(self, "kv_args", None), "verifier", None)

    def note_chunk(self, room: int, index_slice: slice, pages: npt.NDArray[np.int32]) -> None:
        """Prefill: notes that these pages, the request's `index_slice`, are being sent."""
        if self.verifier is not None:
            with self.rooms_lock:
                if room in self.request_status:  # otherwise the entry would never be dropped
                    self.sent_pages[room].append((index_slice, pages))

    def room_digests(
        self, room: int, info: PeerRegistration, state_pages: Sequence[int] | None
    ) -> bytes | None:
        """Prefill: digests of all that the room sent to a decode rank; None if it expects none.

        Args:
            info: The decode rank's registration.
        """
        if self.verifier is None or info.plan is None or not info.plan.layout.verifies:
            return None
        peer, chunks = info.plan.layout, self.sent_pages.get(room, [])
        return self.verifier.digests(room, chunks, peer, state_pages, self.sends_state_by_plan)

    def drop_digests(self, room: int) -> None:
        """Drops the chunks and digests of a room that has ended."""
        self.arrived_digests.pop(room, None)
        self.sent_pages.pop(room, None)

    def verify(
        self,
        room: int,
        address: str,
        pages: npt.NDArray[np.int32],
        state_pages: Sequence[int] | None,
        seconds: float,
    ) -> str | None:
        """Decode: compares a room's KV with prefill's; returns why the room fails, or None.

        Args:
            address: The prefill server's bootstrap address.
            seconds: Duration of the room's transfer.
        """
        frames, reports = self.arrived_digests[room].values(), self.verifier.reports
        with reports.lock:
            report = reports.report_for(address, f"{self.local_ip}:{self.rank_port}")
            before = report.failed
            reason = self.verifier.compare(room, frames, pages, state_pages, report, seconds)
            reports.mark_changed(address)
            self.note_verified(address, report.failed > before)
        return reason
