"""What each rank sends, for any sizes: by the planner, and by listing heads and layers."""

from collections import Counter

import pytest
from hf_configs import ALL_CONFIGS, DEEPSEEK_V3
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracle import can_split, deal_heads

from sglang_pd.patchset.patches import supported_releases
from sglang_pd.plan.core import kv_layout
from sglang_pd.plan.hybrids import RECURRENT, RecurrentState
from sglang_pd.plan.known_failures import NO_START, REFUSED, RIGHT, UNKNOWN
from sglang_pd.plan.links import PACKED, SLICED, TOKENS, WHOLE, links
from sglang_pd.plan.model import KVHeads, MLADims, Model, config_to_model
from sglang_pd.plan.pair import BACKENDS, make_pair
from sglang_pd.plan.sizes import ServerSizes, parse_sizes
from sglang_pd.plan.verdict import patched

TP = st.sampled_from([1, 2, 3, 4, 6, 8, 16])
RELEASES = supported_releases()
STATE = RecurrentState(16, 1, 16, 1, 4, 3, 4, False)


@st.composite
def models(draw) -> Model:
    layers = draw(st.integers(4, 7))
    heads = KVHeads(draw(st.sampled_from([1, 2, 4, 6, 8, 16])), 4, draw(st.sampled_from([4, 2])))
    kind = draw(st.sampled_from(["gqa", "mla", "index", "window", "recurrent"]))
    attention = MLADims(8, 4, 128 * (kind == "index")) if kind in ("mla", "index") else heads
    others = {"window": "window", "recurrent": RECURRENT}.get(kind, "full")
    kinds = tuple(frozenset({others if n % 2 else "full"}) for n in range(layers))
    windows = (heads, 8) if kind == "window" else (None, 0)
    state = STATE if kind == "recurrent" else None
    return Model(kind, "bfloat16", kinds, attention, *windows, state)


@st.composite
def sides(draw, pp) -> ServerSizes:
    tp, dp = draw(TP), draw(st.sampled_from([1, 1, 2]))
    draft = draw(st.integers(0, 2))
    return ServerSizes(tp * dp, draw(st.sampled_from(pp)), dp, draft=draft, page=4)


@st.composite
def pairs(draw):
    prefill = draw(sides([1, 1, 2, 3, 4]))
    decode = draw(sides([1, 1, prefill.pp, 2]))
    backend, release = draw(st.sampled_from(BACKENDS)), draw(st.sampled_from(RELEASES))
    return make_pair(draw(models()), prefill, decode, backend, release, False)


def can_serve(pair) -> bool:
    """Whether the pair can be served, by rules of thumb."""
    (p, d), (prefill_pp, decode_pp) = pair.tp, pair.pp
    heads = pair.model.kv_heads
    if heads and not (can_split(heads, p) and can_split(heads, d)):
        return False
    if not can_split(p, d) or decode_pp not in (1, prefill_pp):
        return False
    has_staged_draft = any(side.draft and side.pp > 1 for side in pair.sides.values())
    if pair.release != "0.5.23" and has_staged_draft:
        return False
    is_cut = pair.model.recurrent and (p != d or prefill_pp != decode_pp)
    return not is_cut or (pair.release != "0.5.9" and prefill_pp == decode_pp)


def expected_parts(pair, tp: int, stage: int) -> set:
    """(kind of layer, is draft, layer, head) of all that a decode rank must receive."""
    model, windows = pair.model, pair.model.window_heads
    totals = {"full": model.kv_heads, "window": windows and windows.total, RECURRENT: None}

    def layer_parts(kind: str, draft: bool, layer: int) -> set:
        heads = deal_heads(totals[kind], pair.tp[1])[tp] if totals[kind] else [0]
        return {(kind, draft, layer, head) for head in heads}

    held = [layer_parts(kind, False, n) for n in pair.stages[1][stage] for kind in model.kinds[n]]
    if stage == pair.decode.pp - 1:
        held += [
            layer_parts("full", True, n) for n in range(min(pair.prefill.draft, pair.decode.draft))
        ]
    return set().union(*held)


GROUPS = {"swa": "window", "mamba": RECURRENT}


def check_pair(pair) -> None:
    is_served = can_serve(pair)
    assert patched(pair).outcome in ((RIGHT,) if is_served else (REFUSED, NO_START, UNKNOWN))
    if not is_served:
        return
    sent = {}
    for link in links(pair):
        arrived = sent.setdefault(link.decode, Counter())
        for share in link.parts:
            group = GROUPS.get(share.component.split("_")[0], "full")
            for head in range(*(share.heads or (0, 1))):
                arrived[share.component, group, share.draft, share.layer, head] += 1
        check_bytes(pair, link)
    for rank, arrived in sent.items():
        assert set(arrived.values()) <= {1}, "something is sent twice"
        held = expected_parts(pair, *rank)
        if pair.splits_recurrent_state:  # sent by the engine itself
            held = {one for one in held if one[0] != RECURRENT}
        assert {what for _, *rest in arrived for what in [tuple(rest)]} == held
    assert len(sent) == pair.tp[1] * pair.decode.pp


def check_bytes(pair, link) -> None:
    """Checks a link's bytes and number of copies against those of a transfer plan of slices."""
    if not link.parts:
        assert (link.bytes, link.min_copies, link.max_copies, link.sliced_copies) == (0, 0, 0, 0)
        return
    own, peer = pair.layout("prefill", *link.prefill), pair.layout("decode", *link.decode)
    size = sliced_copies = 0
    moves_heads = False
    for name in ("kv", "state"):
        mine, theirs = getattr(own, name), getattr(peer, name)
        pages = TOKENS // 4
        if name == "state":
            pages = 1 if pair.model.recurrent else pair.model.window // 4 or pages
        pairs = kv_layout.match_buffers(own, peer, mine, theirs)
        made = kv_layout.make_plan(
            pairs, *(own.page_size, mine, [1 << 40] * len(mine), theirs, [1 << 41] * len(theirs))
        )
        moves_heads = moves_heads or not all(one.whole for one in pairs)
        copies = made.copies(*[range(0, 2 * pages, 2)] * 2)
        size += int(copies.arrays()[2].sum()) if len(copies) else 0
        sliced_copies += len(copies)
    assert (link.bytes, link.sliced_copies) == (size, sliced_copies)
    if moves_heads and pair.model.recurrent and pair.release != "0.5.9":  # by the engine itself
        assert link.kv_heads == SLICED
    else:
        assert link.kv_heads == (PACKED if moves_heads else WHOLE)
        assert link.min_copies == len(link.parts)  # a buffer's pages are contiguous on both sides
    assert link.min_copies <= link.max_copies <= link.sliced_copies


@pytest.mark.timeout(3000)
@pytest.mark.parametrize("count", [100, pytest.param(4000, marks=pytest.mark.nightly)])
def test_any_topology_is_planned_completely(count):
    @settings(max_examples=count, deadline=None, suppress_health_check=list(HealthCheck))
    @given(pair=pairs())
    def run(pair):
        check_pair(pair)

    run()


@pytest.mark.parametrize("name", ALL_CONFIGS)
def test_each_model_is_sent_completely(name):
    model = config_to_model(ALL_CONFIGS[name], name, "0.5.23")
    for both in (("tp=2", "tp=2"), ("tp=4,dp=2", "tp=4"), ("tp=2,pp=2", "tp=1")):
        sizes = [parse_sizes(side, page=4) for side in both]
        check_pair(make_pair(model, *sizes, "nixl", "0.5.23", False))


def test_mla_latent_is_sent_by_one_of_four_ranks():
    """Decode requests the latent from all four ranks that hold it; only the first sends it."""
    model = config_to_model(DEEPSEEK_V3, "", "0.5.23")
    pair = make_pair(model, ServerSizes(tp=4), ServerSizes(), "nixl", "0.5.23", False)
    first, *others = links(pair)
    assert (first.messages, len(first.parts), first.min_copies) == (2, 61, 61)
    assert [(link.messages, link.bytes, link.parts) for link in others] == [(1, 0, ())] * 3
    assert first.max_copies == 61 * TOKENS
    assert first.bytes == 61 * (512 + 64) * 2 * TOKENS
