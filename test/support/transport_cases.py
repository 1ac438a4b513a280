"""Pairs of servers of different sizes, by name."""

import dataclasses

from engine_release import SINCE_0_5_18
from fleet import Fleet, Side

from pd_harness.releases import release


def tp(prefill, decode, heads=4, **more):
    return Fleet(Side(tp=prefill), Side(tp=decode), kv_heads=heads, **more)


def with_fields(fleet, **fields):
    return dataclasses.replace(fleet, **fields)


def with_environment(fleet, **variables: str):
    """Returns the fleet with these environment variables on both sides."""
    sides = {
        role: with_fields(side, environment={**side.environment, **variables})
        for role, side in (("prefill", fleet.prefill), ("decode", fleet.decode))
    }
    return with_fields(fleet, **sides)


def same_widths(fleet):
    """Returns the fleet with V as wide as K, which stock NIXL assumes."""
    return with_fields(fleet, v_width=fleet.k_width)


# An MLA model with an indexer, whose keys are state in pages of 64 tokens.
NSA = {"mla": True, "index_keys": True, "page_size": 64}
HEADS = {
    "tp1_to_1": tp(1, 1),
    "tp2_to_2": tp(2, 2),
    "tp2_to_1": tp(2, 1),
    "tp1_to_2": tp(1, 2),
    "tp4_to_2": tp(4, 2),
    "tp4_to_1_replicated_on_prefill": tp(4, 1, heads=2),
    "tp1_to_4_replicated_on_decode": tp(1, 4, heads=2),
    "tp2_to_4_replicated_on_decode": tp(2, 4, heads=2),
    "tp4_to_4_replicated_on_both": tp(4, 4, heads=2),
    "tp2_to_8_replicated_on_decode": tp(2, 8),
    "tp4_to_8_replicated_on_decode": tp(4, 8),
}
STAGES = {
    "pp2": Fleet(Side(pp=2), layers=4),
    "pp2_odd": Fleet(Side(pp=2), layers=7),
    "pp3_uneven": Fleet(Side(pp=3), layers=7, stages=(2, 2, 3)),
    "pp2_to_pp2": Fleet(Side(pp=2), Side(pp=2), layers=5),
    "pp2_tp2_to_1": Fleet(Side(tp=2, pp=2), layers=3),
    "pp2_even_tp2_to_1": Fleet(Side(tp=2, pp=2), layers=4, v_width=4),
    "pp2_tp1_to_2": Fleet(Side(pp=2), Side(tp=2), layers=3),
    "draft_on_both": Fleet(Side(draft_layers=1), Side(draft_layers=1)),
    "draft_on_decode": Fleet(Side(), Side(draft_layers=1)),
    "draft_on_prefill": Fleet(Side(pp=2, draft_layers=2), layers=3),
    "draft_unequal_tp2_to_1": Fleet(
        Side(tp=2, draft_layers=2), Side(draft_layers=1), draft_heads=8
    ),
    "mla_pp2_odd": Fleet(Side(pp=2), layers=3, mla=True),
    "mla_tp2_to_1": Fleet(Side(tp=2), mla=True),
    "mla_tp1_to_2": Fleet(Side(), Side(tp=2), mla=True),
    "nsa": Fleet(**NSA),
    "nsa_tp2_to_1": Fleet(Side(tp=2), **NSA),
    "nsa_pp2_odd": Fleet(Side(pp=2), layers=3, **NSA),
}


MOONCAKE = {
    **{name: HEADS[name] for name in ("tp1_to_1", "tp2_to_1", "tp1_to_4_replicated_on_decode")},
    **{name: HEADS[name] for name in ("tp4_to_1_replicated_on_prefill",)},
    **{name: STAGES[name] for name in ("pp2", "pp2_odd", "pp2_tp2_to_1", "mla_pp2_odd")},
}


def ascend(prefill=None, decode=None, **more):
    """Returns a fleet with the NPU pools and MemFabric; K and V of these pools have one width."""
    return Fleet(prefill or Side(), decode or Side(), backend="ascend", **more)


MLA_PP2 = {"mla": True, "layers": 3, "stages": (1, 2)}
ASCEND = {
    "mla": ascend(mla=True),
    "mla_index_keys": ascend(mla=True, index_keys=True),
    "mla_30_31": ascend(Side(pp=2), mla=True, layers=61, stages=(30, 31)),
    "mla_2_2_3": ascend(Side(pp=3), mla=True, layers=7, stages=(2, 2, 3)),
    "mla_23_23_24_24": ascend(
        Side(pp=4), mla=True, layers=94, stages=(23, 23, 24, 24), page_size=2
    ),
    "mla_index_keys_2_2_3": ascend(
        Side(pp=3), mla=True, index_keys=True, layers=7, stages=(2, 2, 3)
    ),
    "mla_pp2_tp2_to_tp2": ascend(Side(pp=2, tp=2), Side(tp=2), **MLA_PP2),
    "mla_pp2_to_pp2": ascend(Side(pp=2), Side(pp=2), **MLA_PP2),
    "mla_draft_on_prefill": ascend(Side(pp=2, draft_layers=1), **MLA_PP2),
    "mla_draft_on_decode": ascend(Side(pp=2), Side(draft_layers=1), **MLA_PP2),
    "mla_draft_on_both": ascend(Side(pp=2, draft_layers=1), Side(draft_layers=1), **MLA_PP2),
    "mla_draft_unequal": ascend(Side(pp=2, draft_layers=2), Side(draft_layers=1), **MLA_PP2),
    "mla_index_keys_draft_unequal": ascend(
        Side(pp=2, draft_layers=1), Side(draft_layers=2), **MLA_PP2, index_keys=True
    ),
    "mla_draft_pp2_to_pp2": ascend(
        Side(pp=2, draft_layers=1), Side(pp=2, draft_layers=2), **MLA_PP2
    ),
    "tp2_to_1": ascend(Side(tp=2)),
    "pp2_odd": ascend(Side(pp=2), layers=5),
    "fia": ascend(fia=True),
    "fia_pp2_odd": ascend(Side(pp=2), layers=5, fia=True),
    "fia_tp2_to_1": ascend(Side(tp=2), fia=True),
    "fia_tp1_to_2": ascend(Side(), Side(tp=2), fia=True),
    "fia_on_prefill": ascend(Side(fia=True)),
    "fia_on_decode_pp2": ascend(Side(pp=2), Side(fia=True), layers=5),
    "fia_pp2_tp2_to_1_draft": ascend(
        Side(pp=2, tp=2, draft_layers=1), Side(draft_layers=1), layers=3, fia=True
    ),
}
# Outcomes of writes outside of a buffer: MemFabric accepts them, and other memory changes, or the
# process crashes.
CORRUPTED = ("wrong", "died", "raised")
# Outcomes of the same requests on the stock engines of 0.5.9, 0.5.18 and 0.5.23, with K and V of
# one width; None where it was not tried. In the two later releases prefill's registration thread
# crashes over NIXL with pipeline stages of GQA (in 0.5.18 of MLA, too), with more ranks than heads
# on both sides, and with a draft model on prefill only.
STOCK_OUTCOMES = {
    "nixl-tp1_to_1": ("right", "right", "right"),
    "nixl-tp1_to_2": ("right", None, None),
    "nixl-pp2": ("right", "hang", "hang"),
    "nixl-tp2_to_1": ("hang", "right", "right"),
    "nixl-tp4_to_1_replicated_on_prefill": ("hang", None, None),
    "nixl-tp1_to_4_replicated_on_decode": ("raised", "right", "right"),
    "nixl-tp2_to_8_replicated_on_decode": ("raised", "right", "right"),
    "nixl-tp2_to_4_one_head": (None, "hang", "hang"),
    "nixl-pp2_odd": ("wrong", "hang", "hang"),
    "nixl-pp2_tp2_to_1": ("hang", "wrong", "wrong"),
    "nixl-pp2_even_tp2_to_1": (None, "right", "right"),
    "nixl-mla_pp2_odd": ("right", "hang", "right"),
    "nixl-draft_on_prefill": (None, "hang", "hang"),
    "mooncake-tp2_to_1": ("right", "right", "right"),
    "mooncake-tp2_to_4_one_head": (None, "right", "right"),
    "mooncake-pp2": (None, "right", "right"),
    "mooncake-pp2_odd": ("wrong", "wrong", "wrong"),
    "ascend-mla": ("right", "right", "right"),
    "ascend-mla_index_keys": ("right", "right", "right"),
    "ascend-tp2_to_1": ("right", "right", "right"),
    "ascend-mla_30_31": ("wrong", "right", "right"),
    "ascend-mla_2_2_3": ("wrong", None, None),
    "ascend-mla_index_keys_2_2_3": ("wrong", "right", "right"),
    "ascend-mla_draft_on_both": ("wrong", "wrong", "right"),
    "ascend-mla_draft_on_prefill": (None, None, CORRUPTED),
    "ascend-mla_draft_unequal": (None, None, "wrong"),
    "ascend-pp2_odd": ("wrong", "wrong", "wrong"),
    "ascend-fia": ("wrong", "right", "right"),
    "ascend-fia_pp2_odd": ("wrong", "wrong", "wrong"),
    "ascend-fia_tp2_to_1": ("wrong", "right", "right"),
}
# Fleets of these cases; stock's draft needs no stages to fail.
STOCK_FLEETS = {
    **HEADS,
    **STAGES,
    "tp2_to_4_one_head": tp(2, 4, heads=1),
    "draft_on_prefill": Fleet(Side(draft_layers=1)),
}


def stock_cases(column: int) -> dict[str, tuple]:
    """Returns the fleet and the outcome of each case that was tried on this column's release."""
    found = {}
    for case, outcomes in STOCK_OUTCOMES.items():
        backend, _, name = case.partition("-")
        fleet = ASCEND[name] if backend == "ascend" else STOCK_FLEETS[name]
        if outcomes[column]:
            found[case] = (with_fields(fleet, backend=backend), outcomes[column])
    return found


STOCK_0_5_9, STOCK_0_5_18, STOCK_0_5_23 = map(stock_cases, range(3))
STOCK = {"0.5.9": STOCK_0_5_9, "0.5.18": STOCK_0_5_18, "0.5.23": STOCK_0_5_23}[release()]
# A fleet in which stock assumes V as wide as K, and the outcome if memory ends behind V.
STOCK_NARROWER_V = (HEADS["tp2_to_1"], "hang") if SINCE_0_5_18 else (HEADS["tp1_to_1"], "raised")
