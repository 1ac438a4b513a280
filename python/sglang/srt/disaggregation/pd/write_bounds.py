"""Keeps the engine's own writes, which are not planned, within what both sides registered."""

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
from sglang.srt.disaggregation.pd.memory_registration import memory_regions, packing_regions

# Source address, destination address, bytes.
Block = Tuple[int, int, int]
# Addresses on one side, and bytes.
Copies = Tuple[Sequence[int], Sequence[int]]


def lowest_and_highest(buffers: Iterable[Tuple[int, int]], pages: npt.NDArray[np.int32]) -> Copies:
    """Returns copies of the lowest and the highest of these pages in each buffer.

    Args:
        buffers: Address of each buffer, and its bytes per page.
        pages: One page or more.
    """
    ends = (int(pages.min()), int(pages.max()))
    copies = [(start + page * size, size) for start, size in buffers for page in ends]
    return [start for start, _ in copies], [size for _, size in copies]


class OutOfBounds(RuntimeError):
    """A write outside the memory of either side, which was not started."""


class BoundedWrites:
    """Base of a prefill rank's KV manager, over one that writes with `_transfer_data`.

    `decode_kv_args_table` has each decode rank's registration, in which `set_bounds` sets `bounds`
    and `state_slots`. Writes to a rank that has not registered are the engine's, and not checked.
    """

    # Address and bytes of memory that is registered besides the buffers of `kv_args`.
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
        """Notes in a decode rank's registration what memory the rank has.

        Sets `bounds`, and `state_slots` by kind of state, None where the number is unknown.

        Args:
            info: The registration.
            name: The rank's name in messages.
            layout, sizes: The rank's description and sizes of its buffers; None if it sends none.
            state, item_bytes: Addresses of the rank's state buffers, and bytes per slot, by kind.
            more: Address and bytes of memory that the rank registers besides.
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
        """Raises LayoutError if decode requests slots of state, by kind, that it does not have."""
        info = self.decode_kv_args_table.get(session)
        known = list(getattr(info, "state_slots", ()))
        known += [None] * (len(slots) - len(known))
        for kind, (some, most) in enumerate(zip(slots, known)):
            why = slot_error(f"state {kind}", some, most)
            if why:
                raise LayoutError(f"{why}; no state is written")

    def _transfer_data(self, mooncake_session_id: str, transfer_blocks: List[Block]) -> int:
        """Writes these blocks to a decode session. Returns the transfer engine's status.

        Raises:
            OutOfBounds: A block is outside either side's memory; nothing is written.
        """
        # MemFabric rejects a batch with an empty block.
        blocks = [block for block in transfer_blocks if block[2]]
        if not blocks:
            return 0
        src, dst, sizes = (list(column) for column in zip(*blocks))
        # By the class's name, because the engine's tests call this on other objects.
        BoundedWrites.check_bounds(self, mooncake_session_id, (src, sizes), (dst, sizes))
        return self.engine.batch_transfer_sync(mooncake_session_id, src, dst, sizes)

    def check_bounds(self, session: str, src: Copies, dst: Copies) -> None:
        """Raises OutOfBounds if `src` or `dst` is outside the memory of its side."""
        peer = getattr(self, "decode_kv_args_table", {}).get(session)
        if peer is None:
            return
        why = self.own_bounds.outside_error(*src)
        if not why and peer.bounds is not None:
            why = peer.bounds.outside_error(*dst)
        if why:
            raise OutOfBounds(f"{why}; nothing of this transfer is written")

    @property
    def own_bounds(self) -> Bounds:
        """The bounds of all memory that this rank has registered so far."""
        more = self.extra_memory  # another thread may register more meanwhile
        count, bounds = self._own_bounds
        if count != len(more):
            kv, aux = memory_regions(self.kv_args)
            held = [region[1:] for region in (*kv, *packing_regions(self.kv_args), *aux)]
            bounds = Bounds("this prefill rank", [*held, *more])
            self._own_bounds = (len(more), bounds)
        return bounds
