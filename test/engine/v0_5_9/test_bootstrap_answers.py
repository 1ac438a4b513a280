"""Whatever a client or a peer sends, no scheduler crashes: real managers, without a server."""

import contextlib
import time
from types import SimpleNamespace

import numpy as np
import pytest
import requests
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.kv_layout import Notification
from sglang.srt.disaggregation.mooncake.conn import (
    KVTransferError,
    MooncakeKVManager,
    MooncakeKVSender,
)
from sglang.srt.disaggregation.pd.room_failures import DUPLICATE_ROOM

from pd_harness.polling import wait_until

pytestmark = pytest.mark.engine

FAILURES = (RuntimeError, KVTransferError)
SIZES = [f"prefill_{name}_size" for name in ("attn_tp", "dp", "pp", "page")]
PAGES = np.array([3], np.int32)


def room_table_sizes(manager) -> dict[str, int]:
    """The number of entries in each table of rooms."""
    kept = ("request_status", "failure_records", "transfer_statuses", "requested_rooms")
    return {name: len(getattr(manager, name)) for name in kept}


def failure_of(request) -> str:
    """Checks that a sender's or receiver's request has failed; returns the reason."""
    assert wait_until(lambda: request.poll() == KVPoll.Failed, 5)
    with pytest.raises(FAILURES) as raised:
        request.failure_exception()
    return str(raised.value)


@pytest.mark.parametrize(
    "what, answer",
    [
        ("sizes", [1, 1, 1, 16]),
        ("sizes", "prefill"),
        ("sizes", None),
        ("sizes", {}),
        *(("sizes", {name: wrong}) for name in SIZES for wrong in (0, -1, "1", 1e9)),
        ("sizes", {"prefill_attn_tp_size": True}),
        ("sizes", requests.ConnectionError("refused")),
        ("sizes", ValueError("no JSON")),
        ("rank", []),
        ("rank", {}),
        ("rank", {"rank_ip": 7}),
        ("rank", {"rank_port": "x"}),
        ("rank", {"rank_port": None}),
    ],
    ids=str,
)
def test_invalid_bootstrap_answer_fails_the_request(decode, server, make_receiver, what, answer):
    """A client names the server; decode's scheduler reads its answer."""
    if isinstance(answer, dict) and answer:  # only these values are wrong
        answer = {**getattr(server, what), **answer}
    setattr(server, what, answer)
    receiver = make_receiver(7)
    reason = {"sizes": "did not return prefill's sizes", "rank": "is not registered yet"}[what]
    failure = failure_of(receiver)
    assert reason in failure and server.address in failure
    assert wait_until(lambda: not receiver.is_querying() and receiver.pending_query is None, 5)
    assert not any(room_table_sizes(decode).values())


def test_unreachable_bootstrap_server_is_not_retried_immediately(
    decode, server, make_receiver, locate, monkeypatch
):
    """The scheduler waits for each answer."""
    sizes, server.sizes = server.sizes, requests.Timeout("no answer")
    for room in range(5):
        failure_of(make_receiver(room))
    assert len(server.queried_ranks) == 1
    server.sizes = sizes
    monkeypatch.setitem(decode.retry_bootstrap_at, server.address, time.monotonic() - 1)
    locate(9)


def test_second_request_of_a_room_fails(decode, make_receiver, locate):
    """The second request fails without affecting the first."""
    first = locate(7)
    first.init(PAGES, 0)
    second = make_receiver(7)
    second.init(PAGES, 1)
    second.abort()
    assert failure_of(second).endswith(DUPLICATE_ROOM)
    second.clear()
    assert first.poll() == KVPoll.WaitingForInput
    report_success(decode, 7)
    assert first.poll() == KVPoll.Success
    first.clear()
    assert not any(room_table_sizes(decode).values())
    locate(7)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_duplicate_room_on_two_servers_leaves_no_tracked_rooms(
    decode, server, make_receiver, locate, order
):
    """No server gets heartbeats forever, whichever request ends first."""
    made = [locate(7), make_receiver(7, "10.9.9.8:8998")]
    made[0].abort()
    for n in order:
        failure_of(made[n])
    assert not any(decode.addr_to_rooms_tracker.values())
    made = [locate(7), make_receiver(7)]
    failure_of(made[1])
    assert decode.addr_to_rooms_tracker[server.address] == {7}


def test_aux_data_of_a_finished_room_is_dropped():
    """The slot is another request's by then."""
    row = np.zeros((2, 4), np.uint8)
    manager = MooncakeKVManager.__new__(MooncakeKVManager)
    sizes = {"aux_item_lens": [4], "aux_data_lens": [8]}
    args = SimpleNamespace(aux_data_ptrs=[row.ctypes.data], **sizes)
    manager.__dict__.update(kv_args=args, requested_rooms={7})
    for room, slot in ((7, 0), (8, 1)):
        manager._handle_aux_data(
            [b"AUX_DATA", b"%d" % room, b"0", b"%d" % slot, b"\0\0\0\4", b"\1" * 4]
        )
    assert row.tolist() == [[1] * 4, [0] * 4]


def report_success(manager, room: int) -> None:
    """Notifies decode, as prefill does, that the room is written."""
    if isinstance(manager, MooncakeKVManager):
        manager._handle_status([b"%d" % room, b"%d" % KVPoll.Success, b"0"])
    else:
        for notice in (Notification(room, "kv", is_last=True), Notification(room, "aux")):
            manager.transfer_statuses[room].add("prefill", notice)


def test_stale_status_does_not_affect_a_reused_room(decode, locate):
    """Decode has sent no metadata yet; otherwise it would decode KV that has not arrived."""
    receiver = locate(7)
    report_success(decode, 7)
    assert receiver.poll() == KVPoll.WaitingForInput
    decode.update_status(7, KVPoll.Success)
    assert receiver.poll() == KVPoll.WaitingForInput
    receiver.clear()
    receiver = locate(8)
    report_success(decode, 8)
    receiver.init(PAGES, 0)
    assert receiver.poll() == KVPoll.WaitingForInput


@pytest.fixture
def prefill(make_prefill):
    """A prefill rank's manager."""
    return make_prefill(MooncakeKVManager)


def make_sender(prefill, room: int) -> MooncakeKVSender:
    return MooncakeKVSender(prefill, "10.9.9.9:8998", room, [0], 0)


def test_two_prefill_requests_of_one_room_fail(prefill):
    """Also if a third comes after the first has ended: no computed request is Bootstrapping."""
    first, second = (make_sender(prefill, 7) for _ in range(2))
    assert first.poll() == second.poll() == KVPoll.Failed
    assert DUPLICATE_ROOM in failure_of(first)
    third = make_sender(prefill, 7)
    assert second.poll() == third.poll() == KVPoll.Failed
    for sender in (second, third):
        failure_of(sender)
    assert make_sender(prefill, 7).poll() == KVPoll.Bootstrapping


@pytest.mark.parametrize("is_kept", [True, False])
def test_three_prefill_requests_of_one_room_fail(prefill, is_kept):
    """The first is still computed, and is polled last; the second may have been collected."""
    first, second = (make_sender(prefill, 7) for _ in range(2))
    assert second.poll() == KVPoll.Failed
    with contextlib.suppress(*FAILURES):
        second.failure_exception()
    if not is_kept:
        del second
    third = make_sender(prefill, 7)
    assert first.poll() == third.poll() == KVPoll.Failed


def test_late_failure_does_not_reopen_a_room(prefill):
    prefill.fail(7, "too late")
    assert not prefill.request_status and not prefill.failure_records


@pytest.mark.parametrize("unsettled, states", [(0.0, [True, False]), (30.0, [True, True])])
def test_failed_room_waits_a_limited_time_for_other_senders(decode, locate, unsettled, states):
    """Polls a failed room after 29 and 31 s; it waits longer if a failed write may be running."""
    decode.unsettled_seconds = unsettled
    receiver, now = locate(7), time.monotonic()
    receiver.init(PAGES, 0)
    receiver.abort()
    found = []
    for seconds in (29, 31):
        receiver.failing_since = now - seconds
        found.append(receiver.poll() != KVPoll.Failed)
    assert found == states
    receiver.failing_since = now - unsettled - 31
    assert receiver.poll() == KVPoll.Failed


def test_wall_clock_jump_frees_no_pages(locate, monkeypatch):
    """Neither those of an open room, nor those of a failed one that waits for its senders."""
    made = [locate(room) for room in (7, 8)]
    for receiver in made:
        receiver.init(PAGES, 0)
    made[0].abort()
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 3600)
    assert [receiver.poll() for receiver in made] == [KVPoll.WaitingForInput] * 2
    assert not made[1].is_aborted
