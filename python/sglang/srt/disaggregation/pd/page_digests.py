"""Computes digests of pages where they lie, on any device that torch supports.

A page, or a slice of it, is a row of 4-byte words (of 2 or 1 bytes if its length requires that).
Its digest is their weighted sum modulo 2**64, with an odd weight for each word's position. So a
single word that differs is always detected, even if only its sign differs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Dict, List, Tuple

import numpy as np
import numpy.typing as npt
import torch
from sglang.srt.disaggregation.kv_layout import (
    Buffer,
    ByteRange,
    Digests,
    LayoutError,
    Part,
    RankLayout,
    byte_ranges,
    position_weights,
    summarize,
)
from sglang.srt.disaggregation.pd.pool_views import buffer_views

# Bytes that are gathered at a time; their products need twice as much in addition.
CHUNK_BYTES = 4 << 20
WORD_DTYPES = (torch.int32, torch.int16, torch.uint8)


class PageViews:
    """A rank's KV or state buffers as bytes.

    Args:
        layout: The rank's layout.
        buffers: Its `kv` or `state`.
        owners: Pools whose tensors contain the buffers.
        ptrs, lens: Address and bytes of each buffer.

    Raises:
        LayoutError: No tensor of the pools contains a buffer.
    """

    def __init__(
        self,
        layout: RankLayout,
        buffers: Sequence[Buffer],
        owners: Sequence[Any],
        ptrs: Sequence[int],
        lens: Sequence[int],
    ):
        self.layout, self.buffers = layout, buffers
        self.pages = buffer_views(buffers, owners, ptrs, lens)
        self.weights: Dict[Tuple[int, torch.device], torch.Tensor] = {}

    def digests(self, parts: Sequence[Part], pages: npt.ArrayLike) -> Digests:
        """Returns digests of these parts over these pages, which are in the request's order.

        Raises:
            LayoutError: This rank does not hold a part, or does not have a page.
        """
        indices = np.asarray(pages, dtype=np.int64)
        slices = byte_ranges(parts, self.layout, self.buffers)
        for one in slices:
            held = self.pages[one.buffer].shape[0]
            if indices.size and not 0 <= indices.min() <= indices.max() < held:
                raise LayoutError(
                    f"pages {indices.min()} to {indices.max()} requested, only {held} exist"
                )
        on_device: Dict[torch.device, torch.Tensor] = {}
        found: List[torch.Tensor] = []
        for one in slices:
            device = self.pages[one.buffer].device
            if device not in on_device:
                on_device[device] = torch.from_numpy(indices).to(device)
            found.append(self._digests(one, on_device[device]))
        table = torch.stack(found).cpu().numpy() if found else np.empty((0, indices.size), np.int64)
        return summarize(tuple(parts), table)

    def size(self, parts: Sequence[Part], pages: npt.ArrayLike) -> int:
        """Returns the bytes of these parts of these pages."""
        slices = byte_ranges(parts, self.layout, self.buffers)
        return sum(one.rows * one.length for one in slices) * np.asarray(pages).size

    def _digests(self, one: ByteRange, indices: torch.Tensor) -> torch.Tensor:
        """Returns one digest per page, int64, `[pages]`."""
        whole = self.pages[one.buffer]
        rows = whole.view(len(whole), one.rows, whole.shape[1] // one.rows)
        rows = rows[:, :, one.start : one.start + one.length]
        size = one.rows * one.length
        word = next(word for word in WORD_DTYPES if size % word.itemsize == 0)
        weight = self._weights(size // word.itemsize, whole.device)
        found = torch.empty(len(indices), dtype=torch.int64, device=whole.device)
        step = max(1, CHUNK_BYTES // max(1, size))
        for start in range(0, len(indices), step):
            some = rows.index_select(0, indices[start : start + step])
            words = some.view(len(some), size).view(word)
            found[start : start + step] = (words * weight).sum(dim=1)
        return found

    def _weights(self, count: int, device: torch.device) -> torch.Tensor:
        key = (count, device)
        if key not in self.weights:
            self.weights[key] = torch.from_numpy(position_weights(count).view(np.int64)).to(device)
        return self.weights[key]
