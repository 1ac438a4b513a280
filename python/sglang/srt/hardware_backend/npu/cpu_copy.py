"""Copy the KV of a retracted request to the host, and back to other slots (PR #25249).

    pool, per buffer          host, per chunk and buffer
    [layers, rows, ...]  ->   [layers, rows of the chunk, ...]

A row is a token, or a whole page where a page's bytes are not token after token. All layers of a
buffer move at once, a chunk of rows at a time; the caller waits at the beginning and at the end. A
chunk is as large as one that moves a single layer would be, for device memory is short when
requests are retracted.
"""

from __future__ import annotations

import logging
from typing import List, Sequence, Tuple

import torch

logger = logging.getLogger(__name__)

# chunks, buffers
HostCopy = List[List[torch.Tensor]]


def copy_to_host(buffers: Sequence[torch.Tensor], rows: torch.Tensor, chunk: int) -> HostCopy:
    """The given rows of every layer, on the host, in pinned memory where the device has it.

    Args:
        buffers: Each [layers, rows, ...], on one device.
        rows: [n], any integer type, on any device; may be empty.
        chunk: Rows of one layer that may move at a time.
    """
    _wait_for(buffers[0].device)
    copied = [
        [_gathered(buffer, part) for buffer in buffers] for part in _chunks(buffers, rows, chunk)
    ]
    _wait_for(buffers[0].device)
    return copied


def copy_from_host(
    copied: HostCopy, buffers: Sequence[torch.Tensor], rows: torch.Tensor, chunk: int
) -> None:
    """Write what `copy_to_host` returned into other rows of these buffers, or of some like them.

    Raises:
        ValueError: The copy does not fit; nothing has been written.
    """
    parts = _chunks(buffers, rows, chunk)
    _check_fit(copied, buffers, parts)
    _wait_for(buffers[0].device)
    for host, part in zip(copied, parts):
        for buffer, values in zip(buffers, host):
            flat, at = _flat(buffer, part)
            flat.index_copy_(0, at, values.to(buffer.device, non_blocking=True).flatten(0, 1))
    _wait_for(buffers[0].device)


def _chunks(
    buffers: Sequence[torch.Tensor], rows: torch.Tensor, chunk: int
) -> Sequence[torch.Tensor]:
    device = buffers[0].device
    if device.type != "cpu":  # where nothing is staged
        chunk = max(1, chunk // buffers[0].shape[0])
    rows = rows.to(device=device, dtype=torch.int64)
    return rows.split(chunk) if len(rows) else ()


def whole_pages(tokens: torch.Tensor, page_size: int) -> torch.Tensor:
    """Pages that hold these tokens of a request, where a page can only be copied as a whole.

    Raises:
        ValueError: They do not fill page after page from its first slot, as a request's do.
    """
    pages = tokens[::page_size] // page_size
    slots = torch.arange(page_size, device=tokens.device, dtype=tokens.dtype)
    filled = (pages[:, None] * page_size + slots).reshape(-1)[: len(tokens)]
    if not torch.equal(filled, tokens):
        raise ValueError(
            f"{len(tokens)} KV slots are not whole pages of {page_size} tokens, the last perhaps "
            "partly filled; with SGLANG_USE_FIA_NZ a part of a page cannot be copied"
        )
    return pages


def _gathered(buffer: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    flat, at = _flat(buffer, rows)
    picked = flat.index_select(0, at)
    if picked.device.type != "cpu":
        picked = _pinned_like(picked).copy_(picked, non_blocking=True)
    return picked.view(buffer.shape[0], len(rows), *buffer.shape[2:])


def _flat(buffer: torch.Tensor, rows: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
    """The buffer as [layers * rows, ...], and these rows of all layers in it.

    An NPU copies a whole buffer, twice, to index any dimension but the first.
    """
    layers = torch.arange(buffer.shape[0], device=rows.device)
    at = layers[:, None] * buffer.shape[1] + rows
    return buffer.view(-1, *buffer.shape[2:]), at.view(-1)


def _pinned_like(tensor: torch.Tensor) -> torch.Tensor:
    """Host memory for it: pinned, or where there is no more of that, any."""
    shape, dtype = tensor.shape, tensor.dtype
    try:
        return torch.empty(shape, dtype=dtype, pin_memory=True)
    except RuntimeError as error:
        logger.warning(f"KV of a retracted request goes to memory that is not pinned: {error}")
        return torch.empty(shape, dtype=dtype)


def _check_fit(copied: HostCopy, buffers: Sequence[torch.Tensor], parts: Sequence) -> None:
    def said(tensors) -> List[tuple]:
        return [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]

    fits = [
        [((buffer.shape[0], len(part), *buffer.shape[2:]), buffer.dtype) for buffer in buffers]
        for part in parts
    ]
    found = [said(host) for host in copied]
    if found != fits:
        raise ValueError(
            f"This copy of KV holds {found}, the pool's slots for it take {fits}; a request can "
            "only be loaded into as many slots of a pool like the one it was copied from"
        )


def by_token(buffer: torch.Tensor) -> torch.Tensor:
    """[layers, pages, slots of a page, ...] seen as [layers, tokens, ...]; never a copy of it."""
    return buffer.view(buffer.shape[0], -1, *buffer.shape[3:])


def _wait_for(device: torch.device) -> None:
    torch.get_device_module(device).synchronize()
