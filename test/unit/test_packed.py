"""Head slices that are sent as whole rows: every byte arrives, for any sizes, pages and chunks."""

import re
from itertools import product

import kv_layout
import msgspec
import numpy as np
import pytest
from head_layouts import addresses, layout, rank_of
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kv_layout import (
    OPAQUE,
    Buffer,
    Heads,
    LayoutError,
    Permutation,
    StockRegistration,
    infer_layout,
    make_packed_plan,
    make_permutations,
    page_slots,
    prefill_ranks_of,
    split_unit,
    unpacked_reason,
)
from oracle import (
    TOPOLOGIES,
    Model,
    SimulatedMemory,
    check_received,
    fill,
    stages_of_sizes,
)

SIZES_TO_8 = [one for one in TOPOLOGIES if max(one[:2]) <= 8]
UNEQUAL = [one for one in SIZES_TO_8 if one[0] != one[1]]


def packed_plan(src, dst):
    """The plan between two of the oracle's ranks."""
    sides = (src.layout.kv, src.pointers, dst.layout.kv, dst.pointers)
    return make_packed_plan(src.layout, dst.layout, *sides)


def rows_of(rank, number):
    """One of a rank's buffers as bytes, `[slots, bytes per row]`."""
    pages = rank.memory[rank.pointers[number]]
    return pages.view(np.uint8).reshape(pages.shape[0] * pages.shape[1], -1)


def packed_copies(plan, sender, memory, address, src, dst):
    """Packs round after round into this memory, and yields each round's copies."""
    for each in plan.rounds(src, dst, memory.size):
        group, start = each.group, each.group.start
        assert all(number % group.word == 0 for number in (start, group.length))
        heads = slice(start, start + group.length)
        packed = np.concatenate([rows_of(sender, i)[each.slots, heads] for i in group.buffers])
        assert packed.nbytes <= memory.size
        memory[:] = 0xEE  # what an earlier round has left is not sent
        memory[: packed.nbytes] = packed.reshape(-1)
        yield each.copies(address)


def check_disjoint(writes):
    """Checks that no two copies, of any ranks, write the same byte."""
    _, dst, length = np.concatenate(writes, axis=1)
    order = dst.argsort()
    assert (length > 0).all()
    assert ((dst + length)[order][:-1] <= dst[order][1:]).all()


def write(world, sender, receiver, memory, address, src, dst):
    """Sends a unit from one rank to another; returns the plan and all copies, `[3, copies]`."""
    plan = packed_plan(sender, receiver)
    assert not plan.is_sliced
    done = [plan.copies(src, dst)]
    world.apply(done[0])
    for copies in packed_copies(plan, sender, memory, address, src, dst):
        world.apply(copies)
        done.append(copies)
    return plan, np.concatenate([copies.arrays() for copies in done], axis=1)


def permute(receiver, prefill_tp, units):
    """Interleaves units of pages as a server does; returns the ranks whose parts it expects."""
    own = receiver.layout
    permutations = make_permutations(own, own.kv, receiver.pointers, prefill_tp)
    for one, pages in product(permutations, units):
        assert all(width % one.word == 0 for width in one.widths)
        for i, block in product(one.buffers, split_unit(pages, own.page_size)):
            one.apply(rows_of(receiver, i), page_slots(block, own.page_size))
    return {rank for one in permutations for rank in one.ranks}


def send(world, senders, receiver, src, dst, units, capacity, rng):
    """Sends a request to one decode rank; ranks, stages and chunks arrive in any order."""
    memory = np.empty(capacity, np.uint8)
    address, wrote_parts, writes = world.register(memory), set(), []
    order = list(product(range(len(units)), senders))
    for number in rng.permutation(len(order)):
        unit, (rank, stage) = order[number]
        pages, sender = units[unit], senders[rank, stage]
        plan, copies = write(world, sender, receiver, memory, address, src[pages], dst[pages])
        writes.append(copies)
        wrote_parts |= {rank} if plan.has_parts else set()
    check_disjoint(writes)
    if wrote_parts:  # otherwise no unit is named
        prefill_tp = next(iter(senders.values())).layout.tp_size
        # Pages of a draft that only decode has are interleaved, too, and hold nothing.
        assert permute(receiver, prefill_tp, [dst[pages] for pages in units]) >= wrote_parts


def run_packed(
    topology,
    stages=((0,),),
    widths=None,
    draft_heads=None,
    drafts=(0, 0),
    page_size=2,
    chunks=(3,),
    prefix=0,
    capacity=1 << 12,
    in_a_row=False,
    same_stages=False,
    seed=0,
):
    """Sends one request to all decode ranks, and checks every byte of them.

    Args:
        topology: TP sizes of prefill and decode, and the number of KV heads.
        stages: The layers of each prefill stage; the last one has the draft, too.
        drafts: Draft layers of prefill and decode.
        chunks: Pages of each chunk.
        prefix: Pages of the request before the first chunk, which decode has already.
        capacity: Bytes of the packing buffer.
        same_stages: Whether decode has prefill's stages.
    """
    prefill_tp, decode_tp, total = topology
    rng = np.random.default_rng(seed)
    model = Model(sum(map(len, stages)), total, widths or {"k": 1, "v": 2}, draft_heads)
    pages = prefix + sum(chunks)
    pool = 2 * pages + 3
    world = SimulatedMemory(page_size, pool)

    def allocate():
        first = rng.integers(0, pool - pages + 1)
        return np.arange(first, first + pages) if in_a_row else rng.permutation(pool)[:pages]

    src, ends = allocate(), prefix + np.cumsum([0, *chunks])
    units = [slice(a, b) for a, b in zip(ends[:-1], ends[1:])]
    senders = {
        (tp, pp): world.rank(
            model,
            (tp, prefill_tp),
            (pp, len(stages)),
            list(layers),
            drafts[0] if pp == len(stages) - 1 else 0,
        )
        for tp in range(prefill_tp)
        for pp, layers in enumerate(stages)
    }
    for sender in senders.values():
        fill(model, sender, src[prefix:].tolist())
    wanted = stages if same_stages else [[layer for layers in stages for layer in layers]]
    for pp, tp in product(range(len(wanted)), range(decode_tp)):
        last = pp == len(wanted) - 1
        place = (pp, len(wanted))
        held = drafts[1] if last else 0
        receiver = world.rank(model, (tp, decode_tp), place, list(wanted[pp]), held)
        connected = {
            (rank, stage): sender
            for (rank, stage), sender in senders.items()
            if rank in prefill_ranks_of(tp, prefill_tp, decode_tp)
            and (stage == pp or not same_stages)
        }
        dst = allocate()
        send(world, connected, receiver, src, dst, units, capacity, rng)
        sent = {(False, layer) for layer in wanted[pp]}
        sent |= {(True, layer) for layer in range(min(drafts[0], held))}
        check_received(model, receiver, dst[prefix:].tolist(), sent)


@pytest.mark.parametrize("prefill", range(1, 9))
def test_every_byte_arrives_for_all_tp_sizes(prefill):
    chosen = [one for one in SIZES_TO_8 if one[0] == prefill]
    assert len(chosen) >= 6
    for topology in chosen:
        run_packed(topology)


@pytest.mark.parametrize("page_size", [1, 2, 3])
@pytest.mark.parametrize("block", [1, 4, 7])
def test_every_byte_of_long_chunks_arrives(monkeypatch, block, page_size):
    """Chunks of more tokens than a block, of whole blocks, and of fewer."""
    monkeypatch.setattr(kv_layout.permutation, "BLOCK_TOKENS", block)
    for topology, in_a_row in product([(4, 1, 4), (4, 2, 8), (1, 2, 4)], (False, True)):
        run_packed(topology, page_size=page_size, chunks=(9, 4, 1, 8), in_a_row=in_a_row)


def test_blocks_of_a_unit():
    pages = np.arange(1025)
    assert [len(block) for block in split_unit(pages, 16)] == [512, 512, 1]
    assert [len(block) for block in split_unit(pages[:512], 16)] == [512]
    assert [len(block) for block in split_unit(pages[:0], 16)] == [0]
    assert [len(block) for block in split_unit(pages[:2], 1 << 14)] == [1, 1]
    assert np.array_equal(np.concatenate(split_unit(pages, 16)), pages)


@settings(max_examples=60, deadline=None)
@given(
    topology=st.sampled_from(UNEQUAL),
    page_size=st.sampled_from([1, 2, 16, 64, 128]),
    chunks=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    prefix=st.integers(0, 3),
    widths=st.sampled_from([{"k": 1, "v": 1}, {"k": 3, "v": 2}, {"swa_k": 2, "swa_v": 1}]),
    capacity=st.integers(256, 1 << 14),
    in_a_row=st.booleans(),
    seed=st.integers(0, 99),
)
@example((2, 1, 8), 1, [4, 1], 2, {"k": 1, "v": 1}, 64, False, 0)
@example((8, 1, 4), 16, [4], 0, {"k": 3, "v": 2}, 64, False, 0)  # replicated on prefill
@example((1, 8, 4), 16, [4], 1, {"k": 3, "v": 2}, 300, False, 0)  # replicated on decode
@example((1, 2, 2), 128, [2, 2], 1, {"k": 1, "v": 1}, 64, True, 0)  # a round of 8 tokens
@example((4, 2, 8), 128, [1], 0, {"k": 1, "v": 1}, 64, True, 0)
def test_every_byte_arrives_for_any_pages(
    topology, page_size, chunks, prefix, widths, capacity, in_a_row, seed
):
    run_packed(
        topology,
        widths=widths,
        page_size=page_size,
        chunks=chunks,
        prefix=prefix,
        capacity=capacity,
        in_a_row=in_a_row,
        seed=seed,
    )


@settings(max_examples=40, deadline=None)
@given(
    topology=st.sampled_from([one for one in UNEQUAL if {*one[:2]} <= {1, 2, 4}]),
    sizes=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    drafts=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    draft_heads=st.sampled_from([None, 4, 8]),
    same_stages=st.booleans(),
    seed=st.integers(0, 99),
)
@example((4, 1, 8), [2, 1], (1, 1), 4, False, 0)
@example((1, 4, 2), [1, 3], (1, 1), 4, True, 0)  # the target's heads are replicated
@example((4, 2, 2), [1, 1], (1, 1), 8, False, 0)  # the target's are whole pages
@example((2, 1, 4), [2], (0, 2), 4, False, 0)  # nobody sends decode's draft
def test_every_byte_arrives_for_any_stages_and_drafts(
    topology, sizes, drafts, draft_heads, same_stages, seed
):
    run_packed(
        topology,
        stages_of_sizes(sizes),
        draft_heads=draft_heads,
        drafts=drafts,
        chunks=(2, 1),
        same_stages=same_stages,
        seed=seed,
    )


def plan_between(src, dst):
    return make_packed_plan(src, dst, src.kv, addresses(src.kv), dst.kv, addresses(dst.kv))


def plan_of(prefill_tp, decode_tp, **model):
    """The plan between the last rank of each side."""
    return plan_between(*(rank_of(tp - 1, tp, **model) for tp in (prefill_tp, decode_tp)))


def apart(count, neighbours=0):
    """Pages without neighbours, except for some pairs at the beginning."""
    pages = np.arange(count) * 3
    pages[1 : 2 * neighbours : 2] = pages[: 2 * neighbours : 2] + 1
    return pages


@pytest.mark.parametrize(
    "page_size, neighbours, copies",
    [(1, 0, 4096), (1, 1, 4095), (16, 0, 256), (64, 0, 64), (64, 1, 63), (128, 0, 32)],
)
def test_scattered_pages_take_one_copy_each(page_size, neighbours, copies):
    """4,096 tokens, TP 2 to 1: two neighbours on prefill are in one page of decode."""
    plan = plan_of(2, 1, page_size=page_size, layers=2)
    count = 4096 // page_size
    assert len(plan.copies(apart(count, neighbours), apart(count))) == 4 * copies


@pytest.mark.parametrize("page_size", [1, 16, 128])
@pytest.mark.parametrize("tp", [(2, 1), (8, 1), (8, 2), (1, 2), (1, 8), (2, 8)])
def test_pages_in_a_row_take_one_copy_per_buffer(tp, page_size):
    plan, pages = plan_of(*tp, page_size=page_size), np.arange(4096 // page_size) + 5
    rounds = plan.rounds(pages, pages, 1 << 30)
    assert len(plan.copies(pages, pages)) + sum(len(one.copies(0)) for one in rounds) == 4


@settings(max_examples=60, deadline=None)
@given(
    capacity=st.integers(512, 1 << 17),
    pages=st.integers(0, 12),
    widths=st.sampled_from([(256, 256), (256, 128)]),
)
@example(capacity=1 << 16, pages=4, widths=(256, 256))  # two buffers a round
@example(capacity=(1 << 16) - 1, pages=4, widths=(256, 256))
@example(capacity=512, pages=1, widths=(256, 128))  # one token a round
def test_rounds_fit_into_packing_buffer(capacity, pages, widths):
    """Each token of each buffer is packed once, in rounds that are as full as can be."""
    plan, packed = plan_of(1, 4, layers=3, widths=widths), []
    rounds = plan.rounds(np.arange(pages), apart(pages), capacity)
    for one in rounds:
        size = len(one.group.buffers) * one.slots.size * one.group.length
        src, _, length = one.copies(1 << 50).arrays()
        assert length.sum() == size <= capacity
        assert src.min() == 1 << 50 and (src + length).max() == (1 << 50) + size
        packed += product(one.group.buffers, one.slots.tolist())
    assert sorted(packed) == sorted(product(range(6 * (pages > 0)), range(pages * 16)))
    for group in plan.packs:
        found, tokens, rows = 0, 16 * pages, capacity // group.length
        while tokens:  # as many as fit, of as many buffers as fit with them
            some = min(tokens, rows)
            found += -(-len(group.buffers) // (rows // some))
            tokens -= some
        assert found == sum(one.group.length == group.length for one in rounds)


def test_packing_buffer_smaller_than_a_row_is_refused():
    with pytest.raises(LayoutError, match="buffer of 511 bytes cannot hold a row of 512 bytes"):
        plan_of(1, 4).rounds([1], [2], 511)


@pytest.mark.parametrize("tp", [(2, 1), (1, 2)])
def test_refused_pages_are_those_of_other_plans(tp):
    plan = plan_of(*tp)
    for refused in (plan.copies, lambda *pages: plan.rounds(*pages, 1 << 20)):
        with pytest.raises(LayoutError, match="sends 2 pages where decode has set aside 1"):
            refused([1, 2], [3])
        with pytest.raises(LayoutError, match="nothing is written outside"):
            refused([1, 2], [3, 1 << 14])


def test_page_that_decode_has_twice_is_refused():
    with pytest.raises(LayoutError, match="set aside a page twice"):
        plan_of(2, 1).copies([1, 2, 3], [4, 5, 4])


def test_rows_of_another_rank_are_refused():
    """Decode expects the part of the TP rank, whatever the rank describes."""
    src, dst = rank_of(0, 2), rank_of(0, 1)
    with pytest.raises(LayoutError, match=r"k, layer 0: TP 1/2 PP 0/1 holds KV heads \[0,4\) of 8"):
        plan_between(msgspec.structs.replace(src, tp_rank=1), dst)


@settings(max_examples=60, deadline=None)
@given(
    widths=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    pages=st.lists(st.integers(0, 9), max_size=4, unique=True),
    page_size=st.integers(1, 3),
)
def test_permutation_interleaves_parts_of_any_width(widths, pages, page_size):
    """Compared with single bytes: byte `at` of a token in a part lies behind all earlier tokens."""
    rows = np.random.default_rng(0).integers(0, 256, (10 * page_size, sum(widths)), np.uint8)
    slots = [page * page_size + token for page in pages for token in range(page_size)]
    landed, expected, number = rows[slots].reshape(-1).tolist(), rows.copy(), 0
    for part, width in enumerate(widths):
        for slot in slots:
            for at in range(width):
                expected[slot, sum(widths[:part]) + at] = landed[number]
                number += 1
    Permutation((0,), tuple(range(len(widths))), tuple(widths), 1).apply(
        rows, page_slots(pages, page_size)
    )
    np.testing.assert_array_equal(rows, expected)


@pytest.mark.parametrize(
    "head, address, word",
    [(256, 0, 16), (8, 0, 16), (8, 8, 8), (2, 0, 4), (256, 4, 4), (3, 0, 2), (256, 1, 1)],
)
def test_word_divides_parts_and_addresses(head, address, word):
    """A part, or what is packed of a row, has two heads."""
    whole, half = (rank_of(0, tp, 4, widths=(head, head)) for tp in (1, 2))
    moved = [address + one for one in addresses(whole.kv)]
    permutations = make_permutations(whole, whole.kv, moved, 2)
    assert [(one.ranks, one.widths, one.word) for one in permutations] == [
        ((0, 1), (2 * head, 2 * head), word)
    ]
    plan = make_packed_plan(whole, half, whole.kv, moved, half.kv, addresses(half.kv))
    assert [one.word for one in plan.packs] == [word]


def test_buffers_of_other_widths_permute_apart():
    decode = rank_of(0, 1, widths=(192, 128))
    permutations = make_permutations(decode, decode.kv, addresses(decode.kv), 4)
    assert [(one.buffers, one.widths) for one in permutations] == [
        ((0, 1), (384,) * 4),
        ((2, 3), (256,) * 4),
    ]


HEADS = Heads(0, 4, 8)  # of the first of two ranks


@pytest.mark.parametrize(
    "buffer, prefill_tp, reason",
    [
        (Buffer("k", False, 0, 64, HEADS), 4, None),
        (Buffer("k", False, 0, 64, HEADS), 1, None),
        (Buffer("k", False, 0, 64, HEADS), 2, "hold the same KV heads"),
        (Buffer("k", True, 0, 64, Heads(0, 1, 1)), 4, "hold the same KV heads"),
        (Buffer("k", False, 0, 64, HEADS, unused=True), 4, "not sent"),
        (Buffer("kv", False, 0, 64), 4, "not split by KV heads"),
        (Buffer("mamba_0", False, 0, 64), 4, "not split by KV heads"),
        (Buffer("undescribed", True, 0, 0), 4, "its heads are unknown"),
        (Buffer(OPAQUE, False, 0, 64), 4, "its heads are unknown"),
        (Buffer("k", False, 0, 64, Heads(2, 6, 8)), 4, r"ranks \(1\)"),
        (Buffer("k", False, 0, 64, Heads(1, 4, 8)), 4, r"\[1,4\) of 8 do not consist"),
        (Buffer("k", False, 0, 64, HEADS), 6, "cannot be split over"),
        (Buffer("k", False, 0, 64, Heads(4, 8, 8)), 4, r"ranks \(none\)"),
    ],
)
def test_reason_for_buffers_that_are_not_packed(buffer, prefill_tp, reason):
    decode = layout((0, 2), [buffer])
    found = unpacked_reason(buffer, decode, prefill_tp)
    assert found is None if reason is None else re.search(reason, found)
    if reason:
        assert not make_permutations(decode, decode.kv, [1 << 40], prefill_tp)


def test_other_buffers_are_sent_as_whole_pages():
    """MLA with a draft of GQA: the target's pages whole, the draft's heads as rows."""
    sides = [
        layout((0, tp), [Buffer("kv", False, 0, 64), Buffer("k", True, 0, 1024 // tp, heads)])
        for tp, heads in ((2, Heads(0, 2, 4)), (1, Heads(0, 4, 4)))
    ]
    plan = plan_between(*sides)
    whole, part = plan.copies([3, 4], [6, 7]).groups
    assert (whole.length.tolist(), whole.dst.tolist()) == ([128], [1 << 40])
    assert (part.length.tolist(), part.dst.tolist()) == ([1024], [1 << 41])
    back = plan_between(*reversed(sides))
    assert len(back.copies([3, 4], [6, 7])) == 1 and len(back.packs) == 1


def test_rows_are_packed_for_a_stock_peer():
    """Decode without a description gets whole rows, and needs to do nothing."""
    src, dst = rank_of(0, 1), rank_of(1, 2)
    inferred = infer_layout(src, StockRegistration(1, 2, len(dst.kv)))
    one, other = (
        plan_between(src, peer).rounds([1, 2], [3, 5], 1 << 20) for peer in (dst, inferred)
    )
    assert [each.copies(0).lists() for each in one] == [each.copies(0).lists() for each in other]
