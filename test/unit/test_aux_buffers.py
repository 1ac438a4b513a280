"""Where metadata rows are sent between two sides whose rows may differ in width."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_layout import (
    HIDDEN_STATES,
    Buffer,
    LayoutError,
    Pointers,
    RankLayout,
    StockRegistration,
    make_aux_plan,
    plan_for_peer,
    unsent_rows_message,
)

COMMON = (64, 64, 64, 64, 512, 512, 64, 128)
NARROW, WIDE = (*COMMON, 64, 64), (*COMMON, 14336, 64)
SRC, DST = [10_000 * (i + 1) for i in range(10)], [1_000_000 * (i + 1) for i in range(10)]


def rank(aux=(), slots=0, draft=False):
    kv = [Buffer("kv", False, 0, 64)] + [Buffer("kv", True, 0, 64)] * draft
    return RankLayout(0, 1, 0, 1, 16, "bfloat16", "DRAM", 1, tuple(kv), (), aux, slots)


def sent_rows(src, dst):
    return set(make_aux_plan(src, dst).rows)


ALL_ROWS = set(range(10))
ALL_BUT_HIDDEN_STATES = ALL_ROWS - {HIDDEN_STATES}


@pytest.mark.parametrize(
    "src, dst, rows",
    [
        (rank(NARROW), rank(NARROW), ALL_ROWS),
        (rank(WIDE, draft=True), rank(WIDE, draft=True), ALL_ROWS),
        (rank(WIDE, draft=True), rank(NARROW), ALL_BUT_HIDDEN_STATES),
        (rank(NARROW), rank(WIDE, draft=True), ALL_BUT_HIDDEN_STATES),
        (rank(WIDE), rank(NARROW), ALL_BUT_HIDDEN_STATES),  # a stage without the draft's KV
        (rank((*COMMON, 0, 64)), rank((*COMMON, 0, 64)), ALL_BUT_HIDDEN_STATES),  # STANDALONE
    ],
)
def test_rows_of_equal_width_are_sent(src, dst, rows):
    assert sent_rows(src, dst) == rows


@pytest.mark.parametrize(
    "src, draft, rows",
    [
        (rank(NARROW), False, ALL_ROWS),
        (rank(WIDE, draft=True), True, ALL_ROWS),
        (rank(WIDE, draft=True), False, ALL_BUT_HIDDEN_STATES),
        (rank(WIDE), False, ALL_BUT_HIDDEN_STATES),
        (rank(NARROW), True, ALL_BUT_HIDDEN_STATES),
        (rank((*COMMON, 0, 64), draft=True), True, ALL_BUT_HIDDEN_STATES),
    ],
)
def test_rows_for_peer_without_widths_depend_on_draft(src, draft, rows):
    """A stock peer's pointers show the draft; the previous version describes its buffers."""
    assert sent_rows(src, rank(draft=draft)) == rows
    pointers = [Pointers(range(len(src.kv))), Pointers(range(1 + draft))]
    plan = plan_for_peer(src, pointers[0], StockRegistration(0, 1, 1 + draft), pointers[1])
    assert set(plan.aux.rows) == rows


@settings(max_examples=150, deadline=None)
@given(
    src=st.sampled_from([NARROW, WIDE]),
    dst=st.sampled_from([NARROW, WIDE]),
    slots=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    slot=st.tuples(st.integers(-1, 7), st.integers(-1, 7)),
)
def test_aux_copies_stay_in_slot(src, dst, slots, slot):
    """The whole slot of each sent row is copied, by each side's own width, and no other byte."""
    plan = make_aux_plan(rank(src, slots[0]), rank(dst, slots[1]))
    if not all(0 <= one < count for one, count in zip(slot, slots)):
        with pytest.raises(LayoutError, match=f"slot {slot[0]} of {slots[0]}, decode has .* slot"):
            plan.copies(SRC, slot[0], DST, slot[1])
        return
    copies = plan.copies(SRC, slot[0], DST, slot[1])
    assert copies.dtype == np.int64 and copies.shape == (3, len(plan.rows))
    for row, (at, to, size) in zip(plan.rows, copies.T.tolist()):
        assert at == SRC[row] + src[row] * slot[0]
        assert to == DST[row] + dst[row] * slot[1]
        assert size == src[row] == dst[row]


def test_stock_peer_slots_end_at_next_buffer():
    """Buffers are a million bytes apart; the rows of 512 bytes have the fewest slots."""
    plan = make_aux_plan(rank(NARROW, 4), rank())
    plan.copies(SRC, 3, DST, 1952)
    for slots in ((4, 1000), (3, -1), (3, 1953)):
        with pytest.raises(LayoutError, match=f"has set aside slot {slots[1]} of 1953"):
            plan.copies(SRC, slots[0], DST, slots[1])


def test_refuses_pointer_count_unlike_row_count():
    plan = make_aux_plan(rank(NARROW, 4), rank())
    with pytest.raises(LayoutError, match="prefill registered 10 metadata buffers, decode 9, and"):
        plan.copies(SRC, 0, DST[:9], 0)


@pytest.mark.parametrize(
    "theirs, said",
    [
        (NARROW[:9], "metadata rows: prefill has 10, decode has 9"),
        ((32, *NARROW[1:]), "first and the last must be equal"),
        ((*NARROW[:9], 8), "first and the last must be equal"),
    ],
)
def test_refuses_peer_with_incompatible_rows(theirs, said):
    with pytest.raises(LayoutError, match=said):
        plan_for_peer(rank(NARROW), Pointers([1]), rank(theirs), Pointers([2]))


def test_message_for_unsent_rows():
    begins = "metadata rows of unequal width are not sent: row 8 (hidden states),"
    said = [
        unsent_rows_message(rank(WIDE, draft=True), rank(NARROW)),
        unsent_rows_message(rank(NARROW), rank(WIDE, draft=True)),
        unsent_rows_message(rank(NARROW), rank(draft=True)),
    ]
    assert said == [
        f"{begins} 14336 bytes on prefill, 64 on decode",
        f"{begins} 64 bytes on prefill, 14336 on decode",
        f"{begins} 64 bytes on prefill, an unknown number on decode",
    ]
    assert unsent_rows_message(rank(WIDE), rank(WIDE)) is None
    assert unsent_rows_message(rank(NARROW), rank()) is None
    assert unsent_rows_message(rank(WIDE), rank((*COMMON, 0, 64), draft=True)) is None
