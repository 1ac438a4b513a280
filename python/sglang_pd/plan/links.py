"""Which rank sends what to which, for one request from one prefill to one decode group."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from sglang_pd.plan.core import kv_layout
from sglang_pd.plan.pair import ServerPair

TOKENS = 1024  # length of the request in the figures
# How the KV heads of a request go to a rank that holds others: as whole rows, or token by token.
WHOLE, PACKED, SLICED = "whole pages", "packed", "sliced"
# What a worker packs at a time if no other packs: a quarter of the default of 128 MiB.
PACKING_BYTES = 32 << 20


class RankId(NamedTuple):
    """A rank's attention TP rank and pipeline stage within its group."""

    tp: int
    pp: int

    def __str__(self) -> str:
        return f"TP {self.tp} PP {self.pp}"


@dataclass(frozen=True)
class SentPart:
    """One component of one layer, and its heads that are sent, as (start, stop); None for all."""

    component: str
    draft: bool
    layer: int
    heads: tuple[int, int] | None


@dataclass(frozen=True)
class Link:
    """What a request of `TOKENS` tokens takes from a prefill rank to a decode rank."""

    prefill: RankId
    decode: RankId
    # Whether prefill notifies decode when it is done; else decode does not wait for this rank.
    sends_status: bool
    parts: tuple[SentPart, ...]  # empty if another rank sends the same
    bytes: int = 0  # of KV and state
    min_copies: int = 0  # if all pages are contiguous
    max_copies: int = 0  # if no two pages are
    sliced_copies: int = 0  # the same with `SGLANG_PD_PACKED=0`
    kv_heads: str = WHOLE  # or PACKED, or SLICED
    # Whether prefill names, in a message of its own, the chunks that decode is to interleave.
    names_chunks: bool = False

    @property
    def messages(self) -> int:
        """Number of messages: decode's request, and those that prefill sends when it is done."""
        return 1 + self.sends_status + self.names_chunks


def refusal_reasons(pair: ServerPair) -> list[str]:
    """Returns every reason why the patched engine refuses this pair; empty if it serves it."""
    try:
        reasons = kv_layout.incompatibilities(*(pair.layout(side, 0, 0) for side in pair.sides))
        if not reasons:
            links(pair)
    except kv_layout.LayoutError as error:
        reasons = [str(error)]
    return reasons


def links(pair: ServerPair) -> list[Link]:
    """Returns all links of a pair, by decode rank. Raises LayoutError if the servers do not fit."""
    return [
        _link(pair, prefill, decode) if sends else Link(prefill, decode, False, ())
        for prefill, decode, sends in connections(pair)
    ]


def connections(pair: ServerPair) -> Iterator[tuple[RankId, RankId, bool]]:
    """Yields (prefill rank, decode rank, whether prefill sends), as the engine connects them."""
    stages = range(pair.decode.pp)
    for decode in (RankId(*both) for both in product(range(pair.tp[1]), stages)):
        served_by = kv_layout.prefill_ranks_of(decode.tp, *pair.tp)
        whole = range(pair.prefill.pp) if len(stages) == 1 else [decode.pp]
        for tp, pp in product(served_by, whole):
            # With MLA, all these TP ranks hold the same latent: one sends it.
            yield RankId(tp, pp), decode, not pair.model.is_mla or tp == served_by[0]


def _link(pair: ServerPair, prefill: RankId, decode: RankId) -> Link:
    own, peer = pair.layout("prefill", *prefill), pair.layout("decode", *decode)
    packed, sliced = (_plans(own, peer, is_packed) for is_packed in (pair.sends_kv_by_plan, False))
    parts, size, min_copies, max_copies, sliced_copies = [], 0, 0, 0, 0
    for which, (mine, theirs) in enumerate(((own.kv, peer.kv), (own.state, peer.state))):
        pages = _pages(pair, is_state=which == 1)
        contiguous, scattered = np.arange(pages), np.arange(pages) * 2
        min_copies += _count(packed[which], contiguous)
        max_copies += _count(packed[which], scattered)
        sliced_copies += _count(sliced[which], scattered)
        for one in kv_layout.match_buffers(own, peer, mine, theirs):
            buffer = mine[one.src]
            size += pages * one.row_bytes * (1 if one.whole else own.page_size)
            parts.append(SentPart(*buffer.key, _heads(one, buffer, own.page_size)))
    counts = (size, min_copies, max_copies, sliced_copies)
    names_chunks = (
        pair.names_chunks and pair.tp[0] > pair.tp[1] and kv_layout.is_split_by_heads(peer)
    )
    return Link(prefill, decode, True, tuple(parts), *counts, _kv_heads(packed), names_chunks)


def _plans(own, peer, is_packed: bool) -> tuple:
    """Returns the plans of KV and of state; `is_packed`: both servers have SGLANG_PD_PACKED=1."""
    own, peer = (replace(one, whole_rows=is_packed) for one in (own, peer))
    sides = [kv_layout.Pointers([0] * len(one.kv), [0] * len(one.state)) for one in (own, peer)]
    plan = kv_layout.plan_for_peer(own, sides[0], peer, sides[1], can_pack=is_packed)
    return plan.kv, plan.state


def _count(plan, pages: np.ndarray) -> int:
    """Returns the number of copies if both sides have the request in these pages, as one chunk."""
    rounds = plan.rounds(pages, pages, PACKING_BYTES) if _is_packed(plan) else ()
    return len(plan.copies(pages, pages)) + sum(len(one.copies(0)) for one in rounds)


def _kv_heads(plans: tuple) -> str:
    if any(plan.is_sliced for plan in plans):
        return SLICED
    moved = any(_is_packed(plan) and (plan.packs or plan.has_parts) for plan in plans)
    return PACKED if moved else WHOLE


def _is_packed(plan) -> bool:
    return isinstance(plan, kv_layout.PackedPlan)


def _heads(match, ours: "kv_layout.Buffer", page_size: int) -> tuple[int, int] | None:
    """Returns the heads that a pair of buffers carries, derived from the copied bytes."""
    if ours.heads is None:
        return None
    if match.whole:
        return ours.heads.start, ours.heads.stop
    each = ours.page_bytes // page_size // ours.heads.count
    start = ours.heads.start + match.src_offset // each
    return start, start + match.row_bytes // each


def _pages(pair: ServerPair, is_state: bool) -> int:
    """Returns the request's number of pages: 1 slot of recurrent state, at most one window."""
    tokens = TOKENS
    if is_state and pair.model.recurrent:
        return 1
    if is_state and pair.model.window:
        tokens = min(tokens, pair.model.window)
    return -(-tokens // pair.prefill.page)
