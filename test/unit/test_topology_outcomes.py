"""`plan` predicts the outcomes that serving and transport tests showed, stock and patched."""

import pytest
from fleet import Fleet
from hf_configs import FALCON_H1, GPT_OSS, QWEN3_NEXT
from serving_scenarios import DRAFT_SCENARIOS, RELEASES, TABLE, Scenario, Unsupported
from transport_cases import CORRUPTED, STOCK_0_5_9, STOCK_0_5_18, STOCK_0_5_23

from pd_harness.cluster import Topology
from pd_harness.cpu_host.models import TinyMLA, TinyModel
from sglang_pd.patchset.patches import read_records, supported_releases
from sglang_pd.plan import verdict
from sglang_pd.plan.known_failures import (
    CRASHES,
    FAILS,
    HANGS,
    KNOWN_FAILURES,
    LOGPROBS,
    NO_START,
    REFUSED,
    RETRACTS,
    RIGHT,
    STRAY,
    UNKNOWN,
    WRONG,
)
from sglang_pd.plan.model import KVHeads, MLADims, Model, config_to_model
from sglang_pd.plan.pair import make_pair
from sglang_pd.plan.sizes import ServerSizes
from sglang_pd.plan.verdict import patched, stock

PLAN_OUTCOMES = {
    "right": RIGHT,
    "wrong": WRONG,
    "hang": HANGS,
    "dead": CRASHES,
    "raised": CRASHES,
    "failed": FAILS,
    CORRUPTED: WRONG,
    "http 500": FAILS,
}
# No size that `plan` takes expresses these: the engine lacks the feature as a whole.
UNPLANNED_FEATURES = ("staging", "decode_prefixes")


def plain_model(layers: int, attention) -> Model:
    return Model("tiny", "float32", (frozenset({"full"}),) * layers, attention)


def model_from_config(config: dict) -> Model:
    return config_to_model(config, "tiny", "0.5.9")


def tiny_model(tiny: TinyModel) -> Model:
    if isinstance(tiny, TinyMLA):
        return plain_model(tiny.layers, MLADims(tiny.latent, tiny.rope))
    return plain_model(tiny.layers, KVHeads(tiny.kv_heads, tiny.head_dim, tiny.head_dim))


def pair_for_topology(
    topology: Topology, tiny: TinyModel, release: str, drafts: tuple[int, int] = (0, 0)
):
    pages = (topology.page_size, topology.decode_page_size or topology.page_size)
    prefill, decode = (
        ServerSizes(
            *(getattr(topology, f"{side}_{size}") for size in ("tp", "pp", "dp")),
            draft=draft,
            page=page,
        )
        for side, draft, page in zip(("prefill", "decode"), drafts, pages)
    )
    model = tiny_model(tiny)
    return make_pair(model, prefill, decode, topology.backend, release, topology.fia)


def events(scenario: Scenario) -> list[str]:
    """The events in a scenario's test; its clients always request logprobs."""
    happens = {
        RETRACTS: scenario.topology.expects_retractions,
        STRAY: scenario.stray_message is not None,
    }
    return [LOGPROBS, *(event for event, does in happens.items() if does)]


def params_by_release(*tables):
    return [
        pytest.param(one, release, outcome, id=f"{release}-{one.name}")
        for table in tables
        for one in table
        for release, outcome in zip(RELEASES, one.outcomes)
        if not any(getattr(one.topology, name) for name in UNPLANNED_FEATURES)
    ]


@pytest.mark.parametrize("scenario, release, shown", params_by_release(TABLE))
def test_plan_predicts_scenario_outcome(scenario: Scenario, release: str, shown: str):
    pair = pair_for_topology(scenario.topology, scenario.model, release)
    assert stock(pair).when(*events(scenario)) == PLAN_OUTCOMES[shown]
    assert patched(pair).outcome == (RIGHT if scenario.patched == "right" else REFUSED)


@pytest.mark.parametrize("drafted, release, shown", params_by_release(DRAFT_SCENARIOS))
def test_plan_predicts_draft_outcome(drafted: Scenario, release: str, shown: str | Unsupported):
    drafts = tuple(int(side in drafted.sides) for side in ("prefill", "decode"))
    pair = pair_for_topology(drafted.topology, drafted.model, release, drafts)
    lacks = isinstance(shown, Unsupported)
    assert stock(pair).when(LOGPROBS) == (NO_START if lacks else PLAN_OUTCOMES[shown])
    assert patched(pair).outcome == (NO_START if lacks else RIGHT)


def test_every_scenario_is_planned():
    asked = {param.values[0].name for param in params_by_release(TABLE, DRAFT_SCENARIOS)}
    assert len(asked) > 60
    left = {one.name for one in (*TABLE, *DRAFT_SCENARIOS)} - asked
    assert left == {
        "mooncake-staging_tp2_to_1",
        "nixl-staging_tp2_to_1",
        "nixl-prefixes",
        "nixl-prefixes_tp2_to_1",
        "nixl-prefixes_tp1_to_2",
        "mooncake-prefixes",
        "ascend-mla_prefixes",
    }


def pair_for_fleet(fleet: Fleet, release: str):
    latent = MLADims(fleet.k_width, fleet.v_width, 128 * fleet.index_keys)
    heads = KVHeads(fleet.kv_heads, fleet.k_width, fleet.k_width)  # equal, as in stock's tests
    sides = [
        ServerSizes(
            side.tp,
            side.pp,
            layers=tuple(fleet.stage_sizes(side.pp)),
            draft=side.draft_layers,
            page=fleet.page_size,
        )
        for side in (fleet.prefill, fleet.decode)
    ]
    model = plain_model(fleet.layers, latent if fleet.mla else heads)
    return make_pair(model, *sides, fleet.backend, release, fleet.fia)


@pytest.mark.parametrize(
    "release, name, fleet, shown",
    [
        pytest.param(release, name, *at, id=f"{release}-{name}")
        for release, table in zip(RELEASES, (STOCK_0_5_9, STOCK_0_5_18, STOCK_0_5_23))
        for name, at in table.items()
    ],
)
def test_plan_predicts_transport_outcome(release: str, name: str, fleet: Fleet, shown: str):
    # Where ranks would transfer, servers before 0.5.23 do not start: they cannot speculate with PP.
    is_unsupported = release != "0.5.23" and name == "ascend-mla_draft_on_both"
    expected = NO_START if is_unsupported else PLAN_OUTCOMES[shown]
    assert stock(pair_for_fleet(fleet, release)).outcome == expected


INDEXED_MLA = plain_model(4, MLADims(512, 64, 128))
WINDOWS = model_from_config(GPT_OSS)
MAMBA, LINEAR = model_from_config(FALCON_H1), model_from_config(QWEN3_NEXT)
ONE, TP_2, PP_2, DRAFT = ServerSizes(), ServerSizes(tp=2), ServerSizes(pp=2), ServerSizes(draft=1)
BOTH_RIGHT = (RIGHT, RIGHT)
# As in test/transport/test_state_transfer.py: model, prefill, decode, and the outcomes of each of
# `RELEASES` over NIXL and over Mooncake, empty where none was tried.
STATE_CASES = {
    "draft": (INDEXED_MLA, DRAFT, DRAFT, (WRONG, WRONG), BOTH_RIGHT, BOTH_RIGHT),
    "draft_on_prefill": (INDEXED_MLA, DRAFT, ONE, (CRASHES, HANGS), (HANGS, HANGS), (HANGS, FAILS)),
    "index_keys_pp2": (INDEXED_MLA, PP_2, ONE, BOTH_RIGHT, (HANGS, RIGHT), BOTH_RIGHT),
    "windows": (WINDOWS, TP_2, TP_2, BOTH_RIGHT, BOTH_RIGHT, BOTH_RIGHT),
    "windows_tp2_to_1": (WINDOWS, TP_2, ONE, (CRASHES, HANGS), (HANGS, HANGS), BOTH_RIGHT),
    "windows_pp2": (WINDOWS, PP_2, ONE, (WRONG, WRONG), (HANGS, WRONG), (HANGS, WRONG)),
    "mamba_tp2_to_2": (MAMBA, TP_2, TP_2, BOTH_RIGHT, BOTH_RIGHT, BOTH_RIGHT),
    "mamba_tp2_to_1": (MAMBA, TP_2, ONE, ("", WRONG), (WRONG, WRONG), ("", WRONG)),
    "linear_tp2_to_1": (LINEAR, TP_2, ONE, ("", WRONG), BOTH_RIGHT, ("", RIGHT)),
}


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("name", STATE_CASES)
def test_plan_predicts_state_outcome(name: str, release: str):
    model, prefill, decode, *outcomes = STATE_CASES[name]
    for backend, shown in zip(("nixl", "mooncake"), outcomes[RELEASES.index(release)]):
        pair = make_pair(model, prefill, decode, backend, release, False)
        assert not shown or stock(pair).outcome == shown
        is_cut = pair.splits_recurrent_state and release == "0.5.9"
        assert patched(pair).outcome == (REFUSED if is_cut else RIGHT)


@pytest.mark.parametrize("release, shown", list(zip(RELEASES, (CRASHES, HANGS, HANGS))))
def test_v_narrower_than_k_fails_on_stock_only(release: str, shown: str):
    """Its outcomes on stock are those of `STOCK_NARROWER_V` in transport_cases.py."""
    pair = make_pair(plain_model(2, KVHeads(4, 8, 4)), TP_2, ONE, "nixl", release, False)
    assert (stock(pair).outcome, patched(pair).outcome) == (shown, RIGHT)


def test_recurrent_state_between_unequal_pp_sizes_is_not_predicted():
    for release, ours in zip(RELEASES, (REFUSED, UNKNOWN, UNKNOWN)):
        pair = make_pair(LINEAR, PP_2, ONE, "nixl", release, False)
        assert (stock(pair).outcome, patched(pair).outcome) == (UNKNOWN, ours)


def test_indivisible_kv_heads_prevent_startup():
    """4 ranks cannot share 6 heads."""
    model = plain_model(2, KVHeads(6, 8, 8))
    pair = make_pair(model, ServerSizes(tp=4), ONE, "nixl", "0.5.23", False)
    for one in (stock(pair), patched(pair)):
        assert one.outcome == NO_START
        assert "6 KV heads" in one.reasons[0] and "TP size 4" in one.reasons[0]


# What 0.5.18's code does over NIXL, Mooncake and Ascend where no test tries it: model, prefill,
# decode, outcomes.
GQA, MLA = plain_model(4, KVHeads(4, 8, 8)), plain_model(4, MLADims(512, 64))
NARROW_V, SEVEN = plain_model(2, KVHeads(4, 8, 4)), plain_model(7, KVHeads(4, 8, 8))
SEVEN_MLA = plain_model(7, MLADims(512, 64))
PP_2_OF_7, TP_2_PP_2 = (ServerSizes(tp, 2, layers=(3, 4)) for tp in (1, 2))
OTHER_STAGES, DRAFT_2 = ServerSizes(pp=2, layers=(4, 3)), ServerSizes(draft=2)
CASES_0_5_18 = {
    "pp2_to_other_stages": (SEVEN, PP_2_OF_7, OTHER_STAGES, (HANGS, WRONG, WRONG)),
    "mla_pp2_tp2_to_1": (SEVEN_MLA, TP_2_PP_2, ONE, (HANGS, RIGHT, RIGHT)),
    "narrow_v": (NARROW_V, ONE, ONE, (RIGHT, RIGHT, RIGHT)),
    "narrow_v_tp2_to_1": (NARROW_V, TP_2, ONE, (HANGS, WRONG, WRONG)),
    "draft_on_decode": (GQA, ONE, DRAFT, (RIGHT, RIGHT, RIGHT)),
    "draft_on_prefill": (GQA, DRAFT, ONE, (HANGS, HANGS, HANGS)),
    "drafts_1_to_2": (GQA, DRAFT, DRAFT_2, (WRONG, WRONG, WRONG)),
    "drafts_2_to_1": (GQA, DRAFT_2, DRAFT, (HANGS, HANGS, HANGS)),
    "mla_drafts_1_to_2": (MLA, DRAFT, DRAFT_2, (RIGHT, RIGHT, WRONG)),
    "draft_in_stages": (GQA, ServerSizes(pp=2, draft=1), DRAFT, (NO_START, NO_START, NO_START)),
    "pp4_to_pp2": (GQA, ServerSizes(pp=4), PP_2, (CRASHES, CRASHES, CRASHES)),
}
REFUSED_PAIRS = ("pp4_to_pp2", "pp2_to_other_stages")


@pytest.mark.parametrize("name", CASES_0_5_18)
def test_plan_knows_0_5_18(name: str):
    model, prefill, decode, outcomes = CASES_0_5_18[name]
    ours = REFUSED if name in REFUSED_PAIRS else RIGHT
    for backend, shown in zip(("nixl", "mooncake", "ascend"), outcomes):
        pair = make_pair(model, prefill, decode, backend, "0.5.18", False)
        assert stock(pair).outcome == shown, backend
        assert patched(pair).outcome == (NO_START if shown == NO_START else ours)


def test_patched_server_fails_where_its_release_lacks_an_edit(monkeypatch):
    pair = make_pair(GQA, PP_2, PP_2, "nixl", "0.5.9", False)
    assert (stock(pair).when(LOGPROBS), patched(pair).when(LOGPROBS)) == (CRASHES, RIGHT)
    monkeypatch.setattr(verdict, "records_without_edit", lambda release: {"decode-logprobs"})
    assert patched(pair).when(LOGPROBS) == CRASHES


@pytest.mark.parametrize("release", supported_releases())
def test_every_supported_release_was_examined(release: str):
    assert all(release in one.outcomes for one in KNOWN_FAILURES)
    pages = (ServerSizes(page=16), ServerSizes(page=32))
    assert stock(make_pair(GQA, *pages, "nixl", release, False)).outcome == CRASHES


def test_release_that_was_not_examined_is_unknown():
    pair = make_pair(GQA, ONE, ONE, "nixl", "0.5.24", False)
    for one in (stock(pair), patched(pair)):
        assert (one.outcome, one.when(STRAY)) == (UNKNOWN, UNKNOWN)
        assert "was not examined" in one.reasons[0]


def test_every_known_failure_refers_to_a_needed_patch():
    records = {record.id: record for record in read_records()}
    for limit in KNOWN_FAILURES:
        for release, outcomes in limit.outcomes.items():
            if limit.record and any(outcomes.values()):
                status = records[limit.record].at(release)
                assert status.state != "carried", (limit.record, limit.reason, release)
