"""Copies the KV of a retracted request to the host, and back to other slots (PR #25249).

    pool, per buffer          host, per chunk and buffer
    [layers, rows, ...]  ->   [layers, rows of the chunk, ...]

A row is a token, or a whole page if a page's bytes are not token after token. All layers of a
buffer move at once, or as many as an NPU can index, a chunk of rows at a time; the caller waits at
the beginning and at the end. A chunk has as many bytes as if it moved a single layer, because
device memory is short when requests are retracted.
"""

from __future__ import annotations

from typing import List, Sequence, Tuple

import torch
from sglang.srt.hardware_backend.npu import pinned_buffers

# An NPU's index operators count the elements of what they index in 32 bits.
MAX_INDEXED = 2**31 - 1


class HostCopy(List[List[torch.Tensor]]):
    """[chunk][buffer], each [layers, rows of the chunk, ...] on the host.

    Once it is dropped, another copy uses its memory: none of its tensors may outlive it.
    """


def copy_to_host(buffers: Sequence[torch.Tensor], rows: torch.Tensor, chunk: int) -> HostCopy:
    """Returns the given rows of every layer on the host, pinned unless the device is the CPU.

    Args:
        buffers: Each [layers, rows, ...], on one device.
        rows: [n], any integer type, on any device; may be empty.
        chunk: Rows of one layer that may move at a time.
    """
    copied = HostCopy()
    at_once = _rows_at_once(buffers, chunk)
    _synchronize(buffers[0].device)
    for part in _chunks(buffers, rows, at_once):
        copied.append([_host_buffer(copied, buffer, len(part), at_once) for buffer in buffers])
        for buffer, host in zip(buffers, copied[-1]):
            _gather(buffer, part, host)
    _synchronize(buffers[0].device)
    return copied


def copy_from_host(
    copied: HostCopy, buffers: Sequence[torch.Tensor], rows: torch.Tensor, chunk: int
) -> None:
    """Writes what `copy_to_host` returned into other rows of the same or similar buffers.

    Raises:
        ValueError: The copy does not fit; nothing has been written.
    """
    parts = _chunks(buffers, rows, _rows_at_once(buffers, chunk))
    _check_fit(copied, buffers, parts)
    _synchronize(buffers[0].device)
    for hosts, part in zip(copied, parts):
        for buffer, host in zip(buffers, hosts):
            _scatter(buffer, part, host)
    _synchronize(buffers[0].device)


def _rows_at_once(buffers: Sequence[torch.Tensor], chunk: int) -> int:
    if buffers[0].device.type == "cpu":  # which needs no staging
        return chunk
    return max(1, chunk // buffers[0].shape[0])


def _chunks(
    buffers: Sequence[torch.Tensor], rows: torch.Tensor, at_once: int
) -> Sequence[torch.Tensor]:
    rows = rows.to(device=buffers[0].device, dtype=torch.int64)
    return rows.split(at_once) if len(rows) else ()


def copy_layers_to_host(
    layers: Sequence[Sequence[torch.Tensor]], rows: torch.Tensor, chunk: int
) -> List[List[List[torch.Tensor]]]:
    """Returns the given rows of every layer as [layer][chunk][buffer], for any code to slice.

    Args:
        layers: Buffers of each layer, each [rows, ...], all on one device.
        rows: [n], any integer type, on any device; may be empty.
        chunk: Rows that may move at a time.
    """
    device = layers[0][0].device
    parts = _chunks(layers[0], rows, chunk)
    _synchronize(device)
    copied = [
        [[buffer[part].to("cpu", non_blocking=True) for buffer in layer] for part in parts]
        for layer in layers
    ]
    _synchronize(device)
    return copied


def copy_layers_from_host(
    copied: Sequence[Sequence[Sequence[torch.Tensor]]],
    layers: Sequence[Sequence[torch.Tensor]],
    rows: torch.Tensor,
    chunk: int,
) -> None:
    """Writes [layer][chunk][buffer] into other rows of the same or similar layers.

    Raises:
        ValueError: The copy does not fit; nothing has been written.
    """
    device = layers[0][0].device
    parts = _chunks(layers[0], rows, chunk)
    actual = [[_shapes(hosts) for hosts in layer] for layer in copied]
    expected = [
        [[((len(part), *buffer.shape[1:]), buffer.dtype) for buffer in layer] for part in parts]
        for layer in layers
    ]
    _require_equal_shapes(actual, expected)
    _synchronize(device)
    for hosts_of_layer, layer in zip(copied, layers):
        for hosts, part in zip(hosts_of_layer, parts):
            for host, buffer in zip(hosts, layer):
                buffer[part] = host.to(device, non_blocking=True)
    _synchronize(device)


def whole_pages(tokens: torch.Tensor, page_size: int) -> torch.Tensor:
    """Returns the pages that hold a request's tokens, where only whole pages can be copied.

    Raises:
        ValueError: The tokens do not fill page after page from its first slot, as a request's do.
    """
    pages = tokens[::page_size] // page_size
    slots = torch.arange(page_size, device=tokens.device, dtype=tokens.dtype)
    filled = (pages[:, None] * page_size + slots).reshape(-1)[: len(tokens)]
    if not torch.equal(filled, tokens):
        raise ValueError(
            f"{len(tokens)} KV slots are not whole pages of {page_size} tokens, the last perhaps "
            "partly filled; with SGLANG_USE_FIA_NZ only whole pages can be copied"
        )
    return pages


def _host_buffer(copied: HostCopy, buffer: torch.Tensor, rows: int, at_once: int) -> torch.Tensor:
    """Returns host memory for `rows` rows of every layer, owned by this copy."""
    layers, _, *row = buffer.shape
    row_bytes = layers * buffer[0, 0].nbytes
    pinned = buffer.device.type != "cpu"
    block = pinned_buffers.allocate(copied, rows * row_bytes, at_once * row_bytes, pinned)
    return block.view(buffer.dtype).view(layers, rows, *row)


def _gather(buffer: torch.Tensor, rows: torch.Tensor, host: torch.Tensor) -> None:
    for layers, part in _by_index(buffer, host):
        flat, at = _flatten_rows(layers, rows)
        if flat.device.type == "cpu":
            torch.index_select(flat, 0, at, out=part)
        else:
            part.copy_(flat.index_select(0, at), non_blocking=True)


def _scatter(buffer: torch.Tensor, rows: torch.Tensor, host: torch.Tensor) -> None:
    for layers, part in _by_index(buffer, host):
        flat, at = _flatten_rows(layers, rows)
        flat.index_copy_(0, at, part.to(flat.device, non_blocking=True))


def _by_index(buffer: torch.Tensor, host: torch.Tensor) -> List[Tuple[torch.Tensor, torch.Tensor]]:
    """Splits into layers that can be indexed at a time, with host rows [layers * rows, ...].

    Each part has at least one layer: a layer is not split.
    """
    at_once = max(1, MAX_INDEXED // buffer[0].numel())
    parts = [part.view(-1, *part.shape[2:]) for part in host.split(at_once)]
    return list(zip(buffer.split(at_once), parts))


def _flatten_rows(buffer: torch.Tensor, rows: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
    """Returns the layers as [layers * rows, ...], and the indices in it of these rows of each.

    To index any dimension but the first, an NPU copies a whole buffer, twice.
    """
    layers = torch.arange(buffer.shape[0], device=rows.device)
    at = layers[:, None] * buffer.shape[1] + rows
    return buffer.view(-1, *buffer.shape[2:]), at.view(-1)


def _check_fit(copied: HostCopy, buffers: Sequence[torch.Tensor], parts: Sequence) -> None:
    expected = [
        [((buffer.shape[0], len(part), *buffer.shape[2:]), buffer.dtype) for buffer in buffers]
        for part in parts
    ]
    _require_equal_shapes([_shapes(host) for host in copied], expected)


def _shapes(tensors: Sequence[torch.Tensor]) -> List[tuple]:
    return [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]


def _require_equal_shapes(actual: list, expected: list) -> None:
    if actual != expected:
        raise ValueError(
            f"KV copy of {actual} does not fit slots of {expected}; it can only be loaded into "
            "the same number of slots of a pool like the one it was copied from"
        )


def as_tokens(buffer: torch.Tensor) -> torch.Tensor:
    """Returns [layers, pages, slots of a page, ...] as [layers, tokens, ...], a view of it."""
    return buffer.view(buffer.shape[0], -1, *buffer.shape[3:])


def _synchronize(device: torch.device) -> None:
    torch.get_device_module(device).synchronize()
