"""Which rows of a request's metadata go to a peer.

A rank keeps metadata (first token, logprobs, room and so on) in buffers that the engine calls aux:
one per kind, with a row for each slot. The row of hidden states is as wide as the model if the rank
speculates with EAGLE, and 16 floats otherwise, so the two sides may differ in it. It is then left
out: decode without a draft does not read it, and a draft without it guesses worse, not wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Optional

import numpy as np
import numpy.typing as npt

from .bounds import bytes_until_next
from .layout import LayoutError, RankLayout

# Index of the row in every release, unless 0.5.23 sends sampling masks, too; see `local_layout`.
HIDDEN_STATES = 8
PLAIN_HIDDEN_STATES_BYTES = 64  # bytes of that row without EAGLE


@dataclass(frozen=True)
class AuxPlan:
    """The rows that one rank sends to another, without the slots.

    Attributes:
        rows: Indices of the metadata buffers whose rows are sent.
        widths: Bytes of each row, sent or not.
        src_slots, dst_slots: Slots of each side's buffers; 0 if the side does not report them.
    """

    rows: tuple[int, ...]
    widths: tuple[int, ...]
    src_slots: int = 0
    dst_slots: int = 0

    def copies(
        self, src_pointers: Sequence[int], src_slot: int, dst_pointers: Sequence[int], dst_slot: int
    ) -> npt.NDArray[np.int64]:
        """Source addresses, destination addresses and bytes of the `rows`, as one array `[3, n]`.

        Raises:
            LayoutError: A side's buffers do not have its slot, or a side has another number of
                buffers than `widths`.
        """
        counts = (len(src_pointers), len(dst_pointers))
        if counts != (len(self.widths),) * 2:
            raise LayoutError(
                f"prefill registered {counts[0]} metadata buffers, decode {counts[1]}, and "
                f"{len(self.widths)} are described; run the same release on both sides"
            )
        held = self.dst_slots or self._most_slots(dst_pointers)
        if _is_outside(src_slot, self.src_slots) or _is_outside(dst_slot, held):
            raise LayoutError(
                f"prefill sends metadata slot {src_slot} of {self.src_slots}, decode has set aside "
                f"slot {dst_slot} of {held or 'an unknown number'}"
            )
        rows = [
            (src_pointers[i] + size * src_slot, dst_pointers[i] + size * dst_slot, size)
            for i, size in self._sent()
        ]
        return np.array(rows, dtype=np.int64).reshape(-1, 3).T.copy()

    def _most_slots(self, pointers: Sequence[int]) -> int:
        """Returns the slots that end before a peer's next buffer begins, if it reports none."""
        room = bytes_until_next(pointers)
        return min((room[pointers[i]] // size for i, size in self._sent()), default=0)

    def _sent(self) -> list[tuple[int, int]]:
        return [(i, self.widths[i]) for i in self.rows]


def make_aux_plan(src: RankLayout, dst: RankLayout) -> AuxPlan:
    """Returns the plan from `src` (prefill) to `dst` (decode).

    Raises:
        LayoutError: The two differ in the number of rows, or in the width of the first or the last
            row (the first token's, and the room's or 0.5.23's checksum), without which decode
            accepts no request.
    """
    theirs = _widths(src, dst)
    if len(theirs) != len(src.aux):
        raise LayoutError(
            f"metadata rows: prefill has {len(src.aux)}, decode has {len(theirs)}; "
            "run the same release on both sides"
        )
    rows = tuple(i for i, width in enumerate(src.aux) if width == theirs[i] != 0)
    if src.aux and not {0, len(src.aux) - 1} <= set(rows):
        raise LayoutError(
            f"bytes of the metadata rows: prefill has {src.aux}, decode has {theirs}; the first "
            "and the last must be equal; run the same release on both sides"
        )
    return AuxPlan(rows, src.aux, src.aux_slots, dst.aux_slots)


def unsent_rows_message(src: RankLayout, dst: RankLayout) -> Optional[str]:
    """Returns a warning about metadata that decode keeps but does not receive, if any."""
    unsent = [
        f"row {i}{' (hidden states)' if i == HIDDEN_STATES else ''}, {ours} bytes on prefill, "
        f"{theirs or 'an unknown number'} on decode"
        for i, (ours, theirs) in enumerate(zip(src.aux, _widths(src, dst)))
        if ours != theirs and (theirs or not dst.aux)
    ]
    return f"metadata rows of unequal width are not sent: {'; '.join(unsent)}" if unsent else None


def _widths(src: RankLayout, dst: RankLayout) -> tuple[int, ...]:
    """Returns the bytes of the peer's rows; ours if it does not report them.

    Only hidden states can differ then: they are 0 (unknown) if the peer has a draft and we have
    none.
    """
    if dst.aux or len(src.aux) <= HIDDEN_STATES:
        return dst.aux or src.aux
    hidden = PLAIN_HIDDEN_STATES_BYTES
    if any(buffer.draft for buffer in dst.kv):
        hidden = src.aux[HIDDEN_STATES]
        hidden = 0 if hidden == PLAIN_HIDDEN_STATES_BYTES else hidden
    return (*src.aux[:HIDDEN_STATES], hidden, *src.aux[HIDDEN_STATES + 1 :])


def _is_outside(slot: int, slots: int) -> bool:
    return slot < 0 or 0 < slots <= slot
