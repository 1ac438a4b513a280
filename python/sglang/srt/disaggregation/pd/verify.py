"""`SGLANG_PD_VERIFY`: decode compares digests of what arrived with digests of what prefill has.

    prefill                                   decode
    last chunk written
    digest this request's pages, by part  ->  with the room's last message (0.5.9) or before it
                                              all has arrived: digest the same parts, compare
                                              equal: schedule the request
                                              else: fail it on all ranks

Neither side relies on the other's plan: each finds a part in its own pools, by its own description.
With `1` a request that differs fails; with `log` it is logged and served.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Dict, Iterable, List, Optional, Tuple

import numpy as np
import numpy.typing as npt
from sglang.srt.disaggregation.base.conn import KVArgs
from sglang.srt.disaggregation.kv_layout import (
    LayoutError,
    Part,
    RankLayout,
    RoomDigests,
    decode_digests,
    describe_difference,
    differing_buffers,
    elided_parts,
    encode_digests,
    missing_parts,
    sent_parts,
)
from sglang.srt.disaggregation.pd.memory_registration import flatten
from sglang.srt.disaggregation.pd.page_digests import PageViews
from sglang.srt.disaggregation.pd.verify_mode import VARIABLE, verify_mode
from sglang.srt.disaggregation.pd.verify_reports import PairStats, ReportSender, VerifyReport

logger = logging.getLogger(__name__)

# A chunk's place among all pages of its request, and its pages of this rank's pool, int32.
Chunk = Tuple[slice, npt.NDArray[np.int32]]


@dataclass
class Verifier:
    """One rank's digests. On prefill the thread that sends uses it, on decode the scheduler.

    Attributes:
        kv, state: This rank's buffers.
        mode: `fail` or `log`.
        reports: Decode: sends the results of comparisons to the prefill servers.
    """

    args: KVArgs
    kv: PageViews
    state: PageViews
    mode: str

    def __post_init__(self):
        self.reports = ReportSender(self.name)

    @property
    def layout(self) -> RankLayout:
        return self.args.layout

    @property
    def name(self) -> str:
        """This rank's name, such as `DP 1 TP 0/2 PP 0/1`."""
        dp = self.args.system_dp_rank
        return self.layout.name if dp is None else f"DP {dp} {self.layout.name}"

    # Prefill

    def digests(
        self,
        room: int,
        chunks: Sequence[Chunk],
        peer: RankLayout,
        state_pages: Optional[Sequence[int]],
        sends_state_by_plan: bool,
    ) -> bytes:
        """Returns digests of all that the room sent to a decode rank; empty if that fails.

        Args:
            peer: The decode rank's layout.
            state_pages: This rank's pages or slots of state; None if the room sends no state.
            sends_state_by_plan: Whether transfer plans cover state.
        """
        try:
            chunks = sorted(chunks, key=lambda chunk: chunk[0].start)
            pages = np.concatenate([chunk for _, chunk in chunks])
            own, state = self.layout, None
            kv = self.kv.digests(sent_parts(own, peer, own.kv, peer.kv), pages)
            # Between different TP sizes Mooncake splits recurrent state along dimensions.
            is_alike = sends_state_by_plan or own.tp_size == peer.tp_size
            if state_pages is not None and is_alike:
                parts = sent_parts(own, peer, own.state, peer.state)
                state = self.state.digests(parts, state_pages)
            return encode_digests(RoomDigests(self.name, kv, state, elided_parts(own)))
        except Exception:
            logger.exception(f"Room {room}: could not compute digests for decode {peer.name}")
            return b""

    # Decode

    def compare(
        self,
        room: int,
        frames: Iterable[bytes],
        pages: npt.NDArray[np.int32],
        state_pages: Optional[Sequence[int]],
        report: VerifyReport,
        seconds: float,
    ) -> Optional[str]:
        """Compares a room's digests, one frame from each prefill rank, with this rank's pages.

        Args:
            pages, state_pages: The room's pages, and its pages or slots of state, on this rank.
            report: Counts the result.
            seconds: Duration of the room's transfer, for `report`.

        Returns:
            What differs, in words; None if nothing does, or with `log`, which only logs it.
        """
        started_at = time.perf_counter()
        try:
            sent = [_read(frame) for frame in frames]
            said = self._missing(sent)
            differing = dict.fromkeys(said, "")
            for text, buffers in self._differences(sent, pages, state_pages, report.pairs):
                said.append(text)
                differing |= dict.fromkeys(buffers, f"room {room}: {text}")
        except LayoutError as error:
            said = [str(error)]
            differing = dict.fromkeys(said, "")
        except Exception as error:
            logger.exception(f"Room {room}: could not compare digests")
            said = [f"digests could not be compared: {error!r}"]
            differing = dict.fromkeys(said, "")
        report.add(said, differing, seconds, time.perf_counter() - started_at)
        if not said:
            return None
        reason = f"KV verification failed: {'; '.join(said)}"
        logger.error(f"Room {room}: {reason}")
        return reason if self.mode == "fail" else None

    def _missing(self, sent: List[RoomDigests]) -> List[str]:
        own = self.layout
        left_out = [part for one in sent for part in one.left_out]
        kv = missing_parts(own.kv, [*_parts(one.kv for one in sent), *left_out])
        if any(one.state is None for one in sent):
            state = []
        else:
            state = missing_parts(own.state, [*_parts(one.state for one in sent), *left_out])
        missing = [*kv, *state]
        return [f"no prefill rank sent {missing[0]} ({len(missing)} in all)"] if missing else []

    def _differences(
        self,
        sent: List[RoomDigests],
        pages: npt.NDArray[np.int32],
        state_pages: Any,
        pairs: Dict[str, PairStats],
    ) -> List[Tuple[str, List[str]]]:
        """Returns for each pair of ranks that differs: how, in words, and in which buffers."""
        said = []
        for one in sent:
            count = pairs.setdefault(one.sender, PairStats())
            count.requests += 1
            found, buffers = [], []
            for memory, digests, of, tokens in (
                (self.kv, one.kv, pages, self.layout.page_size),
                (self.state, one.state, state_pages, None),
            ):
                if digests is None:
                    continue
                count.parts += len(digests.parts)
                count.bytes += memory.size(digests.parts, of)
                arrived = memory.digests(digests.parts, of)
                text = describe_difference(digests, arrived, tokens)
                if text:
                    found.append(text)
                    buffers += differing_buffers(digests, arrived)
            if found:
                count.mismatches += 1
                ranks = f"(prefill {one.sender}, decode {self.name})"
                said.append((f"{', '.join(found)} {ranks}", [f"{one} {ranks}" for one in buffers]))
        return said


def _read(frame: bytes) -> RoomDigests:
    if not frame:
        raise LayoutError(
            "a prefill rank sent no digests or could not compute them; its log may say why"
        )
    return decode_digests(frame)


def _parts(digests: Iterable[Any]) -> List[Part]:
    return [part for one in digests for part in one.parts]


def make_verifier(args: KVArgs, owners: Sequence[Any]) -> Optional[Verifier]:
    """Returns this rank's verifier over its pools (`owners`); None if nothing is compared."""
    mode = verify_mode()
    if not mode:
        return None
    layout = args.layout
    kv = PageViews(layout, layout.kv, owners, args.kv_data_ptrs, args.kv_data_lens)
    registered = (flatten(args.state_data_ptrs), flatten(args.state_data_lens))
    state = PageViews(layout, layout.state, owners, *registered)
    logger.info(f"{VARIABLE}: KV is compared after each transfer ({mode})")
    return Verifier(args, kv, state, mode)
