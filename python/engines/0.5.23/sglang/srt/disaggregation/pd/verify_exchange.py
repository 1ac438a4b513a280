"""`SGLANG_PD_VERIFY`: prefill sends digests of its pages before it reports that a room is done.

prefill                                            decode
all chunks written
(PD_DIGESTS, room, prefill rank, digests)     ->   stored
the engine's status                           ->   the room is done; the receiver's next poll
                                                   compares: `pd.verify`
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any, Dict, List, Optional, Tuple

import numpy as np
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.pd.per_instance import PerInstance
from sglang.srt.disaggregation.pd.verify import Verifier
from sglang.srt.disaggregation.pd.verify_mode import VARIABLE
from sglang.srt.environ import envs
from sglang.srt.runtime_context import get_disagg
from sglang.srt.utils.network import NetworkAddress

logger = logging.getLogger(__name__)

DIGESTS = b"PD_DIGESTS"
BACKENDS = ("ascend", "mooncake", "nixl")


def require_verifiable(layout: object, why_not: str) -> None:
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


class DigestSender:
    """Mixin for a prefill rank's KV manager, over `PlannedTransfers`."""

    def note_chunk(self, room: int, index_slice: slice, pages: Any, state: Any) -> None:
        """Notes pages that are about to be sent.

        Args:
            index_slice: Their place among the request's pages.
            pages: Pages of this rank's pool, whose numbers may still be on their way to the host.
            state: Pages or slots by kind of state, or None.
        """
        if self.verifier is not None:
            for info in list(self.transfer_infos.get(room, {}).values()):
                info.sent_chunks = (*info.sent_chunks, (index_slice, pages))
                info.sent_state = state

    def conclude_transfer(self, *, bootstrap_room: int, status: KVPoll, **more) -> Optional[KVPoll]:
        """Concludes a room. Extends the engine's: first sends digests to ranks that compare."""
        is_open = self.request_status.get(bootstrap_room, KVPoll.Failed) != KVPoll.Failed
        if status == KVPoll.Success and is_open and self.verifier is not None:
            for peer, info in list(self.transfer_infos.get(bootstrap_room, {}).items()):
                self._send_digests(bootstrap_room, peer, info)
        return super().conclude_transfer(bootstrap_room=bootstrap_room, status=status, **more)

    def _send_digests(self, room: int, peer: str, info: Any) -> None:
        plan = None if info.is_dummy else self.plan_for(peer)
        if plan is None or not plan.layout.verifies:
            return
        verifier: Verifier = self.verifier
        state = None if plan.state is None or not info.sent_state else info.sent_state[0]
        chunks = [(where, np.asarray(pages)) for where, pages in info.sent_chunks]
        found = verifier.digests(room, chunks, plan.layout, state, True)
        numbers = (str(number).encode("ascii") for number in (room, self._prefill_unique_rank()))
        address = NetworkAddress(info.endpoint, info.dst_port)
        try:
            frames = [DIGESTS, *numbers, found]
            self._send_multipart_locked(address.to_tcp(), frames, is_ipv6=address.is_ipv6)
        except Exception as error:
            logger.warning(f"Room {room}: could not send digests to decode {peer}: {error}")


class DigestInbox:
    """Mixin for a decode rank's KV manager: stores the digests that arrive."""

    # By open room, then by prefill rank.
    arrived_digests: Dict[int, Dict[int, bytes]] = PerInstance(dict)

    def handle_digests_message(self, frames: List[bytes]) -> bool:
        """Stores the digests in a message; returns whether it has any."""
        if frames[0] != DIGESTS:
            return False
        room, sender, digests = int(frames[1]), int(frames[2]), frames[3]
        if room in self.request_status:  # else the room is over
            self.arrived_digests.setdefault(room, {})[sender] = digests
        return True


class VerifyingReceiver:
    """Mixin for a decode rank's KV receiver, over the engine's: compares what arrived."""

    # Pages and state pages that were requested, and when; None if nothing is compared.
    expected_pages: Optional[Tuple[np.ndarray, Optional[Sequence[int]], float]] = None

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

    def _verify(self, pages: np.ndarray, state, asked_at: float) -> Optional[str]:
        manager = self.kv_mgr
        verifier: Verifier = manager.verifier
        frames = manager.arrived_digests.pop(self.bootstrap_room, {})
        missing = self.required_prefill_response_num - len(frames)
        frames = [*frames.values(), *[b""] * missing]
        state = state if manager.layout.state else None
        at = f"{manager.local_ip}:{manager.rank_port}"
        with verifier.reports.lock:
            report = verifier.reports.report_for(self.bootstrap_addr, at)
            room, seconds = self.bootstrap_room, time.time() - asked_at
            reason = verifier.compare(room, frames, pages, state, report, seconds)
            verifier.reports.mark_changed(self.bootstrap_addr)
        return reason

    def clear(self) -> None:
        super().clear()
        if self.bootstrap_room not in self.kv_mgr.request_status:  # else another request has it
            self.kv_mgr.arrived_digests.pop(self.bootstrap_room, None)
