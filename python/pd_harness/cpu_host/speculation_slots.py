"""Where releases after 0.5.9 keep a speculating server's tokens: the kernels for that, in torch.

Each stands in for a function of ``sgl_kernel``, whose name and arguments it has: ``start`` and
``end`` [requests] bound a part of each request's row in ``req_to_token``; flat tensors have the
parts of all requests one after the other.
"""

import ctypes
from collections.abc import Iterator
from types import ModuleType

import torch


def _row_parts(rows, start, end, req_to_token) -> Iterator[torch.Tensor]:
    for row, first, last in zip(rows.tolist(), start.tolist(), end.tolist()):
        yield req_to_token[row, first:last]


def assign_req_to_token_pool_cpu(rows, req_to_token, start, end, out_cache_loc, width) -> None:
    """Write new slots into the requests' rows."""
    taken = 0
    for part in _row_parts(rows, start, end, req_to_token):
        part.copy_(out_cache_loc[taken : taken + len(part)])
        taken += len(part)


def assign_extend_cache_locs_cpu(rows, req_to_token, start, end, out_cache_loc, width) -> None:
    """Read slots out of the requests' rows."""
    slots = torch.cat([*_row_parts(rows, start, end, req_to_token)])
    out_cache_loc[: len(slots)] = slots


def assign_draft_cache_locs_contiguous_cpu(
    rows, req_to_token, seq_lens, out_cache_loc, width, topk, columns
) -> None:
    """Read the slots that follow each request's tokens, for all that it will draft."""
    end = seq_lens + topk * columns
    assign_extend_cache_locs_cpu(rows, req_to_token, seq_lens, end, out_cache_loc, width)


def fill_bonus_tokens_cpu(accept_tokens, accept_lens, bonus_tokens, stride) -> None:
    """The last accepted token of each request; their tokens stand ``stride`` apart."""
    last = torch.arange(len(accept_lens)) * stride + accept_lens - 1
    bonus_tokens.copy_(accept_tokens.flatten()[last])


def fill_accept_out_cache_loc_cpu(accept_index, out_cache_loc, accept_out_cache_loc) -> None:
    """The slots of accepted tokens, in order; an index of -1 is none."""
    accepted = out_cache_loc[accept_index[accept_index >= 0].long()]
    accept_out_cache_loc[: len(accepted)] = accepted


def copy_all_layer_kv_cache_cpu(data_ptrs, strides, targets, sources) -> None:
    """Copy rows of each buffer onto others; a buffer's address and bytes a row are given."""
    for pointer, stride in zip(data_ptrs.tolist(), strides.tolist()):
        rows = [ctypes.string_at(pointer + row * stride, stride) for row in sources.tolist()]
        for target, row in zip(targets.tolist(), rows):
            ctypes.memmove(pointer + target * stride, row, stride)


def install(module: ModuleType) -> None:
    """Give a module of the engine those of the functions above that it imports by name."""
    for name, function in globals().items():
        if name.endswith("_cpu") and hasattr(module, name):
            setattr(module, name, function)
