"""Every byte of every decode rank, over real NIXL (UCX) and real Mooncake (TCP)."""

import dataclasses

import pytest
from fleet import Fleet, Side
from transfer_checks import HANG_SECONDS, REQUESTS

pytestmark = pytest.mark.transport


def tp(prefill, decode, heads=4, **more):
    return Fleet(Side(tp=prefill), Side(tp=decode), kv_heads=heads, **more)


def changed(fleet, **fields):
    return dataclasses.replace(fleet, **fields)


def same_widths(fleet):
    """Stock NIXL takes V to be as wide as K."""
    return changed(fleet, v_width=fleet.k_width)


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
    "nsa": Fleet(mla=True, index_keys=True, page_size=64),
    "nsa_tp2_to_1": Fleet(Side(tp=2), mla=True, index_keys=True, page_size=64),
    "nsa_pp2_odd": Fleet(Side(pp=2), layers=3, mla=True, index_keys=True, page_size=64),
}


def assert_all_right(servers, requests=REQUESTS):
    for src, dst, chunks in requests:
        outcome = servers.request(src, dst, chunks)
        assert outcome.state == "right", (src, dst, chunks, outcome)
    for kept in servers.kept():
        assert set(kept.values()) == {0}, kept


@pytest.mark.parametrize("name", HEADS)
def test_nixl_heads(serve, name):
    with serve(HEADS[name]) as servers:
        assert_all_right(servers)


@pytest.mark.parametrize("page_size", [1, 128])
@pytest.mark.parametrize(
    "fleet",
    [HEADS["tp2_to_1"], HEADS["tp2_to_4_replicated_on_decode"], STAGES["pp2_odd"]],
    ids=["tp2_to_1", "tp2_to_4_replicated_on_decode", "pp2_odd"],
)
def test_nixl_page_sizes(serve, fleet, page_size):
    with serve(changed(fleet, page_size=page_size)) as servers:
        assert_all_right(servers)


@pytest.mark.parametrize("name", STAGES)
def test_nixl_stages(serve, name):
    with serve(STAGES[name]) as servers:
        assert_all_right(servers)


@pytest.mark.nightly
def test_nixl_tp8_to_16_replicated_on_both(serve):
    with serve(tp(8, 16)) as servers:
        assert_all_right(servers)


MOONCAKE = {
    **{name: HEADS[name] for name in ("tp1_to_1", "tp2_to_1", "tp1_to_4_replicated_on_decode")},
    **{name: HEADS[name] for name in ("tp4_to_1_replicated_on_prefill",)},
    **{name: STAGES[name] for name in ("pp2", "pp2_odd", "pp2_tp2_to_1", "mla_pp2_odd")},
}


@pytest.mark.parametrize("name", MOONCAKE)
def test_mooncake(serve, name):
    with serve(changed(MOONCAKE[name], backend="mooncake")) as servers:
        for src, dst, chunks in REQUESTS:
            outcome = servers.request(src, dst, chunks)
            assert outcome.state == "right", (src, dst, chunks, outcome)


def ascend(prefill=None, decode=None, **more):
    """The NPU pools over MemFabric's calls; K and V of these pools are of one width."""
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


@pytest.mark.parametrize("name", ASCEND)
def test_ascend(serve, name):
    with serve(ASCEND[name]) as servers:
        for src, dst, chunks in REQUESTS:
            outcome = servers.request(src, dst, chunks)
            assert outcome.state == "right", (src, dst, chunks, outcome)


# What the same requests do on the stock engine, where K and V are of one width.
STOCK = {
    "nixl-tp1_to_1": (HEADS["tp1_to_1"], "right"),
    "nixl-tp1_to_2": (HEADS["tp1_to_2"], "right"),
    "nixl-pp2": (STAGES["pp2"], "right"),
    "nixl-tp2_to_1": (HEADS["tp2_to_1"], "hang"),
    "nixl-tp4_to_1_replicated_on_prefill": (HEADS["tp4_to_1_replicated_on_prefill"], "hang"),
    "nixl-tp1_to_4_replicated_on_decode": (HEADS["tp1_to_4_replicated_on_decode"], "raised"),
    "nixl-tp2_to_8_replicated_on_decode": (HEADS["tp2_to_8_replicated_on_decode"], "raised"),
    "nixl-pp2_odd": (STAGES["pp2_odd"], "wrong"),
    "nixl-pp2_tp2_to_1": (STAGES["pp2_tp2_to_1"], "hang"),
    "mooncake-tp2_to_1": (tp(2, 1, backend="mooncake"), "right"),
    "mooncake-pp2_odd": (Fleet(Side(pp=2), layers=7, backend="mooncake"), "wrong"),
    **{
        f"ascend-{name}": (ASCEND[name], state)
        for name, state in {
            "mla": "right",
            "mla_index_keys": "right",
            "tp2_to_1": "right",
            "mla_30_31": "wrong",
            "mla_2_2_3": "wrong",
            "mla_index_keys_2_2_3": "wrong",
            "mla_draft_on_both": "wrong",
            "pp2_odd": "wrong",
            "fia": "wrong",
            "fia_pp2_odd": "wrong",
            "fia_tp2_to_1": "wrong",
        }.items()
    },
}


@pytest.mark.parametrize("name", STOCK)
def test_stock(serve, name):
    fleet, state = STOCK[name]
    with serve(same_widths(fleet), "stock", "stock") as servers:
        seconds = HANG_SECONDS if state == "hang" else 8
        outcome = servers.request([9, 2, 3], [0, 1, 2], seconds=seconds)
        assert outcome.state == state, outcome


def test_stock_with_a_narrower_v(serve):
    """Stock sends V in K's lengths: past the end of the memory, or into the neighbour's."""
    with serve(HEADS["tp1_to_1"], "stock", "stock") as servers:
        outcome = servers.request([9, 2, 3], [0, 1, 2], seconds=8)
        # Where memory ends there, NIXL does not take it; else others' bytes arrive as V.
        (sent,), (got,) = outcome.prefill, outcome.decode
        assert "right" not in (outcome.state, got["state"]), outcome
        assert sent["state"] == "raised" or "('v', False," in got["reason"], outcome


# Wherever stock alone works, one side may be stock: a rollout goes server by server.
MIXED = {
    **{f"nixl-{name}": HEADS[name] for name in ("tp1_to_1", "tp2_to_2", "tp1_to_2")},
    **{f"nixl-{name}": STAGES[name] for name in ("pp2", "pp2_to_pp2", "draft_on_both")},
    **{f"nixl-{name}": STAGES[name] for name in ("mla_tp1_to_2", "nsa")},
    "mooncake-tp1_to_1": tp(1, 1, backend="mooncake"),
    "mooncake-tp2_to_1": tp(2, 1, backend="mooncake"),
    **{f"ascend-{name}": ASCEND[name] for name in ("mla", "mla_index_keys", "tp2_to_1")},
    "ascend-mla_draft_on_both": ascend(Side(draft_layers=1), Side(draft_layers=1), mla=True),
}


@pytest.mark.parametrize("engines", [("stock", "patched"), ("patched", "stock")], ids="->".join)
@pytest.mark.parametrize("fleet", MIXED.values(), ids=MIXED)
def test_mixed_fleet(serve, fleet, engines):
    with serve(same_widths(fleet), *engines) as servers:
        for src, dst, chunks in REQUESTS:
            outcome = servers.request(src, dst, chunks)
            assert outcome.state == "right", (src, dst, chunks, outcome)


def test_draft_on_stock_decode(serve):
    """(A stock prefill rank would write its metadata to other slots.)"""
    with serve(ascend(Side(), Side(draft_layers=1), mla=True), "patched", "stock") as servers:
        for src, dst, chunks in REQUESTS:
            outcome = servers.request(src, dst, chunks)
            assert outcome.state == "right", (src, dst, chunks, outcome)


@pytest.mark.parametrize("name", ["tp2_to_1", "tp4_to_2"])
def test_stock_decode_counts_patched_senders(serve, name):
    """Where stock alone hangs: our senders' numbers are unique, and stock decode counts them."""
    with serve(HEADS[name], "patched", "stock") as servers:
        outcome = servers.request([9, 2, 3], [0, 1, 2])
        assert outcome.state == "right", outcome


@pytest.mark.parametrize("backend", ["nixl", "mooncake"])
def test_many_copies(serve, backend):
    """14,400 token slices from each of 4 senders, all at once: as much as Mooncake's TCP takes."""
    pages = list(range(0, 2400, 2))
    sides = {"prefill": Side(tp=2, pp=2), "decode": Side()}
    fleet = Fleet(**sides, layers=12, page_size=1, pages=2400, backend=backend)
    with serve(fleet) as servers:
        outcome = servers.request(pages, [page + 1 for page in pages], seconds=60)
        assert outcome.state == "right", outcome
