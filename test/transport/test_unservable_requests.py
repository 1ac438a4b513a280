"""An unservable request fails on both sides at once, with its reason; the next one works."""

import time

import pytest
from engine_release import SINCE_0_5_20
from fleet import Fleet, Side

pytestmark = pytest.mark.transport


def refusal_reasons(serve, fleet, seconds=10):
    """Returns why a request between incompatible servers failed, which must take few seconds."""
    with serve(fleet) as servers:
        begun = time.monotonic()
        outcome = servers.request([1, 2], [3, 4], seconds=30)
        assert outcome.state == "failed", outcome
        assert {answer["state"] for answer in (*outcome.prefill, *outcome.decode)} == {"failed"}
        assert time.monotonic() - begun < seconds
        # The servers refuse later requests, too.
        assert servers.request([1, 2], [3, 4], seconds=30).state == "failed"
    return outcome.reasons


@pytest.mark.parametrize("backend", ["nixl", "mooncake"])
def test_indivisible_tp_sizes_are_refused(serve, backend):
    fleet = Fleet(Side(tp=3), Side(tp=2), kv_heads=6, draft_heads=6, backend=backend)
    reasons = refusal_reasons(serve, fleet)
    assert "prefill attention TP size 3" in reasons
    assert "decode attention TP size 2" in reasons


# From 0.5.20 on, the engine itself compares these two.
PAGE_SIZES, DTYPES = (
    (
        "prefill server has page_size=8, but decode server has page_size=16",
        "prefill server has kv_cache_dtype=int64, but decode server has kv_cache_dtype=float64",
    )
    if SINCE_0_5_20
    else (
        "prefill page size 8 and decode page size 16 differ",
        "KV dtype: prefill has int64, decode has float64",
    )
)


@pytest.mark.parametrize("backend", ["nixl", "mooncake"])
@pytest.mark.parametrize(
    "prefill, decode, said",
    [
        pytest.param(
            Side(page_size=8),
            Side(page_size=16),
            PAGE_SIZES,
            id="page_size",
        ),
        pytest.param(
            Side(model_layers=3),
            Side(model_layers=2),
            "number of layers: prefill has 3, decode has 2",
            id="layer_count",
        ),
        pytest.param(
            Side(k_width=4),
            Side(k_width=8),
            "k, layer 0, bytes per page: prefill has 2048, decode has 4096",
            id="head_width",
        ),
        pytest.param(
            Side(kv_heads=4),
            Side(kv_heads=8),
            "k, layer 0, total KV heads: prefill has 4, decode has 8",
            id="head_count",
        ),
        pytest.param(
            Side(dtype="int64"),
            Side(dtype="float64"),
            DTYPES,
            id="dtype_of_the_same_size",
        ),
    ],
)
def test_incompatible_servers_are_refused(serve, backend, prefill, decode, said):
    assert said in refusal_reasons(serve, Fleet(prefill, decode, backend=backend))


COMMON_TABLES = {"request_status", "failure_records", "arrived_digests", "sent_pages"}
TABLES = {
    "nixl": (
        {"transfer_infos"},
        {
            "transfer_statuses",
            "required_prefill_response_num_table",
            "addr_to_rooms_tracker",
        },
    ),
    "mooncake": (
        {"transfer_infos"},
        {
            "required_prefill_response_num_table",
            "prefill_response_tracker",
            "addr_to_rooms_tracker",
            "requested_rooms",
            "failing_rooms",
        },
    ),
}
if SINCE_0_5_20:
    COMMON_TABLES |= {"_deferred_ack_targets"}
    TABLES_0_5_23 = (
        {"transfer_infos", "req_to_decode_prefix_len"},
        {
            "required_prefill_response_num_table",
            "prefill_response_tracker",
            "addr_to_rooms_tracker",
            "_deferred_abort_ack_tracker",
        },
    )
    TABLES = {"nixl": TABLES_0_5_23, "mooncake": TABLES_0_5_23}


@pytest.mark.parametrize("backend", TABLES)
def test_room_tables_exist(serve, backend):
    """Leak checks would miss a table under another name."""
    with serve(Fleet(backend=backend)) as servers:
        found = [set(kept) for kept in servers.room_counts()]
    assert found == [COMMON_TABLES | names for names in TABLES[backend]]


@pytest.mark.parametrize("backend", ["nixl", "mooncake"])
def test_refused_room_is_not_opened(serve, backend):
    """The scheduler may try to open the room before it polls the room's state."""
    with serve(Fleet(Side(page_size=8), Side(page_size=16), backend=backend)) as servers:
        (decode,) = servers.decode
        assert decode.call("open_room", room=1, pages=[3, 4]) == {"state": "opened"}
        ended = decode.call("wait_for_room", room=1, seconds=5)
        assert ended["state"] == "failed" and PAGE_SIZES in ended["reason"], ended
        assert set(decode.call("room_counts").values()) == {0}


@pytest.mark.parametrize(
    "fleet",
    [Fleet(), Fleet(Side(tp=2), Side()), Fleet(Side(), Side(tp=2)), Fleet(Side(pp=2))],
    ids=lambda fleet: f"{fleet.prefill}-{fleet.decode}",
)
def test_send_error_fails_only_its_request(serve, fleet):
    """Decode allocates fewer pages than prefill computes, which crashes stock's scheduler."""
    with serve(fleet) as servers:
        begun = time.monotonic()
        outcome = servers.request([1, 2, 3], [3, 4, 5], leave_out=1, seconds=30)
        assert {answer["state"] for answer in (*outcome.prefill, *outcome.decode)} == {"failed"}
        assert "prefill sends 3 pages where decode has set aside 2" in outcome.reasons
        assert time.monotonic() - begun < 5
        again = servers.request([1, 2, 3], [6, 7, 8])
        assert again.state == "right", again
        for kept in servers.room_counts():
            assert set(kept.values()) == {0}, kept


def test_stock_sends_more_pages_than_decode_allocated(serve):
    """0.5.9's scheduler raises and decode waits; later releases silently omit the last page."""
    ends = ("success", "wrong") if SINCE_0_5_20 else ("raised", "hang")
    with serve(Fleet(v_width=4), "stock", "stock") as servers:
        outcome = servers.request([1, 2, 3], [3, 4, 5], leave_out=1, seconds=5)
    assert (outcome.prefill[0]["state"], outcome.decode[0]["state"]) == ends, outcome
