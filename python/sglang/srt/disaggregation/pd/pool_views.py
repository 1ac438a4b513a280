"""Views a rank's registered buffers as tensors of bytes, where they lie."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, List

import torch
from msgspec.structs import replace
from sglang.srt.disaggregation.base.conn import KVArgs
from sglang.srt.disaggregation.kv_layout import Buffer, LayoutError, is_split_by_heads
from sglang.srt.disaggregation.pd.memory_registration import flatten
from sglang.srt.disaggregation.pd.packed_mode import is_packed_mode

logger = logging.getLogger(__name__)

MAX_ATTRIBUTE_DEPTH = 4
# By bytes of a word, the widest type that all devices move.
WORDS = {16: torch.int64, 8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


@dataclass(frozen=True)
class PoolViews:
    """A rank's KV and state buffers, each uint8, `[pages, bytes per page]`."""

    kv: List[torch.Tensor]
    state: List[torch.Tensor]

    @property
    def device(self) -> torch.device:
        return (self.kv or self.state)[0].device  # a stage may have sliding windows only


def find_views(args: KVArgs, owners: Sequence[Any]) -> PoolViews:
    """Returns views of the buffers that `args.layout` describes.

    Args:
        owners: Pools whose tensors contain the buffers.

    Raises:
        LayoutError: No tensor of the pools contains a buffer.
    """
    state = (flatten(args.state_data_ptrs), flatten(args.state_data_lens))
    return PoolViews(
        buffer_views(args.layout.kv, owners, args.kv_data_ptrs, args.kv_data_lens),
        buffer_views(args.layout.state, owners, *state),
    )


def set_views(args: KVArgs, owners: Sequence[Any], is_able: bool = True) -> None:
    """Sets `args.views`, and in its layout whether this rank sends and reads whole rows.

    Without views, as of pools that nobody knows, it sends and receives slices; so it does after any
    exception, because the engine would have started.

    Args:
        is_able: False if the engine sends head slices its own way.

    Raises:
        ValueError: A variable of the patch set is wrong; the server must not start.
    """
    wanted = is_packed_mode() and is_able and is_split_by_heads(args.layout)
    args.views = None
    if wanted:
        try:
            args.views = find_views(args, owners)
        except Exception as error:
            level = logging.INFO if isinstance(error, LayoutError) else logging.WARNING
            said = "KV heads are sent token by token between different TP sizes"
            logger.log(level, f"{said}: {error!r}")
            wanted = False
    args.layout = replace(args.layout, whole_rows=wanted)


def buffer_views(
    buffers: Sequence[Buffer], owners: Sequence[Any], ptrs: Sequence[int], lens: Sequence[int]
) -> List[torch.Tensor]:
    """Returns a view of each buffer, uint8, `[pages, bytes per page]`.

    Args:
        owners: Pools whose tensors contain the buffers.
        ptrs, lens: Address and bytes of each buffer.

    Raises:
        LayoutError: No tensor of the pools contains a buffer.
    """
    storages = [storage for owner in owners for storage in _storages(owner)]
    return [_bytes_at(storages, *one) for one in zip(buffers, ptrs, lens)]


def _storages(owner: Any) -> Iterator[torch.Tensor]:
    """Yields the memory of each tensor that an object has, as bytes."""
    seen, level = set(), [owner]
    for _ in range(MAX_ATTRIBUTE_DEPTH):
        level = list(itertools.chain.from_iterable(map(_within, level)))
        for one in level:
            if isinstance(one, torch.Tensor) and id(one) not in seen:
                seen.add(id(one))
                storage = one.untyped_storage()
                yield torch.empty(0, dtype=torch.uint8, device=one.device).set_(storage)


def _within(one: Any) -> Iterator[Any]:
    if isinstance(one, (list, tuple)):
        yield from one
    elif isinstance(one, dict):
        yield from one.values()
    elif type(one).__module__.startswith("sglang.") and hasattr(one, "__dict__"):
        yield from vars(one).values()


def _bytes_at(
    storages: Sequence[torch.Tensor], buffer: Buffer, ptr: int, length: int
) -> torch.Tensor:
    """Returns a view of the buffer, uint8, `[pages, bytes per page]`."""
    for storage in storages:
        start = ptr - storage.data_ptr()
        if start >= 0 and start + length <= storage.numel():
            count = length // buffer.page_bytes if buffer.page_bytes else 0
            end = start + count * buffer.page_bytes
            return storage[start:end].view(count, buffer.page_bytes)
    raise LayoutError(f"{buffer.name}: no tensor of the pools contains its {length} bytes")
