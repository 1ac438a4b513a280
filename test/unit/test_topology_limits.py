"""What `plan` says of stock and patched engines is what serving, and the transport, showed."""

import pytest
from configs import FALCON_H1, GPT_OSS, QWEN3_NEXT
from fleet import Fleet
from serving_scenarios import DRAFTED, RELEASES, TABLE, Drafted, Lacks, Scenario
from topologies import CORRUPTED, FIRST_STOCK, LATER_STOCK

from pd_harness.cluster import Topology
from pd_harness.cpu_host.models import TinyMLA, TinyModel
from sglang_pd.patchset.patches import read_records
from sglang_pd.topology.limits import (
    DIES,
    FAILS,
    HANGS,
    LIMITS,
    LOGPROBS,
    NO_START,
    REFUSED,
    RETRACTS,
    RIGHT,
    STRAY,
    UNKNOWN,
    WRONG,
)
from sglang_pd.topology.model import Heads, Latent, Model, as_model
from sglang_pd.topology.pair import make_pair
from sglang_pd.topology.sizes import Sizes
from sglang_pd.topology.verdict import patched, stock

SHOWN = {
    "right": RIGHT,
    "wrong": WRONG,
    "hang": HANGS,
    "dead": DIES,
    "raised": DIES,
    "failed": FAILS,
    CORRUPTED: WRONG,
    "http 500": FAILS,
}
# Of no size that a plan is made of: the engine lacks the feature as a whole.
NOT_SIZES = ("staging", "decode_prefixes")


def plain(layers: int, attention) -> Model:
    return Model("tiny", "float32", (frozenset({"full"}),) * layers, attention)


def read_model_of(config: dict) -> Model:
    return as_model(config, "tiny", "0.5.9")


def tiny_model(tiny: TinyModel) -> Model:
    if isinstance(tiny, TinyMLA):
        return plain(tiny.layers, Latent(tiny.latent, tiny.rope))
    return plain(tiny.layers, Heads(tiny.kv_heads, tiny.head_dim, tiny.head_dim))


def pair_of(topology: Topology, tiny: TinyModel, release: str, drafts: tuple[int, int] = (0, 0)):
    pages = (topology.page_size, topology.decode_page_size or topology.page_size)
    prefill, decode = (
        Sizes(
            *(getattr(topology, f"{side}_{size}") for size in ("tp", "pp", "dp")),
            draft=draft,
            page=page,
        )
        for side, draft, page in zip(("prefill", "decode"), drafts, pages)
    )
    model = tiny_model(tiny)
    return make_pair(model, prefill, decode, topology.backend, release, topology.fia)


def events(scenario: Scenario) -> list[str]:
    """What happens in a scenario's test; its clients always ask for logprobs."""
    happens = {RETRACTS: scenario.topology.retracts, STRAY: scenario.stray is not None}
    return [LOGPROBS, *(event for event, does in happens.items() if does)]


def of_releases(*tables):
    return [
        pytest.param(one, release, outcome, id=f"{release}-{one.name}")
        for table in tables
        for one in table
        for release, outcome in zip(RELEASES, one.outcomes)
        if not any(getattr(one.topology, name) for name in NOT_SIZES)
    ]


@pytest.mark.parametrize("scenario, release, shown", of_releases(TABLE))
def test_scenarios(scenario: Scenario, release: str, shown: str):
    pair = pair_of(scenario.topology, scenario.model, release)
    assert stock(pair).when(*events(scenario)) == SHOWN[shown]
    assert patched(pair).outcome == (RIGHT if scenario.patched == "right" else REFUSED)


@pytest.mark.parametrize("drafted, release, shown", of_releases(DRAFTED))
def test_drafts(drafted: Drafted, release: str, shown: str | Lacks):
    drafts = tuple(int(side in drafted.sides) for side in ("prefill", "decode"))
    pair = pair_of(drafted.topology, drafted.model, release, drafts)
    lacks = isinstance(shown, Lacks)
    assert stock(pair).when(LOGPROBS) == (NO_START if lacks else SHOWN[shown])
    assert patched(pair).outcome == (NO_START if lacks else RIGHT)


def test_every_scenario_is_asked_about():
    asked = {param.values[0].name for param in of_releases(TABLE, DRAFTED)}
    assert len(asked) > 60
    left = {one.name for one in (*TABLE, *DRAFTED)} - asked
    assert left == {
        "mooncake-staging_tp2_to_1",
        "nixl-staging_tp2_to_1",
        "nixl-prefixes",
        "mooncake-prefixes",
        "ascend-mla_prefixes",
    }


def pair_of_fleet(fleet: Fleet, release: str):
    latent = Latent(fleet.k_width, fleet.v_width, 128 * fleet.index_keys)
    heads = Heads(fleet.kv_heads, fleet.k_width, fleet.k_width)  # of one width, as stock is tried
    sides = [
        Sizes(
            side.tp,
            side.pp,
            layers=tuple(fleet.stage_sizes(side.pp)),
            draft=side.draft_layers,
            page=fleet.page_size,
        )
        for side in (fleet.prefill, fleet.decode)
    ]
    model = plain(fleet.layers, latent if fleet.mla else heads)
    return make_pair(model, *sides, fleet.backend, release, fleet.fia)


# Where no server can be tried, or a server ends otherwise than its transport alone.
OTHERWISE = {
    ("0.5.9", "ascend-mla_draft_on_both"): NO_START,  # none speculates in stages
}


@pytest.mark.parametrize(
    "release, name, fleet, shown",
    [
        pytest.param(release, name, *at, id=f"{release}-{name}")
        for release, table in zip(RELEASES, (FIRST_STOCK, LATER_STOCK))
        for name, at in table.items()
    ],
)
def test_transports(release: str, name: str, fleet: Fleet, shown: str):
    expected = OTHERWISE.get((release, name), SHOWN[shown])
    assert stock(pair_of_fleet(fleet, release)).outcome == expected


INDEXED = plain(4, Latent(512, 64, 128))
WINDOWS = read_model_of(GPT_OSS)
MAMBA, LINEAR = read_model_of(FALCON_H1), read_model_of(QWEN3_NEXT)
# As test/transport/test_state.py has it: (model, prefill, decode), and outcomes of `RELEASES` over
# NIXL and over Mooncake; empty where none was tried.
STATE = {
    "draft": ((INDEXED, Sizes(draft=1), Sizes(draft=1)), (WRONG, WRONG), (RIGHT, RIGHT)),
    "draft_on_prefill": ((INDEXED, Sizes(draft=1), Sizes()), (DIES, HANGS), (HANGS, FAILS)),
    "index_keys_pp2": ((INDEXED, Sizes(pp=2), Sizes()), (RIGHT, RIGHT), (RIGHT, RIGHT)),
    "windows": ((WINDOWS, Sizes(tp=2), Sizes(tp=2)), (RIGHT, RIGHT), (RIGHT, RIGHT)),
    "windows_tp2_to_1": ((WINDOWS, Sizes(tp=2), Sizes()), (DIES, HANGS), (RIGHT, RIGHT)),
    "windows_pp2": ((WINDOWS, Sizes(pp=2), Sizes()), (WRONG, WRONG), (HANGS, WRONG)),
    "mamba_tp2_to_2": ((MAMBA, Sizes(tp=2), Sizes(tp=2)), (RIGHT, RIGHT), (RIGHT, RIGHT)),
    "mamba_tp2_to_1": ((MAMBA, Sizes(tp=2), Sizes()), ("", WRONG), ("", WRONG)),
    "linear_tp2_to_1": ((LINEAR, Sizes(tp=2), Sizes()), ("", WRONG), ("", RIGHT)),
}


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("name", STATE)
def test_state(name: str, release: str):
    (model, *sides), *outcomes = STATE[name]
    for backend, shown in zip(("nixl", "mooncake"), outcomes[RELEASES.index(release)]):
        pair = make_pair(model, *sides, backend, release, False)
        assert not shown or stock(pair).outcome == shown
        is_cut = pair.cuts_state and release == "0.5.9"
        assert patched(pair).outcome == (REFUSED if is_cut else RIGHT)


@pytest.mark.parametrize("release, shown", list(zip(RELEASES, (DIES, HANGS))))
def test_v_of_another_width_than_k(release: str, shown: str):
    """As `STOCK_NARROWER_V` of topologies.py has it."""
    pair = make_pair(plain(2, Heads(4, 8, 4)), Sizes(tp=2), Sizes(), "nixl", release, False)
    assert (stock(pair).outcome, patched(pair).outcome) == (shown, RIGHT)


def test_recurrent_state_between_stages_was_not_tried():
    for release, ours in zip(RELEASES, (REFUSED, UNKNOWN)):
        pair = make_pair(LINEAR, Sizes(pp=2), Sizes(), "nixl", release, False)
        assert (stock(pair).outcome, patched(pair).outcome) == (UNKNOWN, ours)


def test_servers_that_do_not_start():
    """No rank can have 4 of 6 heads."""
    pair = make_pair(plain(2, Heads(6, 8, 8)), Sizes(tp=4), Sizes(), "nixl", "0.5.23", False)
    for verdict in (stock(pair), patched(pair)):
        assert verdict.outcome == NO_START
        assert "6 KV heads" in verdict.reasons[0] and "TP size 4" in verdict.reasons[0]


def test_every_limit_is_of_a_record_that_is_needed_there():
    records = {record.id: record for record in read_records()}
    for limit in LIMITS:
        for release, outcomes in zip(RELEASES, (limit.first, limit.later)):
            if limit.record and any(outcomes.values()):
                stand = records[limit.record].at(release)
                assert stand.state != "carried", (limit.record, limit.why, release)
