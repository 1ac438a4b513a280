"""Torch versions of the kernels with which releases after 0.5.9 assign drafted tokens' slots.

Each has the name and arguments of the ``sgl_kernel`` function that it replaces: ``start`` and
``end`` [requests] bound a part of each request's row in ``req_to_token``; flat tensors concatenate
the parts of all requests.
"""

import ctypes
from collections.abc import Iterator
from types import ModuleType

import torch


def _row_parts(rows, start, end, req_to_token) -> Iterator[torch.Tensor]:
    for row, first, last in zip(rows.tolist(), start.tolist(), end.tolist()):
        yield req_to_token[row, first:last]


def assign_req_to_token_pool_cpu(rows, req_to_token, start, end, out_cache_loc, width) -> None:
    """Write the new slots in ``out_cache_loc`` to the requests' rows."""
    taken = 0
    for part in _row_parts(rows, start, end, req_to_token):
        part.copy_(out_cache_loc[taken : taken + len(part)])
        taken += len(part)


def assign_extend_cache_locs_cpu(rows, req_to_token, start, end, out_cache_loc, width) -> None:
    """Read slots from the requests' rows into ``out_cache_loc``."""
    slots = torch.cat([*_row_parts(rows, start, end, req_to_token)])
    out_cache_loc[: len(slots)] = slots


def assign_draft_cache_locs_contiguous_cpu(
    rows, req_to_token, seq_lens, out_cache_loc, width, topk, columns
) -> None:
    """Read the slots after each request's tokens, for all tokens that it will draft."""
    end = seq_lens + topk * columns
    assign_extend_cache_locs_cpu(rows, req_to_token, seq_lens, end, out_cache_loc, width)


def fill_bonus_tokens_cpu(accept_tokens, accept_lens, bonus_tokens, stride) -> None:
    """Copy each request's last accepted token; a request's tokens take ``stride`` places."""
    last = torch.arange(len(accept_lens)) * stride + accept_lens - 1
    bonus_tokens.copy_(accept_tokens.flatten()[last])


def fill_accept_out_cache_loc_cpu(accept_index, out_cache_loc, accept_out_cache_loc) -> None:
    """Copy the slots of accepted tokens, in order; an index of -1 is not an accepted token."""
    accepted = out_cache_loc[accept_index[accept_index >= 0].long()]
    accept_out_cache_loc[: len(accepted)] = accepted


def copy_all_layer_kv_cache_cpu(data_ptrs, strides, targets, sources) -> None:
    """Copy rows ``sources`` to ``targets`` in each buffer; ``strides`` are bytes per row."""
    for pointer, stride in zip(data_ptrs.tolist(), strides.tolist()):
        rows = [ctypes.string_at(pointer + row * stride, stride) for row in sources.tolist()]
        for target, row in zip(targets.tolist(), rows):
            ctypes.memmove(pointer + target * stride, row, stride)


def install(module: ModuleType) -> None:
    """Replace the functions that a module of the engine imports by name with those above."""
    for name, function in globals().items():
        if name.endswith("_cpu") and hasattr(module, name):
            setattr(module, name, function)
