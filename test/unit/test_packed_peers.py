"""Whether a prefill rank sends head slices as whole rows to a decode rank, and who is told what."""

from itertools import product

import pytest
from head_layouts import addresses, head_buffers, layout, rank_of
from kv_layout import (
    OPAQUE,
    Buffer,
    Heads,
    PackedPlan,
    Pointers,
    StockRegistration,
    is_split_by_heads,
    make_permutations,
    plan_for_peer,
    prefill_ranks_of,
)
from kv_layout.peer import sends_whole_rows
from msgspec.structs import replace
from oracle import TOPOLOGIES, Model, SimulatedMemory

WHOLE_ROWS = {"whole_rows": True}
PAGES = ([1, 2, 4], [7, 3, 5])


def pointers(rank):
    return Pointers(addresses(rank.kv), addresses(rank.state, 1 << 50))


def plan(src, dst, can_pack=False):
    return plan_for_peer(src, pointers(src), dst, pointers(dst), can_pack)


def registration(rank):
    """What a stock rank with these buffers registers."""
    return StockRegistration(rank.tp_rank, rank.tp_size, len(rank.kv), len(rank.state))


@pytest.mark.parametrize(
    "prefill, decode, can_pack, sends",
    [
        ((2, True), (1, True), False, True),
        ((2, True), (1, False), True, False),  # SGLANG_PD_PACKED=0 on decode, or an older patch set
        ((2, False), (1, True), True, False),
        ((2, False), (1, False), True, False),
        ((1, True), (2, True), True, True),
        ((1, True), (2, False), True, True),  # decode has nothing to do
        ((1, True), (2, True), False, False),  # no packing buffer
        ((2, True), (2, True), True, False),
    ],
)
def test_whole_rows_are_sent_if_both_sides_can(prefill, decode, can_pack, sends):
    """Each side has a TP size, and may send and interleave whole rows or not."""
    src, dst = (rank_of(0, tp, more={"whole_rows": able}) for tp, able in (prefill, decode))
    assert sends_whole_rows(src, dst, can_pack) == sends
    made = plan(src, dst, can_pack)
    assert isinstance(made.kv, PackedPlan) == sends
    assert made.kv.is_sliced == (not sends and prefill[0] != decode[0])
    assert made.needs_interleaving == (sends and prefill[0] > decode[0])


MLA = Buffer("kv", False, 0, 1024)
DRAFT_HEADS = Heads(0, 4, 4)


@pytest.mark.parametrize(
    "kv, is_split",
    [
        ([Buffer("k", False, 0, 64, DRAFT_HEADS)], True),
        ([Buffer("k", False, 0, 64, DRAFT_HEADS), replace(MLA, draft=True)], True),
        ([], True),  # a stage without full attention
        ([MLA], False),
        ([MLA, Buffer("k", True, 0, 64, DRAFT_HEADS)], False),
        ([Buffer("k", False, 0, 64, DRAFT_HEADS), replace(MLA, layer=1)], False),
        ([Buffer(OPAQUE, False, 0, 64)], False),
    ],
)
@pytest.mark.parametrize("tp", [(2, 1), (1, 2)])
def test_whole_rows_are_sent_only_of_a_target_with_heads(kv, is_split, tp):
    """With MLA, one TP rank of a stage sends; its draft's heads would not come from all."""
    src, dst = (layout((0, size), kv, **WHOLE_ROWS) for size in tp)
    assert is_split_by_heads(src) == is_split
    assert sends_whole_rows(src, dst, can_pack=True) == is_split


@pytest.mark.parametrize("prefill_tp, decode_tp", [(4, 2), (2, 4), (8, 1), (1, 8)])
def test_stock_decode_is_sent_slices_or_packed_rows(prefill_tp, decode_tp):
    """It interleaves nothing, but rows that prefill packs arrive where they belong."""
    src = rank_of(prefill_tp - 1, prefill_tp, more=WHOLE_ROWS)
    dst = rank_of(decode_tp - 1, decode_tp)
    made = plan_for_peer(src, pointers(src), registration(dst), pointers(dst), can_pack=True)
    assert not made.needs_interleaving and not made.layout.whole_rows
    described = plan(src, dst, can_pack=True)
    assert made.kv.copies(*PAGES).lists() == described.kv.copies(*PAGES).lists()
    if prefill_tp > decode_tp:
        assert made.kv.is_sliced and not isinstance(made.kv, PackedPlan)
    else:
        rounds = [
            [one.copies(0).lists() for one in each.kv.rounds(*PAGES, 1 << 20)]
            for each in (made, described)
        ]
        assert rounds[0] and rounds[0] == rounds[1]


def with_windows(rank, size, total, window_total):
    """A rank with K and V of full attention, and of layers with a sliding window as its state."""
    windows = head_buffers(rank, size, window_total, names=("swa_k", "swa_v"))
    return rank_of(rank, size, total, more={"state": windows, **WHOLE_ROWS})


@pytest.mark.parametrize("totals", [(8, 8), (8, 2), (2, 8)])
def test_state_with_heads_is_sent_as_whole_rows_too(totals):
    """KV and state may have other numbers of heads, so that only one of them has parts."""
    src, dst = with_windows(1, 4, *totals), with_windows(0, 2, *totals)
    made = plan(src, dst)
    assert made.needs_interleaving
    assert not (made.kv.is_sliced or made.state.is_sliced)
    assert (made.kv.has_parts, made.state.has_parts) == tuple(total == 8 for total in totals)
    back = plan(dst, src, can_pack=True)
    assert not back.needs_interleaving
    assert (bool(back.kv.packs), bool(back.state.packs)) == tuple(total == 8 for total in totals)
    unsent = plan_for_peer(src, Pointers(addresses(src.kv)), dst, pointers(dst))
    assert unsent.state is None and unsent.needs_interleaving  # as other stages say


@pytest.mark.parametrize("draft_heads", [None, 1, 8])
@pytest.mark.parametrize("decode_drafts", [0, 1])
def test_all_prefill_ranks_agree_whether_they_report_chunks(draft_heads, decode_drafts):
    """Even one whose heads another rank sends, and a stage that sends whole pages only.

    They report chunks to each decode rank that interleaves.
    """
    sizes = {1, 2, 4, 8}
    stages = (([0], 0), ([1, 2], 1))  # layers and draft layers
    answers = set()
    for prefill, decode, total in TOPOLOGIES:
        if not (prefill > decode and {prefill, decode, total} <= sizes):
            continue
        model, world = Model(3, total, draft_heads=draft_heads), SimulatedMemory(2, 4)
        for rank in range(decode):
            receiver = world.rank(model, (rank, decode), (0, 1), [0, 1, 2], decode_drafts)
            theirs = replace(receiver.layout, whole_rows=True)
            plans = []
            for tp, pp in product(prefill_ranks_of(rank, prefill, decode), range(2)):
                sender = world.rank(model, (tp, prefill), (pp, 2), *stages[pp])
                ours = replace(sender.layout, whole_rows=True)
                given = (ours, Pointers(sender.pointers), theirs, Pointers(receiver.pointers))
                plans.append(plan_for_peer(*given))
            (reports,) = {each.needs_interleaving for each in plans}
            permutations = make_permutations(theirs, theirs.kv, receiver.pointers, prefill)
            assert reports == bool(permutations)
            answers.add(reports)
    assert True in answers


def test_chunks_of_packed_rows_are_not_reported():
    src, dst = rank_of(0, 1, more=WHOLE_ROWS), rank_of(1, 2, more=WHOLE_ROWS)
    made = plan(src, dst, can_pack=True)
    assert made.kv.packs and not (made.needs_interleaving or made.kv.has_parts)
