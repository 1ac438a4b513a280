"""Copy the KV of a retracted request to the host, and back to other slots (PR #25249).

    pool, per buffer          host, per chunk and buffer
    [layers, rows, ...]  ->   [layers, rows of the chunk, ...]

A row is a token, or a whole page where a page's bytes are not token after token. All layers of a
buffer move at once, a chunk of rows at a time; the caller waits at the beginning and at the end. A
chunk is as large as one that moves a single layer would be, for device memory is short when
requests are retracted.
"""

from __future__ import annotations

from typing import List, Sequence

import torch

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
            buffer.index_copy_(1, part, values.to(buffer.device, non_blocking=True))
    _wait_for(buffers[0].device)


def _chunks(
    buffers: Sequence[torch.Tensor], rows: torch.Tensor, chunk: int
) -> Sequence[torch.Tensor]:
    rows = rows.to(device=buffers[0].device, dtype=torch.int64)
    return rows.split(max(1, chunk // buffers[0].shape[0])) if len(rows) else ()


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
    shape = (buffer.shape[0], len(rows), *buffer.shape[2:])
    if buffer.device.type == "cpu":
        host = torch.empty(shape, dtype=buffer.dtype)
        for layer, into in zip(buffer, host):  # a CPU gathers slowly along an inner dimension
            torch.index_select(layer, 0, rows, out=into)
        return host
    host = torch.empty(shape, dtype=buffer.dtype, pin_memory=True)
    return host.copy_(buffer.index_select(1, rows), non_blocking=True)


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
