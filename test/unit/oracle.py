"""Two PD servers in simulated memory, and what decode must hold after a transfer, head by head.

Nothing here computes an interval or an offset: heads and layers are listed one by one, and each
(component, model, layer, head, token) is a number that must be where it belongs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count, product

import numpy as np
from kv_layout import (
    Buffer,
    Heads,
    Pointers,
    RankLayout,
    StockRegistration,
    byte_ranges,
    describe_difference,
    missing_parts,
    plan_for_peer,
    position_weights,
    prefill_ranks_of,
    sent_parts,
    summarize,
)

GAP = 1 << 32  # bytes between the buffers' simulated addresses
UNTOUCHED = -1


def deal_heads(total: int, ranks: int) -> list[list[int]]:
    """The heads of each rank: equal shares, or each head on several consecutive ranks."""
    if total >= ranks:
        return [hand.tolist() for hand in np.array_split(np.arange(total), ranks)]
    return [[head] for head in range(total) for _ in range(ranks // total)]


def can_split(total: int, ranks: int) -> bool:
    return total % ranks == 0 or ranks % total == 0


# Every (prefill TP, decode TP, number of KV heads) up to 16 that the engine can serve.
TOPOLOGIES = [
    (prefill, decode, total)
    for prefill, decode, total in product(range(1, 17), repeat=3)
    if can_split(prefill, decode) and can_split(total, prefill) and can_split(total, decode)
]


@dataclass(frozen=True)
class Model:
    """A model; `widths` are int64 elements per head, or per token for opaque components."""

    layers: int
    kv_heads: int | None = None  # None: MLA, components are opaque
    widths: dict[str, int] = field(default_factory=lambda: {"k": 2, "v": 2})
    draft_heads: int | None = None


@dataclass
class SimulatedRank:
    layout: RankLayout
    pointers: list[int]
    memory: dict[int, np.ndarray]  # address -> int64 [pages, page_size, heads or 1, width]
    heads: dict[bool, list[int]]


class SimulatedMemory:
    """Assigns addresses and performs copies between them."""

    def __init__(self, page_size: int, pages: int):
        self.page_size, self.pages = page_size, pages
        self._next = count(1)
        self._bytes: dict[int, np.ndarray] = {}

    def rank(
        self,
        model: Model,
        tp: tuple[int, int],
        pp: tuple[int, int],
        layers: list[int],
        drafts: int,
    ) -> SimulatedRank:
        held = {
            False: self._heads_of(model.kv_heads, tp),
            True: self._heads_of(model.draft_heads or model.kv_heads, tp),
        }
        buffers, pointers, memory = [], [], {}
        for is_draft, numbers in ((False, layers), (True, range(drafts))):
            total = model.draft_heads or model.kv_heads if is_draft else model.kv_heads
            for component, width in model.widths.items():
                for layer in numbers:
                    shape = (self.pages, self.page_size, len(held[is_draft]), width)
                    array = np.full(shape, UNTOUCHED, dtype=np.int64)
                    address = self.register(array)
                    heads = total and Heads(held[is_draft][0], held[is_draft][-1] + 1, total)
                    buffers.append(
                        Buffer(
                            component, is_draft, layer, array[0].nbytes, heads or None, self.pages
                        )
                    )
                    pointers.append(address)
                    memory[address] = array
        layout = RankLayout(*tp, *pp, self.page_size, "int64", "DRAM", model.layers, tuple(buffers))
        return SimulatedRank(layout, pointers, memory, held)

    def register(self, array: np.ndarray) -> int:
        """The array's address, from and to which copies may lead."""
        number = next(self._next)
        self._bytes[number] = array.reshape(-1).view(np.uint8)
        return number * GAP

    @staticmethod
    def _heads_of(total: int | None, tp: tuple[int, int]) -> list[int]:
        return [0] if total is None else deal_heads(total, tp[1])[tp[0]]

    def apply(self, copies) -> None:
        for src, dst, length in copies.arrays().T:
            into, at = self._bytes[dst // GAP], dst % GAP
            out_of, start = self._bytes[src // GAP], src % GAP
            assert at + length <= into.size and start + length <= out_of.size, "outside a buffer"
            into[at : at + length] = out_of[start : start + length]


def values(model: Model, buffer: Buffer, heads: list[int], tokens: int, width: int) -> np.ndarray:
    """The numbers of the request's tokens, `[tokens, heads, width]`; no two are equal."""
    component = list(model.widths).index(buffer.component)
    places = np.array(heads)[:, None], np.arange(tokens)[:, None, None], np.arange(width)
    number = component
    for digit in (int(buffer.draft), buffer.layer, *places):
        number = number * 4096 + digit
    return number


def fill(model: Model, rank: SimulatedRank, pages: list[int]) -> None:
    """Writes the request's tokens into these pages of a prefill rank."""
    for buffer, address in zip(rank.layout.kv, rank.pointers):
        fill_pages(rank.memory[address], model, rank, buffer, pages)


def fill_pages(
    array: np.ndarray, model: Model, rank: SimulatedRank, buffer: Buffer, pages: list[int]
) -> None:
    _, page_size, _, width = array.shape
    held = rank.heads[buffer.draft]
    numbers = values(model, buffer, held, len(pages) * page_size, width)
    array[pages] = numbers.reshape(len(pages), *array.shape[1:])


def check_received(model: Model, rank: SimulatedRank, pages: list[int], sent: set) -> None:
    """Checks all elements of a decode rank: the request's where sent, untouched elsewhere."""
    for buffer, address in zip(rank.layout.kv, rank.pointers):
        array = rank.memory[address]
        expected = np.full_like(array, UNTOUCHED)
        if (buffer.draft, buffer.layer) in sent:
            fill_pages(expected, model, rank, buffer, pages)
        np.testing.assert_array_equal(array, expected, err_msg=f"{rank.layout.name}: {buffer.name}")


def digests(rank: SimulatedRank, parts, pages: list[int]):
    """Digests of these parts of a rank's memory; a page's is a weighted sum of its bytes."""
    table = np.empty((len(parts), len(pages)), np.uint64)
    for number, where in enumerate(byte_ranges(parts, rank.layout, rank.layout.kv)):
        whole = rank.memory[rank.pointers[where.buffer]].view(np.uint8)
        rows = whole.reshape(len(whole), where.rows, -1)[pages]
        held = rows[:, :, where.start : where.start + where.length]
        held = held.reshape(len(pages), where.rows * where.length)
        table[number] = (held * position_weights(held.shape[1])).sum(axis=1, dtype=np.uint64)
    return summarize(tuple(parts), table)


def check_digests(
    senders: list[SimulatedRank], receiver: SimulatedRank, src_pages, dst_pages
) -> None:
    """Checks that the receiver has what these ranks sent, and that they sent all of it."""
    own, sent = receiver.layout, []
    for sender in senders:
        parts = sent_parts(sender.layout, own, sender.layout.kv, own.kv)
        there, here = (
            digests(*of) for of in ((sender, parts, src_pages), (receiver, parts, dst_pages))
        )
        assert describe_difference(there, here, own.page_size) is None
        sent += parts
    assert missing_parts(own.kv, sent) == []


def run_transfer(
    model: Model,
    prefill_tp: int,
    decode_tp: int,
    stages: list[list[int]],
    decode_stages: list[list[int]] | None = None,
    prefill_drafts: int = 0,
    decode_drafts: int = 0,
    page_size: int = 2,
    src_pages: list[int] = (1, 2, 4),
    dst_pages: list[int] = (3, 4, 0),
    stock_decode: bool = False,
) -> int:
    """Sends one request to all decode ranks and checks it; returns the number of copies.

    Args:
        model: The model of both servers.
        prefill_tp, decode_tp: TP sizes.
        stages: The layers of each prefill stage; the last one has the draft's layers, too.
        decode_stages: The same for decode; None without pipeline stages.
        prefill_drafts, decode_drafts: Numbers of draft layers.
        page_size: Tokens per page.
        src_pages, dst_pages: The request's pages on prefill and on decode.
        stock_decode: Whether decode ranks do not describe their layouts.
    """
    world = SimulatedMemory(page_size, pages=8)
    wanted = decode_stages or [list(range(model.layers))]
    last = len(stages) - 1
    senders = {
        (tp, pp): world.rank(
            model,
            (tp, prefill_tp),
            (pp, len(stages)),
            layers,
            prefill_drafts if pp == last else 0,
        )
        for tp in range(prefill_tp)
        for pp, layers in enumerate(stages)
    }
    for sender in senders.values():
        fill(model, sender, list(src_pages))
    copies_made = 0
    for pp, layers in enumerate(wanted):
        drafts = decode_drafts if pp == len(wanted) - 1 else 0
        for tp in range(decode_tp):
            receiver = world.rank(model, (tp, decode_tp), (pp, len(wanted)), layers, drafts)
            served_by = []
            for (sender_tp, sender_pp), sender in senders.items():
                connected = sender_tp in prefill_ranks_of(tp, prefill_tp, decode_tp)
                if not connected or (len(wanted) > 1 and sender_pp != pp):
                    continue
                if model.kv_heads is None and sender_tp * decode_tp // prefill_tp != tp:
                    continue
                served_by.append(sender)
                peer = receiver.layout
                if stock_decode:
                    peer = StockRegistration(tp, decode_tp, len(receiver.pointers))
                plan = plan_for_peer(
                    sender.layout, Pointers(sender.pointers), peer, Pointers(receiver.pointers)
                )
                copies = plan.kv.copies(list(src_pages), list(dst_pages))
                copies_made += len(copies)
                world.apply(copies)
            sent = {(False, layer) for layer in layers}
            sent |= {(True, layer) for layer in range(min(prefill_drafts, drafts))}
            check_received(model, receiver, list(dst_pages), sent)
            check_digests(served_by, receiver, list(src_pages), list(dst_pages))
    return copies_made


def stages_of_sizes(sizes: list[int]) -> list[list[int]]:
    """Stages of these sizes, such as 23/23/24/24."""
    edges = np.cumsum([0, *sizes])
    return [list(range(a, b)) for a, b in zip(edges[:-1].tolist(), edges[1:].tolist())]
