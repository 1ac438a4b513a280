"""Describes, matches, plans and copies in simulated memory, and checks every byte of decode."""

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kv_layout import (
    Buffer,
    Heads,
    LayoutError,
    Pointers,
    RankLayout,
    StockRegistration,
    plan_for_peer,
)
from oracle import TOPOLOGIES, Model, SimulatedMemory, run_transfer, stages_of_sizes

MLA = {"k": 3, "v": 2}
MLA_INDEXED = {"k": 3, "v": 2, "index_k": 1}
ONE_HEAD = (1, {"k": 2, "v": 2})  # KV heads, and widths
TWO_HEADS = Model(2, 2)


@settings(max_examples=80, deadline=None)
@given(topology=st.sampled_from(TOPOLOGIES), page_size=st.sampled_from([1, 2]))
@example(topology=(4, 2, 4), page_size=2)  # stock writes outside the slot
@example(topology=(4, 8, 4), page_size=2)  # stock divides by zero
@example(topology=(2, 8, 4), page_size=2)  # later releases swap heads
@example(topology=(8, 16, 4), page_size=2)  # 0.5.23 fails an assertion
@example(topology=(4, 1, 2), page_size=1)  # stock hangs
@example(topology=(1, 4, 2), page_size=1)  # stock answers 500
def test_every_byte_arrives_for_any_tp_sizes(topology, page_size):
    prefill, decode, total = topology
    run_transfer(Model(1, total), prefill, decode, [[0]], page_size=page_size)


@settings(max_examples=80, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    prefill_drafts=st.integers(0, 2),
    decode_drafts=st.integers(0, 3),
    same_stages=st.booleans(),
    stock_decode=st.booleans(),
    model=st.sampled_from([(None, MLA), (None, MLA_INDEXED), (None, {"kv": 2}), ONE_HEAD]),
)
@example([23, 23, 24, 24], 0, 0, False, False, ONE_HEAD)  # stock sends stage 0's V 0 to K 92
@example([23, 23, 24, 24], 0, 0, False, True, ONE_HEAD)
@example([30, 31], 0, 0, False, False, ONE_HEAD)  # stock sends V 30 to V 0
@example([30, 31], 0, 0, False, True, ONE_HEAD)
def test_every_byte_arrives_for_any_stages_and_drafts(
    sizes, prefill_drafts, decode_drafts, same_stages, stock_decode, model
):
    stages = stages_of_sizes(sizes)
    if stock_decode and same_stages and len(sizes) > 1:
        # A stage may have as many layers, with the draft's, as the model: a count is ambiguous.
        decode_drafts = 0
    model, drafts = Model(sum(sizes), *model), (prefill_drafts, decode_drafts)
    decode_stages = stages if same_stages else None
    run_transfer(model, 1, 1, stages, decode_stages, *drafts, stock_decode=stock_decode)


@settings(max_examples=40, deadline=None)
@given(
    tp=st.sampled_from([(1, 1), (2, 1), (1, 2), (4, 1), (1, 4), (2, 4), (4, 2), (2, 2)]),
    total=st.sampled_from([1, 2, 4]),
    sizes=st.sampled_from([[5], [3, 2], [2, 2, 1]]),
    drafts=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    widths=st.sampled_from([{"k": 2, "v": 2}, {"k": 3, "v": 1}]),
    stock_decode=st.booleans(),
    draft_heads=st.sampled_from([None, 4]),
)
def test_every_byte_arrives_for_stages_and_tp_sizes(
    tp, total, sizes, drafts, widths, stock_decode, draft_heads
):
    if stock_decode and not drafts[0]:
        draft_heads = None  # without a draft, prefill cannot know that of a stock peer
    model = Model(5, total, widths, draft_heads)
    run_transfer(model, *tp, stages_of_sizes(sizes), None, *drafts, stock_decode=stock_decode)


def test_partial_heads_are_copied_token_by_token():
    """Page size 1, adjacent pages, half of the heads: one copy per token."""
    copies = run_transfer(
        Model(1, 2), 2, 1, [[0]], page_size=1, src_pages=[1, 2, 3], dst_pages=[4, 5, 6]
    )
    assert copies == 2 * 2 * 3  # senders x components x tokens


def peers(model=TWO_HEADS, other=TWO_HEADS, tp=(1, 1)):
    """Returns the first rank of prefill and of decode, whose TP sizes are `tp`."""
    world = SimulatedMemory(page_size=2, pages=4)
    src = world.rank(model, (0, tp[0]), (0, 1), list(range(model.layers)), 0)
    dst = world.rank(other, (0, tp[1]), (0, 1), list(range(other.layers)), 0)
    return src, dst


def plan_ranks(src, dst, peer=None):
    return plan_for_peer(
        src.layout, Pointers(src.pointers), peer or dst.layout, Pointers(dst.pointers)
    )


def test_refuses_tp_sizes_that_do_not_divide():
    with pytest.raises(LayoutError, match="attention TP size 3 and decode attention TP size 2"):
        plan_ranks(*peers(Model(2, 6), Model(2, 6), tp=(3, 2)))


@pytest.mark.parametrize(
    "model, other, said",
    [
        (TWO_HEADS, Model(3, 2), "number of layers: prefill has 2, decode has 3"),
        (TWO_HEADS, Model(2, 4), "total KV heads: prefill has 2, decode has 4"),
        (TWO_HEADS, Model(2, 2, {"k": 4, "v": 2}), "k, layer 0, bytes per page: .* 64, .* 128"),
        (
            Model(2, None, MLA_INDEXED),
            Model(2, None, MLA),
            "must send index_k, layer 0, .* k layers 0-1, v layers 0-1",
        ),
    ],
    ids=["layers", "heads", "widths", "components"],
)
def test_refuses_peer_with_another_model(model, other, said):
    with pytest.raises(LayoutError, match=said):
        plan_ranks(*peers(model, other))


def test_refuses_fewer_pointers_than_described():
    src, dst = peers()
    dst.pointers.pop()
    with pytest.raises(LayoutError, match="describes 4 buffers but registered 3"):
        plan_ranks(src, dst)


@pytest.mark.parametrize(
    "changed, said",
    [
        ({"page_bytes": 17}, "decode registered 17 bytes per page, prefill expects 64"),
        ({"kv_pointers": 3}, "decode registered 3 KV buffers"),
        ({"kv_pointers": 2}, "decode registered 2 KV buffers"),
        ({"state_pointers": 2}, "decode registered 2 state buffers"),
    ],
)
def test_refuses_stock_peer_with_unexpected_buffers(changed, said):
    peer = StockRegistration(0, 1, **{"kv_pointers": 4, "page_bytes": 64, **changed})
    with pytest.raises(LayoutError, match=said):
        plan_ranks(*peers(), peer)


def layout(kv, state=(), pp=(0, 1), layers=4):
    return RankLayout(0, 1, *pp, 2, "bfloat16", "VRAM", layers, tuple(kv), tuple(state))


def plan_layouts(src, dst):
    """Returns the plan between two ranks; on each, KV and state have addresses from 1000 on."""
    if isinstance(dst, StockRegistration):
        counts = (dst.kv_pointers, dst.state_pointers)
    else:
        counts = (len(dst.kv), len(dst.state))
    ours = Pointers(range(1000, 1000 + len(src.kv)), range(1000, 1000 + len(src.state)))
    theirs = (None if count is None else range(1000, 1000 + count) for count in counts)
    return plan_for_peer(src, ours, dst, Pointers(*theirs))


MAMBA = [Buffer("mamba_0", False, n, 64) for n in range(2)]
ATTENTION = [Buffer(c, False, 1, 64, Heads(0, 1, 1)) for c in "kv"]


def test_refuses_recurrent_state_between_unequal_pp_sizes():
    """Each stage has slots for all recurrent layers, but uses only those of its own."""
    src, dst = layout(ATTENTION, MAMBA, pp=(1, 2)), layout(ATTENTION, MAMBA)
    with pytest.raises(LayoutError, match="recurrent state: prefill PP size 2, decode PP size 1"):
        plan_layouts(src, dst)


def test_refuses_to_guess_the_layers_of_a_hybrid():
    src = layout(ATTENTION, MAMBA, pp=(1, 2))
    with pytest.raises(LayoutError, match="KV buffers without layer numbers"):
        plan_layouts(src, StockRegistration(0, 1, 4, 2))


def test_unused_layer_is_neither_sent_nor_received():
    """The stage of layer 0 also has buffers for layer 1, which the next stage computes."""
    layers = [Buffer(c, False, n, 64) for c in ("k", "v") for n in range(2)]
    idle = [msgspec.structs.replace(b, unused=b.layer == 1) for b in layers]
    src, dst = layout(idle, idle, pp=(0, 2), layers=2), layout(layers, layers, layers=2)
    plan = plan_layouts(src, dst)
    for part in (plan.kv, plan.state):
        assert part.copies([0], [0]).lists()[1] == [1000, 1002]
    with pytest.raises(LayoutError, match="must send k, layer 1, .* k layers 0-0, v layers 0-0"):
        plan_layouts(layout(layers, pp=(0, 2), layers=2), layout(idle, pp=(0, 2), layers=2))


def test_unused_layer_is_not_sent_to_stock_decode():
    """The same stage of decode has the same buffers, with those of the unused layer."""
    kv = [Buffer(c, False, n, 64, Heads(0, 1, 1), 4, n == 3) for c in "kv" for n in (1, 3)]
    src = layout(kv, pp=(0, 2))
    plan = plan_layouts(src, StockRegistration(0, 1, 4))
    assert plan.kv.copies([0], [0]).lists()[1] == [1000, 1002]


def test_refuses_to_split_recurrent_state_by_tp():
    with pytest.raises(LayoutError, match="prefill TP size 1 cannot be split for decode TP size 2"):
        plan_layouts(layout(ATTENTION, MAMBA), StockRegistration(0, 2, 2, 2))


def test_refuses_to_split_fused_convolution_state():
    """Mooncake itself slices recurrent state, and would slice x, B and C as if they were one."""
    state = [Buffer(f"mamba_{i}", False, 0, 64) for i in range(2)]
    peer = StockRegistration(0, 2, 2, None)
    with pytest.raises(LayoutError, match="TP size 1, decode TP size 2; its convolutions"):
        plan_layouts(layout(ATTENTION, state), peer)
    empty = [*state[:1], msgspec.structs.replace(state[1], page_bytes=0)]
    for cut in (empty, [*state, Buffer("mamba_2", False, 0, 64)]):
        plan_layouts(layout(ATTENTION, cut), peer)


def test_state_sent_by_engine_is_not_planned():
    """Mooncake itself slices recurrent state."""
    plan = plan_layouts(layout(ATTENTION, MAMBA), StockRegistration(0, 2, 2, None))
    assert plan.state is None
    assert len(plan.kv.copies([0], [0])) == 2  # k and v of the one head, which all ranks hold


def test_stock_peer_with_mha_draft_of_mla_target():
    """MLA target, MHA draft (EAGLE-3): one group of target pointers, two of draft pointers."""
    target = [Buffer("kv", False, n, 64) for n in range(4)]
    draft = [Buffer(c, True, 0, 32, Heads(0, 1, 1)) for c in "kv"]
    plan = plan_layouts(layout(target + draft), StockRegistration(0, 1, 6))
    src, dst, _ = plan.kv.copies([0], [0]).lists()
    assert src == dst == list(range(1000, 1006))


def test_refuses_a_stage_without_layers_for_a_stock_peer():
    with pytest.raises(LayoutError, match="holds 0 of a model"):
        plan_layouts(layout([], pp=(1, 2)), StockRegistration(0, 1, 8))


@pytest.mark.parametrize("pp", [(0, 1), (1, 2)])
def test_draft_state_is_not_sent_to_stock_peer(pp):
    """Only the target's state is sent, to decode's whole model or to the same stage."""
    kv = [Buffer("kv", draft, n, 64) for draft, n in ((False, 2), (False, 3), (True, 0))]
    state = [Buffer("index_k", b.draft, b.layer, 8) for b in kv]
    plan = plan_layouts(layout(kv, state, pp=pp), StockRegistration(0, 1, 3, 2))
    assert plan.state.copies([0], [0]).lists()[1] == [1000, 1001]
