"""`SGLANG_PD_VERIFY`: prefill sends digests of its pages before it reports that a room is done.

prefill                                            decode
each chunk is noted
all chunks written
(PD_DIGESTS, room, prefill rank, digests)     ->   stored
the engine's status                           ->   the room is done; the receiver's next poll
                                                   compares: `pd.verify`
"""

from __future__ import annotations

import logging
import time
from collections.abc import Container, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.kv_layout import PeerPlan, RankLayout, Unit
from sglang.srt.disaggregation.pd.verify import Verifier
from sglang.srt.disaggregation.pd.verify_mode import VARIABLE
from sglang.srt.environ import envs
from sglang.srt.runtime_context import get_disagg

logger = logging.getLogger(__name__)

DIGESTS = b"PD_DIGESTS"
BACKENDS = ("ascend", "mooncake", "nixl")


def require_verifiable(layout: RankLayout | None, why_not: str) -> None:
    """Raises ValueError if pages cannot be compared: a server set to compare must not start.

    Args:
        layout: `KVArgs.layout`.
        why_not: Why it is None.
    """
    disagg = get_disagg()
    backend = disagg.disaggregation_transfer_backend
    reasons = {
        f"unsupported pools ({why_not})": layout is None,
        f"transfer backend {backend}": backend not in BACKENDS,
        "staging buffers (SGLANG_DISAGG_STAGING_BUFFER)": envs.SGLANG_DISAGG_STAGING_BUFFER.get(),
        "--enable-pd-role-switch": getattr(disagg, "enable_pd_role_switch", False),
    }
    found = [reason for reason, holds in reasons.items() if holds]
    if found:
        raise ValueError(f"{VARIABLE} cannot compare KV with {', '.join(found)}; unset it")


@dataclass
class SentPages:
    """Prefill: what a room has queued; decode will interleave it, or get digests of it.

    Attributes:
        interleaving: The decode ranks that must interleave it.
        chunks: Each chunk's place among the request's pages, and its pages of this rank's pool,
            whose numbers may still be on their way to the host.
        state: The last chunk's pages or slots by kind of state; None if it has none.
    """

    interleaving: frozenset[str] = frozenset()
    chunks: list[tuple[slice, npt.ArrayLike]] = field(default_factory=list)
    state: list | None = None

    def note(self, index_slice: slice, pages: npt.ArrayLike, state: list | None) -> None:
        """Notes a chunk that is about to be queued."""
        self.chunks.append((index_slice, pages))
        self.state = state

    @property
    def units(self) -> list[Unit]:
        """Each chunk's place among the request's pages."""
        return [(where.start, where.stop) for where, _ in self.chunks]

    def message(self, room: int, sender: int, verifier: Verifier, plan: PeerPlan) -> list[bytes]:
        """Returns the frames with digests of what a decode rank was sent.

        Args:
            sender: This prefill rank's number, unique in its server.
            plan: The decode rank's.
        """
        state = None if plan.state is None or not self.state else self.state[0]
        chunks = [(where, np.asarray(pages)) for where, pages in self.chunks]
        digests = verifier.digests(room, chunks, plan.layout, state, True)
        return [DIGESTS, b"%d" % room, b"%d" % sender, digests]


class DigestInbox(dict[int, dict[int, bytes]]):
    """Decode: the digests that have arrived, by open room and by prefill rank."""

    def store(self, frames: list[bytes], open_rooms: Container[int]) -> bool:
        """Stores the digests in a message; returns whether it has any.

        Raises:
            ValueError or IndexError: The message is invalid.
        """
        if frames[0] != DIGESTS:
            return False
        room, sender, digests = int(frames[1]), int(frames[2]), frames[3]
        if room in open_rooms:  # else the room is over
            self.setdefault(room, {})[sender] = digests
        return True


class VerifyingReceiver:
    """Base of a decode rank's KV receiver, before the engine's: compares what arrived."""

    # Pages and state pages that were requested, and when; None if nothing is compared.
    expected_pages: tuple[npt.NDArray[np.int32], Sequence[int] | None, float] | None = None

    def send_metadata(self, kv_indices, aux_index=None, state_indices=None, *more, **options):
        """Sends the metadata. Extends the engine's: notes the pages that are to be compared."""
        infos = getattr(self, "bootstrap_infos", None)
        if self.kv_mgr.verifier is not None and infos:
            if all(info["is_dummy"] or info.get("verifies") for info in infos):
                state = state_indices[0] if state_indices else None
                self.expected_pages = (kv_indices, state, time.time())
            else:
                logger.warning_once(
                    f"Prefill {self.bootstrap_addr} sends no digests, and its KV is not verified; "
                    f"set {VARIABLE} there, too"
                )
        return super().send_metadata(kv_indices, aux_index, state_indices, *more, **options)

    def poll(self) -> KVPoll:
        """Returns the status. Extends the engine's: `Failed` if the KV differs from prefill's."""
        status = super().poll()
        if status != KVPoll.Success or self.expected_pages is None:
            return status
        reason, self.expected_pages = self._verify(*self.expected_pages), None
        if reason:
            self.kv_mgr.record_failure(self.bootstrap_room, reason)
            self.kv_mgr.update_status(self.bootstrap_room, KVPoll.Failed)
            self.conclude_state = status = KVPoll.Failed
        return status

    def _verify(
        self, pages: npt.NDArray[np.int32], state: Sequence[int] | None, requested_at: float
    ) -> str | None:
        manager, verifier = self.kv_mgr, self.kv_mgr.verifier
        arrived = manager.arrived_digests.pop(self.bootstrap_room, {})
        missing = self.required_prefill_response_num - len(arrived)
        frames = [*arrived.values(), *[b""] * missing]
        state = state if manager.layout.state else None
        at = f"{manager.local_ip}:{manager.rank_port}"
        with verifier.reports.lock:
            report = verifier.reports.report_for(self.bootstrap_addr, at)
            seconds = time.time() - requested_at
            before = report.failed
            reason = verifier.compare(self.bootstrap_room, frames, pages, state, report, seconds)
            verifier.reports.mark_changed(self.bootstrap_addr)
            manager.note_verified(self.bootstrap_addr, report.failed > before)
        return reason

    def clear(self) -> None:
        super().clear()
        manager, room = self.kv_mgr, self.bootstrap_room
        if room in manager.arrived_digests and room not in manager.request_status:
            manager.arrived_digests.pop(room, None)  # else another request has the room
