"""The operators of ``torch_npu`` that write to the engine's NPU pools, for CPU tensors.

As on the device, an index outside the buffer raises an error and never writes elsewhere.
"""

import torch


def npu_scatter_nd_update_(
    buffer: torch.Tensor, indices: torch.Tensor, updates: torch.Tensor
) -> torch.Tensor:
    """Set row ``indices[i, 0]`` of ``buffer`` to ``updates[i]``, in place; returns ``buffer``.

    Shapes: ``buffer`` [rows, ...], ``indices`` [n, 1], ``updates`` [n, ...].

    Raises:
        IndexError: an index is negative or not below the number of rows.
        ValueError: shapes or dtypes do not match.
    """
    if indices.dim() != 2 or indices.shape[1] != 1:
        raise ValueError(f"indices have shape {tuple(indices.shape)}, expected [n, 1]")
    rows = indices[:, 0].long()
    if updates.dtype != buffer.dtype or updates.shape != (len(rows), *buffer.shape[1:]):
        raise ValueError(
            f"{len(rows)} updates {tuple(updates.shape)} of {updates.dtype} do not fit a buffer "
            f"{tuple(buffer.shape)} of {buffer.dtype}"
        )
    if ((rows < 0) | (rows >= len(buffer))).any():
        raise IndexError(f"indices {rows.tolist()} are outside a buffer of {len(buffer)} rows")
    buffer[rows] = updates
    return buffer


def _npu_reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_indices: torch.Tensor,
) -> None:
    """Write each token's key and value to its slot; slots are numbered through all pages.

    Shapes: ``key`` and ``value`` [tokens, heads, width], the caches [pages, page size, heads,
    width], ``slot_indices`` [tokens], int32.  Raises the errors of `npu_scatter_nd_update_`.
    """
    if slot_indices.dtype != torch.int32:
        raise ValueError(f"slot_indices have dtype {slot_indices.dtype}, expected torch.int32")
    for new, cache in ((key, key_cache), (value, value_cache)):
        slots = cache.view(-1, *cache.shape[2:])
        npu_scatter_nd_update_(slots, slot_indices.view(-1, 1), new)
