"""An unservable request fails on both sides at once, with its reason; the next one works."""

import time

import pytest
from engine_release import IS_0_5_18, SINCE_0_5_18, SINCE_0_5_23
from fleet import Fleet, Side
from transfer_checks import BACKENDS, assert_no_room_kept, assert_right

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


@pytest.mark.parametrize("backend", BACKENDS)
def test_indivisible_tp_sizes_are_refused(serve, backend):
    fleet = Fleet(Side(tp=3), Side(tp=2), kv_heads=6, draft_heads=6, backend=backend)
    reasons = refusal_reasons(serve, fleet)
    assert "prefill attention TP size 3" in reasons
    assert "decode attention TP size 2" in reasons


PAGE_SIZES = "prefill page size 8 and decode page size 16 differ"
DTYPES = "KV dtype: prefill has int64, decode has float64"
if SINCE_0_5_18:  # the engine itself compares these two
    PAGE_SIZES = "prefill server has page_size=8, but decode server has page_size=16"
    DTYPES = "prefill server has kv_cache_dtype=int64, but decode server has kv_cache_dtype=float64"
INCOMPATIBLE = {
    "page_size": ({"page_size": 8}, {"page_size": 16}, PAGE_SIZES),
    "layer_count": (
        {"model_layers": 3},
        {"model_layers": 2},
        "number of layers: prefill has 3, decode has 2",
    ),
    "head_width": (
        {"k_width": 4},
        {"k_width": 8},
        "k, layer 0, bytes per page: prefill has 2048, decode has 4096",
    ),
    "head_count": (
        {"kv_heads": 4},
        {"kv_heads": 8},
        "k, layer 0, total KV heads: prefill has 4, decode has 8",
    ),
    "dtype_of_the_same_size": ({"dtype": "int64"}, {"dtype": "float64"}, DTYPES),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", INCOMPATIBLE)
def test_incompatible_servers_are_refused(serve, backend, name):
    prefill, decode, said = INCOMPATIBLE[name]
    fleet = Fleet(Side(**prefill), Side(**decode), backend=backend)
    assert said in refusal_reasons(serve, fleet)


# Tables of both sides, of prefill and of decode.
BOTH = {"request_status", "failure_records", "arrived_digests", "sent_pages"}
PREFILL = {"transfer_infos"}
DECODE = {"required_prefill_response_num_table", "addr_to_rooms_tracker"}
OF_BACKEND = {
    "nixl": {"transfer_statuses"},
    "mooncake": {"prefill_response_tracker", "requested_rooms", "failing_rooms", "arrived_units"},
}
PREFILL_OF_BACKEND = dict.fromkeys(BACKENDS, set())
if SINCE_0_5_18:
    BOTH |= {"arrived_units"}
    PREFILL |= {"req_to_decode_prefix_len"}
    DECODE |= {"prefill_response_tracker"}
    # Reading it creates it: a default on the class, for managers that tests fill by hand.
    DECODE |= {"transfer_infos"}
    OF_BACKEND = dict.fromkeys(BACKENDS, set())
if SINCE_0_5_23:
    BOTH |= {"_deferred_ack_targets"}
    DECODE |= {"_deferred_abort_ack_tracker"}
if IS_0_5_18:
    BOTH |= {"requested_ranks", "acks", "ack_targets", "late_notices", "writing"}
    OF_BACKEND["nixl"] = {"transfer_statuses"}
    PREFILL_OF_BACKEND["nixl"] = {"exceptions"}


@pytest.mark.parametrize("backend", BACKENDS)
def test_room_tables_exist(serve, backend):
    """Leak checks would miss a table under another name."""
    with serve(Fleet(backend=backend)) as servers:
        found = [set(kept) for kept in servers.room_counts()]
    of_prefill, of_decode = PREFILL_OF_BACKEND[backend], OF_BACKEND[backend]
    assert found == [BOTH | PREFILL | of_prefill, BOTH | DECODE | of_decode]


@pytest.mark.parametrize("backend", BACKENDS)
def test_refused_room_is_not_opened(serve, backend):
    """The scheduler may try to open the room before it polls the room's state."""
    with serve(Fleet(Side(page_size=8), Side(page_size=16), backend=backend)) as servers:
        (decode,) = servers.decode
        assert decode.call("open_room", room=1, pages=[3, 4]) == {"state": "done"}
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
        assert_right(servers, [1, 2, 3], [6, 7, 8])
        assert_no_room_kept(servers, seconds=0)


def test_stock_sends_more_pages_than_decode_allocated(serve):
    """0.5.9's scheduler raises and decode waits; later releases silently omit the last page."""
    ends = ("success", "wrong") if SINCE_0_5_18 else ("raised", "hang")
    with serve(Fleet(v_width=4), "stock", "stock") as servers:
        outcome = servers.request([1, 2, 3], [3, 4, 5], leave_out=1, seconds=5)
    assert (outcome.prefill[0]["state"], outcome.decode[0]["state"]) == ends, outcome
