"""Ranks with KV heads in pools of this process, as far as packing and interleaving know them."""

from types import SimpleNamespace

import numpy as np
import torch
from engine_calls import by_kind
from sglang.srt.disaggregation.kv_layout import (
    Buffer,
    PeerPlan,
    Pointers,
    RankLayout,
    heads_of_rank,
    page_slots,
    plan_for_peer,
)
from sglang.srt.disaggregation.pd.memory_registration import flatten
from sglang.srt.disaggregation.pd.pool_views import find_views
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

HEADS, LAYERS = 4, 2  # of the model
PAGE_SIZE, PAGES = 4, 64
WIDTHS = {"head_dim": 32, "v_head_dim": 48}  # of K and V


def mha_pool(heads: int, layers: int = LAYERS) -> MHATokenToKVPool:
    """A pool of K and V of random bytes."""
    made = MHATokenToKVPool(
        size=(PAGES - 1) * PAGE_SIZE,
        page_size=PAGE_SIZE,
        dtype=torch.bfloat16,
        head_num=heads,
        layer_num=layers,
        device="cpu",
        enable_memory_saver=False,
        **WIDTHS,
    )
    for buffer in (*made.k_buffer, *made.v_buffer):
        buffer.view(torch.uint8).random_(256)
    return made


def describe(pool, components: tuple[str, str], tp: tuple[int, int]) -> tuple[Buffer, ...]:
    """Describes a pool's K and V under these names; `tp` is the TP rank and the TP size."""
    _, lengths, sizes = pool.get_contiguous_buf_infos()
    keys = [(name, layer) for name in components for layer in range(pool.layer_num)]
    held = heads_of_rank(*tp, HEADS)
    return tuple(
        Buffer(name, False, layer, size, held, length // size)
        for (name, layer), length, size in zip(keys, lengths, sizes, strict=True)
    )


def rank_args(rank: int, size: int) -> SimpleNamespace:
    """The `KVArgs` of a TP rank: KV in one pool and sliding windows in another, and their views."""
    kv, windows = (mha_pool(heads_of_rank(rank, size, HEADS).count) for _ in range(2))
    described = [describe(kv, ("k", "v"), (rank, size))]
    described.append(describe(windows, ("swa_k", "swa_v"), (rank, size)))
    shape = (rank, size, 0, 1, PAGE_SIZE, "bfloat16", "DRAM", LAYERS)
    layout = RankLayout(*shape, *described, whole_rows=True)
    (ptrs, lens, _), (state_ptrs, state_lens, _) = (
        pool.get_contiguous_buf_infos() for pool in (kv, windows)
    )
    args = SimpleNamespace(
        layout=layout,
        kv_data_ptrs=ptrs,
        kv_data_lens=lens,
        state_data_ptrs=by_kind(state_ptrs),
        state_data_lens=by_kind(state_lens),
        aux_data_ptrs=[],
        aux_data_lens=[],
        pools=(kv, windows),
        packing=None,
    )
    args.views = find_views(args, args.pools)
    return args


def plan_between(prefill: SimpleNamespace, decode: SimpleNamespace) -> PeerPlan:
    """The plan from a prefill rank that can pack."""
    ours, theirs = (
        Pointers(one.kv_data_ptrs, flatten(one.state_data_ptrs)) for one in (prefill, decode)
    )
    return plan_for_peer(prefill.layout, ours, decode.layout, theirs, can_pack=True)


def contents(args: SimpleNamespace) -> list[np.ndarray]:
    """A copy of all bytes of a rank, one array for each buffer, `[slots, bytes per row]`."""
    return [rows(pages).copy() for pages in (*args.views.kv, *args.views.state)]


def rows(pages: torch.Tensor) -> np.ndarray:
    """A buffer in place, `[slots, bytes per row]`."""
    return pages.numpy().reshape(len(pages) * PAGE_SIZE, -1)


def land_as_parts(buffer: torch.Tensor, pages, parts: int) -> None:
    """Rearranges the rows of a unit's pages as prefill ranks write them, part after part."""
    held, slots = rows(buffer), page_slots(pages, PAGE_SIZE)
    shape = len(slots), held.shape[1]
    tokens = held[slots].reshape(shape[0], parts, shape[1] // parts)
    held[slots] = tokens.swapaxes(0, 1).reshape(shape)
