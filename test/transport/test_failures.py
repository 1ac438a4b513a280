"""A request that cannot be served fails on both sides at once, with its reason; the next works."""

import time

import pytest
from fleet import Fleet, Side
from of_release import IS_LATER

pytestmark = pytest.mark.transport


def refused(serve, fleet, seconds=10):
    """The outcome of a request between servers that cannot work together, and that it came fast."""
    with serve(fleet) as servers:
        begun = time.monotonic()
        outcome = servers.request([1, 2], [3, 4], seconds=30)
        assert outcome.state == "failed", outcome
        assert {answer["state"] for answer in (*outcome.prefill, *outcome.decode)} == {"failed"}
        assert time.monotonic() - begun < seconds
        # Not only the first request: the refusal stays.
        assert servers.request([1, 2], [3, 4], seconds=30).state == "failed"
    return outcome.reasons


@pytest.mark.parametrize("backend", ["nixl", "mooncake"])
def test_tp_sizes_neither_of_which_divides_the_other(serve, backend):
    fleet = Fleet(Side(tp=3), Side(tp=2), kv_heads=6, draft_heads=6, backend=backend)
    reasons = refused(serve, fleet)
    assert "prefill attention TP size 3" in reasons
    assert "decode attention TP size 2" in reasons


# What the engine compares by itself.
PAGE_SIZES, DTYPES = (
    (
        "prefill server has page_size=8, but decode server has page_size=16",
        "prefill server has kv_cache_dtype=int64, but decode server has kv_cache_dtype=float64",
    )
    if IS_LATER
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
            "k, layer 0, bytes a page: prefill has 2048, decode has 4096",
            id="head_width",
        ),
        pytest.param(
            Side(kv_heads=4),
            Side(kv_heads=8),
            "k, layer 0, KV heads in all: prefill has 4, decode has 8",
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
def test_peers_that_do_not_fit(serve, backend, prefill, decode, said):
    assert said in refused(serve, Fleet(prefill, decode, backend=backend))


ALL_HAVE = {"request_status", "failure_records", "arrived_digests", "sent_pages"}
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
            "asked_rooms",
            "failing_rooms",
        },
    ),
}
if IS_LATER:
    ALL_HAVE = {"request_status", "failure_records", "arrived_digests"}
    ALL_HAVE |= {"_deferred_ack_targets", "_deferred_ack_poisoned_rooms"}
    LATER_TABLES = (
        {"transfer_infos", "req_to_decode_prefix_len"},
        {
            "required_prefill_response_num_table",
            "prefill_response_tracker",
            "addr_to_rooms_tracker",
            "_deferred_abort_ack_tracker",
        },
    )
    TABLES = {"nixl": LATER_TABLES, "mooncake": LATER_TABLES}


@pytest.mark.parametrize("backend", TABLES)
def test_the_tables_that_are_looked_at(serve, backend):
    """One with another name would never be seen to keep anything."""
    with serve(Fleet(backend=backend)) as servers:
        found = [set(kept) for kept in servers.kept()]
    assert found == [ALL_HAVE | names for names in TABLES[backend]]


@pytest.mark.parametrize("backend", ["nixl", "mooncake"])
def test_a_refused_room_is_not_opened(serve, backend):
    """Though the scheduler may ask for that before it has looked at the room's state."""
    with serve(Fleet(Side(page_size=8), Side(page_size=16), backend=backend)) as servers:
        (decode,) = servers.decode
        assert decode.call("ask", room=1, pages=[3, 4]) == {"state": "asked"}
        ended = decode.call("end", room=1, seconds=5)
        assert ended["state"] == "failed" and PAGE_SIZES in ended["reason"], ended
        assert set(decode.call("kept").values()) == {0}


@pytest.mark.parametrize(
    "fleet",
    [Fleet(), Fleet(Side(tp=2), Side()), Fleet(Side(), Side(tp=2)), Fleet(Side(pp=2))],
    ids=lambda fleet: f"{fleet.prefill}-{fleet.decode}",
)
def test_an_error_while_sending_fails_that_request_alone(serve, fleet):
    """Decode has set aside fewer pages than prefill computes: stock's scheduler dies of it."""
    with serve(fleet) as servers:
        begun = time.monotonic()
        outcome = servers.request([1, 2, 3], [3, 4, 5], leave_out=1, seconds=30)
        assert {answer["state"] for answer in (*outcome.prefill, *outcome.decode)} == {"failed"}
        assert "prefill sends 3 pages where decode has set aside 2" in outcome.reasons
        assert time.monotonic() - begun < 5
        again = servers.request([1, 2, 3], [6, 7, 8])
        assert again.state == "right", again
        for kept in servers.kept():
            assert set(kept.values()) == {0}, kept


def test_stock_sends_more_pages_than_were_set_aside(serve):
    """Its scheduler raises, and decode waits; in later ones the last page is left out unsaid."""
    ends = ("success", "wrong") if IS_LATER else ("raised", "hang")
    with serve(Fleet(v_width=4), "stock", "stock") as servers:
        outcome = servers.request([1, 2, 3], [3, 4, 5], leave_out=1, seconds=5)
    assert (outcome.prefill[0]["state"], outcome.decode[0]["state"]) == ends, outcome
