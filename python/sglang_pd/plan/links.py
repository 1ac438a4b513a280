"""Who sends what to whom, for one request between one group of either server."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import numpy as np

from sglang_pd.plan.core import kv_layout
from sglang_pd.plan.pair import ServerPair

TOKENS = 1024  # of the request that is counted


class RankId(NamedTuple):
    """Attention TP rank and stage of a rank, in its group."""

    tp: int
    pp: int

    def __str__(self) -> str:
        return f"TP {self.tp} PP {self.pp}"


@dataclass(frozen=True)
class SentPart:
    """One component of one layer, of which these heads are sent; None where all of it is."""

    component: str
    draft: bool
    layer: int
    heads: tuple[int, int] | None


@dataclass(frozen=True)
class Link:
    """What a request of `TOKENS` tokens takes from a prefill rank to a decode rank.

    Attributes:
        answers: Prefill says when it is done; else it is asked, and decode does not wait for it.
        shares: What is sent; empty where another rank sends the same.
        bytes: Of KV and state.
        fewest, most: Copies if all pages lie in a row, and if no two do.
    """

    prefill: RankId
    decode: RankId
    sends_status: bool
    parts: tuple[SentPart, ...]
    bytes: int
    min_copies: int
    most: int

    @property
    def messages(self) -> int:
        """Decode's that asks for the request, and prefill's that it is done."""
        return 1 + self.sends_status


class LayoutCache(dict):
    """By side and `Rank`; of a rank nobody asked for, made on the spot."""

    def __init__(self, pair: ServerPair):
        self.pair = pair

    def __missing__(self, key: tuple[str, RankId]):
        self[key] = self.pair.layout(key[0], *key[1])
        return self[key]


def refusal_reasons(pair: ServerPair) -> list[str]:
    """Every reason for which the patched engine refuses this pair; empty if it serves."""
    layouts, first = LayoutCache(pair), RankId(0, 0)
    try:
        sides = layouts["prefill", first], layouts["decode", first]
        reasons = kv_layout.incompatibilities(*sides)
        if not reasons:
            list(_links(pair, layouts))
    except kv_layout.LayoutError as error:
        reasons = [str(error)]
    return reasons


def links(pair: ServerPair) -> list[Link]:
    """All links of a pair that fits, by decode rank.

    Raises:
        LayoutError: It does not.
    """
    return list(_links(pair, LayoutCache(pair)))


def connections(pair: ServerPair) -> Iterator[tuple[RankId, RankId, bool]]:
    """Prefill rank, decode rank, and whether the first is to send, as the engine connects them."""
    stages = range(pair.decode.pp)
    for decode in (RankId(*both) for both in product(range(pair.tp[1]), stages)):
        served_by = kv_layout.prefill_ranks_of(decode.tp, *pair.tp)
        whole = range(pair.prefill.pp) if len(stages) == 1 else [decode.pp]
        for tp, pp in product(served_by, whole):
            # All of them hold the same latent: one sends it.
            yield RankId(tp, pp), decode, not pair.model.is_mla or tp == served_by[0]


def _links(pair: ServerPair, layouts: LayoutCache) -> Iterator[Link]:
    for prefill, decode, sends in connections(pair):
        if sends:
            yield _link(
                pair, prefill, decode, *(layouts["prefill", prefill], layouts["decode", decode])
            )
        else:
            yield Link(prefill, decode, False, (), 0, 0, 0)


def _link(pair: ServerPair, prefill: RankId, decode: RankId, own, peer) -> Link:
    sides = [kv_layout.Pointers([0] * len(one.kv), [0] * len(one.state)) for one in (own, peer)]
    plan = kv_layout.plan_for_peer(own, sides[0], peer, sides[1])
    parts, size, min_copies, most = [], 0, 0, 0
    for part, mine, theirs in ((plan.kv, own.kv, peer.kv), (plan.state, own.state, peer.state)):
        pages = _pages(pair, part is plan.state)
        contiguous, scattered = np.arange(pages), np.arange(pages) * 2
        min_copies += len(part.copies(contiguous, contiguous))
        most += len(part.copies(scattered, scattered))
        for one in kv_layout.match_buffers(own, peer, mine, theirs):
            buffer = mine[one.src]
            size += pages * one.row_bytes * (1 if one.whole else own.page_size)
            parts.append(SentPart(*buffer.key, _heads(one, buffer, theirs[one.dst], own.page_size)))
    return Link(prefill, decode, True, tuple(parts), size, min_copies, most)


def _heads(pair, ours, theirs, page_size: int) -> tuple[int, int] | None:
    """Which heads a pair of buffers carries, read off the bytes that are copied."""
    if ours.heads is None:
        return None
    if pair.whole:
        return ours.heads.start, ours.heads.stop
    each = ours.page_bytes // page_size // ours.heads.count
    start = ours.heads.start + pair.src_offset // each
    return start, start + pair.row_bytes // each


def _pages(pair: ServerPair, is_state: bool) -> int:
    """Of the request: of recurrent state its slot, of windows what they reach back."""
    tokens = TOKENS
    if is_state and pair.model.recurrent:
        return 1
    if is_state and pair.model.window:
        tokens = min(tokens, pair.model.window)
    return -(-tokens // pair.prefill.page)
