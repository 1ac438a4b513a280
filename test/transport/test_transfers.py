"""Transfers over NIXL (UCX), Mooncake (TCP) and MemFabric; every byte on decode is compared."""

import warnings

import pytest
from engine_release import (
    SINCE_0_5_18,
    SINCE_0_5_23,
    nightly_if_not_default,
    slow_memfabric_marks,
    with_marks,
)
from fleet import Fleet, Side
from transfer_checks import (
    HANG_SECONDS,
    assert_all_right,
    assert_heads_moved,
    assert_no_room_kept,
    assert_ranks_can_join_while_sending,
    assert_right,
    moves_heads,
    nightly_except,
    only_0_5_9,
    sampled_for_other_releases,
)
from transport_cases import (
    ASCEND,
    HEADS,
    MOONCAKE,
    STAGES,
    STOCK,
    STOCK_NARROWER_V,
    ascend,
    same_widths,
    tp,
    with_environment,
    with_fields,
)

from pd_harness.device import device

pytestmark = pytest.mark.transport


def assert_all_transfer(servers):
    assert_all_right(servers)
    assert_no_room_kept(servers, seconds=0)
    assert_heads_moved(servers)


@pytest.mark.parametrize("name", sampled_for_other_releases(HEADS))
def test_nixl_transfers_every_byte_between_tp_sizes(serve, name):
    with serve(HEADS[name]) as servers:
        assert_all_transfer(servers)


PAGED = ["tp2_to_1", "tp1_to_2", "tp2_to_4_replicated_on_decode", "pp2_odd"]


@pytest.mark.parametrize("page_size", [1, 128])
@pytest.mark.parametrize("name", sampled_for_other_releases(PAGED))
def test_nixl_page_sizes(serve, name, page_size):
    fleet = {**HEADS, **STAGES}[name]
    with serve(with_fields(fleet, page_size=page_size)) as servers:
        assert_all_transfer(servers)


@pytest.mark.parametrize("name", sampled_for_other_releases(STAGES))
def test_nixl_transfers_every_byte_between_stages(serve, name):
    with serve(STAGES[name]) as servers:
        assert_all_transfer(servers)


@pytest.mark.nightly
def test_nixl_tp8_to_16_replicated_on_both(serve):
    with serve(tp(8, 16)) as servers:
        assert_all_transfer(servers)


@pytest.mark.parametrize("name", sampled_for_other_releases(MOONCAKE))
def test_mooncake_transfers_every_byte(serve, name):
    with serve(with_fields(MOONCAKE[name], backend="mooncake")) as servers:
        assert_all_right(servers)
        assert_heads_moved(servers)


@pytest.mark.parametrize("name", sampled_for_other_releases(ASCEND))
def test_ascend_transfers_every_byte(serve, name):
    with serve(ASCEND[name]) as servers:
        assert_all_right(servers)
        assert_heads_moved(servers)


DEVICE_RDMA = {"ASCEND_MF_TRANSFER_PROTOCOL": "device_rdma"}
needs_driver_stub = pytest.mark.skipif(
    device() != "cpu", reason="the stand-in for the driver says how it was asked"
)


@needs_driver_stub
@pytest.mark.parametrize("name", nightly_except(ASCEND, "tp2_to_1"))
def test_ascend_transfers_every_byte_by_device_rdma(serve, name, tmp_path):
    log = tmp_path / "driver"
    fleet = with_environment(ASCEND[name], **DEVICE_RDMA, PD_DRIVER_LOG=str(log))
    with serve(fleet) as servers:
        assert_all_right(servers)
    assert " pair " in log.read_text()


# Each of 4 senders sends 14,400 rows of single tokens at once: no two pages are neighbours.
MANY = Fleet(Side(tp=2, pp=2), layers=12, page_size=1, pages=2400)
MANY_PAGES = (list(range(0, 2400, 2)), list(range(1, 2400, 2)))


@needs_driver_stub
@pytest.mark.nightly
def test_more_copies_than_the_device_queue_holds(serve):
    """A send queue of 4,096 would reject the rest of a single batch."""
    fleet = with_fields(same_widths(MANY), backend="ascend")
    limited = with_environment(fleet, **DEVICE_RDMA, PD_DRIVER_SEND_QUEUE="4096")
    with serve(limited) as servers:
        assert_right(servers, *MANY_PAGES, seconds=60)


@pytest.mark.parametrize("name", sampled_for_other_releases(STOCK, slow_memfabric_marks))
def test_stock(serve, name):
    fleet, state = STOCK[name]
    wanted = state if isinstance(state, tuple) else (state,)
    # MemFabric 1.0.8 sometimes rejects a stock rank's first write.
    starts = 2 if fleet.backend == "ascend" and "failed" not in wanted else 1
    for _ in range(starts):
        with serve(same_widths(fleet), "stock", "stock") as servers:
            seconds = HANG_SECONDS if state == "hang" else 8
            outcome = servers.request([9, 2, 3], [0, 1, 2], seconds=seconds)
        if outcome.state != "failed" or starts == 1:
            break
        warnings.warn(f"MemFabric rejected a write of stock: {outcome}", stacklevel=1)
    assert outcome.state in wanted, outcome


@nightly_if_not_default
def test_stock_with_a_narrower_v(serve):
    """Stock sends V with K's lengths, past the end of V's memory or into the next buffer."""
    fleet, ended = STOCK_NARROWER_V
    with serve(fleet, "stock", "stock") as servers:
        outcome = servers.request([9, 2, 3], [0, 1, 2], seconds=8)
    # NIXL rejects the write if memory ends behind V; otherwise the next buffer's bytes arrive as V.
    assert outcome.state in (ended, "wrong"), outcome
    assert outcome.state == ended or "('v', False," in outcome.reasons, outcome


MIXED_0_5_9 = {"nixl-pp2": STAGES["pp2"]}
MIXED_LATER = {
    "nixl-tp2_to_1": HEADS["tp2_to_1"],
    **({"nixl-mla_pp2_odd": STAGES["mla_pp2_odd"]} if SINCE_0_5_23 else {}),
    "mooncake-pp2": with_fields(STAGES["pp2"], backend="mooncake"),
    "ascend-mla_2_2_3": ASCEND["mla_2_2_3"],
}
# Wherever stock alone works, one side may be stock, because a rollout goes server by server.
MIXED = {
    **{f"nixl-{name}": HEADS[name] for name in ("tp1_to_1", "tp2_to_2", "tp1_to_2")},
    **{f"nixl-{name}": STAGES[name] for name in ("pp2_to_pp2", "draft_on_both")},
    **(MIXED_LATER if SINCE_0_5_18 else MIXED_0_5_9),
    **{f"nixl-{name}": STAGES[name] for name in ("mla_tp1_to_2", "nsa")},
    "mooncake-tp1_to_1": tp(1, 1, backend="mooncake"),
    "mooncake-tp2_to_1": tp(2, 1, backend="mooncake"),
    **{f"ascend-{name}": ASCEND[name] for name in ("mla", "mla_index_keys", "tp2_to_1")},
    "ascend-mla_draft_on_both": ascend(Side(draft_layers=1), Side(draft_layers=1), mla=True),
}


@pytest.mark.parametrize("name", sampled_for_other_releases(MIXED))
def test_stock_prefill(serve, name):
    with serve(same_widths(MIXED[name]), "stock", "patched") as servers:
        assert_all_right(servers)
        assert_heads_moved(servers, by="")


@pytest.mark.parametrize("name", sampled_for_other_releases(MIXED, slow_memfabric_marks))
def test_stock_decode(serve, name):
    """Packed rows arrive in their places; only interleaving needs a patched decode server."""
    with serve(same_widths(MIXED[name]), "patched", "stock") as servers:
        assert_all_right(servers)
        assert_heads_moved(servers, by=moves_heads(servers.fleet).replace("decode", ""))


@with_marks(*slow_memfabric_marks("ascend"))
def test_draft_on_stock_decode(serve):
    """Prefill is patched, because a stock prefill rank would write metadata to other slots."""
    with serve(ascend(Side(), Side(draft_layers=1), mla=True), "patched", "stock") as servers:
        assert_all_right(servers)


@pytest.mark.parametrize("name", ["tp2_to_1", "tp4_to_2"])
def test_stock_decode_counts_patched_senders(serve, name):
    """Stock 0.5.9 alone hangs: patched senders have unique numbers, which stock decode counts."""
    with serve(HEADS[name], "patched", "stock") as servers:
        assert_right(servers, [9, 2, 3], [0, 1, 2])


@pytest.mark.parametrize(
    "backend, pp",
    [("nixl", 2), ("mooncake", 2), pytest.param("mooncake", 1, marks=pytest.mark.nightly)],
)
def test_request_of_many_copies_arrives(serve, backend, pp):
    """Mooncake's TCP accepts no more copies at once than those of two stages."""
    fleet = with_fields(MANY, backend=backend, prefill=Side(tp=2, pp=pp))
    with serve(fleet) as servers:
        assert_right(servers, *MANY_PAGES, seconds=60)
        assert_heads_moved(servers)


@only_0_5_9("later agents of NIXL lock themselves")
@pytest.mark.parametrize("decode_tp", nightly_except([1, 2], 1))
def test_decode_ranks_join_while_transfers_run(serve, decode_tp):
    assert_ranks_can_join_while_sending(serve, decode_tp)
