"""Writes that are not planned: the engine's own stay within what both sides registered, too."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, List, Optional, Sequence, Tuple

import numpy as np
import numpy.typing as npt
from sglang.srt.disaggregation.kv_layout import (
    Bounds,
    LayoutError,
    RankLayout,
    Sizes,
    announced_memory,
    described_aux,
    described_memory,
    max_slots,
    slot_error,
)
from sglang.srt.disaggregation.pd.memory_registration import memory_regions

# Source and destination addresses, and bytes.
Block = Tuple[int, int, int]
# Addresses, and bytes.
Copies = Tuple[Sequence[int], Sequence[int]]


def lowest_and_highest(buffers: Iterable[Tuple[int, int]], pages: npt.NDArray[np.int32]) -> Copies:
    """The lowest and the highest of these pages, one or more, in each buffer.

    buffers: Address, and bytes a page.
    """
    ends = (int(pages.min()), int(pages.max()))
    copies = [(start + page * size, size) for start, size in buffers for page in ends]
    return [start for start, _ in copies], [size for _, size in copies]


class BoundedWrites:
    """A prefill rank's KV manager, over one that writes by `_transfer_data`.

    `decode_kv_args_table` has each registered decode rank; its registration has `bounds` and
    `state_slots`, see `bound`. Nothing is known of one without.
    """

    # Registered besides the buffers of `kv_args`: address and bytes.
    extra_memory: Tuple[Tuple[int, int], ...] = ()
    _own_bounds: Tuple[int, Any] = (-1, None)

    def set_bounds(
        self,
        info: Any,
        name: str,
        layout: Optional[RankLayout],
        sizes: Optional[Sizes],
        state: Sequence[Sequence[int]],
        item_bytes: Sequence[Sequence[int]],
        more: Sequence[Tuple[int, int]] = (),
    ) -> None:
        """Note in a decode rank's registration what memory it has.

        Sets `bounds`, and of each kind of state `state_slots`, None where that is not known.

        Args:
            layout, sizes: What it says of its buffers; None where it does not.
            state, item_bytes: Addresses of its buffers of state, and bytes a slot, by kind.
            more: Address and bytes of what it registers besides.
        """
        sizes = sizes or Sizes((), (), ())
        told = [*sizes.state, *[()] * (len(state) - len(sizes.state))]
        role = "state" if len(state) == 1 else ""  # several kinds are not described
        by_kind = [
            announced_memory(*kind) or described_memory(layout, role, kind[0])
            for kind in zip(state, told)
        ]
        kv, aux = info.dst_kv_ptrs, info.dst_aux_ptrs
        held = announced_memory(kv, sizes.kv) or described_memory(layout, "kv", kv)
        held += [one for kind in by_kind for one in kind]
        held += announced_memory(aux, sizes.aux) or described_aux(layout, aux)
        info.state_slots = [max_slots(*kind) for kind in zip(by_kind, item_bytes)]
        info.bounds = Bounds(f"decode {name}", [*held, *more])

    def check_state_slots(self, session: str, slots: Sequence[Any]) -> None:
        """Raise LayoutError if decode asks for slots of state, by kind, that it has not."""
        info = self.decode_kv_args_table.get(session)
        known = list(getattr(info, "state_slots", ()))
        known += [None] * (len(slots) - len(known))
        for kind, (some, most) in enumerate(zip(slots, known)):
            why = slot_error(f"state {kind}", some, most)
            if why:
                raise LayoutError(f"{why}; no state is written")

    def _transfer_data(self, session: str, blocks: List[Block]) -> int:
        """Write these to a decode session. Returns the transfer engine's status.

        Raises:
            RuntimeError: One is not within the memory of either side; none is written.
        """
        if any(size == 0 for _, _, size in blocks):  # for one of those MemFabric refuses all
            blocks = [block for block in blocks if block[2]]
        if not blocks:
            return 0
        src, dst, sizes = (list(column) for column in zip(*blocks))
        self.check_bounds(session, (src, sizes), (dst, sizes))
        return self.engine.batch_transfer_sync(session, src, dst, sizes)

    def check_bounds(self, session: str, src: Copies, dst: Copies) -> None:
        """Raise RuntimeError if what is read or written, addresses and bytes, is a side's not."""
        peer = self.decode_kv_args_table.get(session)
        theirs = None if peer is None else peer.bounds
        why = self.own_bounds.outside_error(*src)
        if not why and theirs is not None:
            why = theirs.outside_error(*dst)
        if why:
            raise RuntimeError(f"{why}; nothing of this transfer is written")

    @property
    def own_bounds(self) -> Bounds:
        """Of all that this rank has registered by now."""
        more = self.extra_memory  # another thread may register some meanwhile
        count, bounds = self._own_bounds
        if count != len(more):
            kv, aux = memory_regions(self.kv_args)
            held = [region[1:] for region in (*kv, *aux)]
            bounds = Bounds("this prefill rank", [*held, *more])
            self._own_bounds = (len(more), bounds)
        return bounds
