"""Whatever a client or a peer sends, no scheduler crashes: real managers, without a network."""

import contextlib
import threading
import time
from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import pytest
import requests
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.kv_layout import Notification, TransferStatus
from sglang.srt.disaggregation.mooncake.conn import (
    KVTransferError,
    MooncakeKVManager,
    MooncakeKVReceiver,
    MooncakeKVSender,
)
from sglang.srt.disaggregation.nixl.conn import NixlKVManager, NixlKVReceiver
from sglang.srt.disaggregation.pd.room_failures import DUPLICATE_ROOM
from sglang.srt.disaggregation.utils import DisaggregationMode

pytestmark = pytest.mark.engine

BACKENDS = {
    "mooncake": (MooncakeKVManager, MooncakeKVReceiver),
    "nixl": (NixlKVManager, NixlKVReceiver),
}
FAILURES = (RuntimeError, KVTransferError)
ADDRESS = "10.9.9.9:8998"
SIZES = {
    "prefill_attn_tp_size": 1,
    "prefill_dp_size": 1,
    "prefill_pp_size": 1,
    "prefill_page_size": 16,
}
RANK = {"rank_ip": "10.9.9.9", "rank_port": 4000}
PAGES = np.array([3], np.int32)


class FakeBootstrapServer:
    """A bootstrap server that answers with `sizes` for the server and `rank` for each rank."""

    def __init__(self, sizes=SIZES, rank=RANK):
        self.sizes, self.rank = sizes, rank
        self.query_count = 0

    def get(self, url, params, timeout):
        self.query_count += 1
        answer = self.sizes if params["engine_rank"] == -1 else self.rank
        if isinstance(answer, Exception):
            raise answer
        return SimpleNamespace(status_code=200, text=str(answer), json=lambda: answer)


@pytest.fixture(params=BACKENDS)
def decode(request, monkeypatch):
    """A function that makes a decode rank's receiver from a bootstrap server's answers."""
    manager_class, receiver_class = BACKENDS[request.param]
    manager = manager_class.__new__(manager_class)
    manager.__dict__.update(
        disaggregation_mode=DisaggregationMode.DECODE,
        request_status={},
        connection_pool={},
        connection_lock=threading.Lock(),
        required_prefill_response_num_table={},
        prefill_response_tracker=defaultdict(set),
        addr_to_rooms_tracker=defaultdict(set),
        transfer_statuses=defaultdict(TransferStatus),
        requested_rooms=set(),
        failing_rooms=set(),
        kv_args=SimpleNamespace(page_size=16, engine_rank=0),
        attn_tp_size=1,
        pp_size=1,
        pp_rank=0,
        is_mla_backend=False,
        waiting_timeout=100,
        get_session_id=lambda: "10.0.0.1:1",
        agent=SimpleNamespace(name="me", get_new_notifs=dict),
        agent_lock=threading.RLock(),
        local_ip="10.0.0.1",
        rank_port=1,
    )
    monkeypatch.setattr(receiver_class, "_register_kv_args", lambda self: None)
    monkeypatch.setattr(receiver_class, "_send_to_prefill", lambda self, info, frames: None)

    def receiver(room: int, answers=None, address=ADDRESS):
        monkeypatch.setattr(requests, "get", (answers or FakeBootstrapServer()).get)
        return receiver_class(manager, address, room, 0)

    receiver.manager = manager
    return receiver


def room_table_sizes(manager) -> dict[str, int]:
    """The number of entries in each table of rooms."""
    kept = ("request_status", "failure_records", "transfer_statuses", "requested_rooms")
    return {name: len(getattr(manager, name)) for name in kept}


def failure_of(receiver) -> str:
    """Checks that the request has failed; returns the reason."""
    assert receiver.poll() == KVPoll.Failed
    with pytest.raises(FAILURES) as raised:
        receiver.failure_exception()
    return str(raised.value)


@pytest.mark.parametrize(
    "answers",
    [
        FakeBootstrapServer(sizes=[1, 1, 1, 16]),
        FakeBootstrapServer(sizes="prefill"),
        FakeBootstrapServer(sizes=None),
        FakeBootstrapServer(sizes={}),
        *(
            FakeBootstrapServer(sizes={**SIZES, name: wrong})
            for name in SIZES
            for wrong in (0, -1, "1", 1e9)
        ),
        FakeBootstrapServer(sizes={**SIZES, "prefill_attn_tp_size": True}),
        FakeBootstrapServer(rank=[]),
        FakeBootstrapServer(rank={}),
        FakeBootstrapServer(rank={**RANK, "rank_ip": 7}),
        FakeBootstrapServer(rank={**RANK, "rank_port": "x"}),
        FakeBootstrapServer(rank={**RANK, "rank_port": None}),
        FakeBootstrapServer(sizes=requests.ConnectionError("refused")),
        FakeBootstrapServer(sizes=ValueError("no JSON")),
    ],
    ids=lambda answers: f"{answers.sizes} {answers.rank}"[:80],
)
def test_invalid_bootstrap_answer_fails_the_request(decode, answers):
    """A client names the server; decode's scheduler reads its answer."""
    receiver = decode(7, answers)
    assert "10.9.9.9" in failure_of(receiver)
    assert not any(room_table_sizes(decode.manager).values())


def test_unreachable_bootstrap_server_is_not_retried_immediately(decode, monkeypatch):
    """The scheduler waits for each answer."""
    silent = FakeBootstrapServer(sizes=requests.Timeout("no answer"))
    for room in range(5):
        failure_of(decode(room, silent))
    assert silent.query_count == 1
    monkeypatch.setitem(decode.manager.retry_bootstrap_at, ADDRESS, time.monotonic() - 1)
    assert decode(9).poll() == KVPoll.WaitingForInput


def test_second_request_of_a_room_fails(decode):
    """The second request fails without affecting the first."""
    first = decode(7)
    first.init(PAGES, 0)
    second = decode(7)
    second.init(PAGES, 1)
    second.abort()
    assert failure_of(second).endswith(DUPLICATE_ROOM)
    second.clear()
    assert first.poll() == KVPoll.WaitingForInput
    report_success(decode.manager, 7)
    assert first.poll() == KVPoll.Success
    first.clear()
    assert not any(room_table_sizes(decode.manager).values())
    assert decode(7).poll() == KVPoll.WaitingForInput


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_duplicate_room_on_two_servers_leaves_no_tracked_rooms(decode, order):
    """No server gets heartbeats forever, whichever request ends first."""
    made = [decode(7), decode(7, address="10.9.9.8:8998")]
    made[0].abort()
    for n in order:
        failure_of(made[n])
    assert not any(decode.manager.addr_to_rooms_tracker.values())
    made = [decode(7), decode(7)]
    failure_of(made[1])
    assert decode.manager.addr_to_rooms_tracker[ADDRESS] == {7}


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


def test_stale_status_does_not_affect_a_reused_room(decode):
    """Decode has sent no metadata yet; otherwise it would decode KV that has not arrived."""
    receiver = decode(7)
    report_success(decode.manager, 7)
    assert receiver.poll() == KVPoll.WaitingForInput
    decode.manager.update_status(7, KVPoll.Success)
    assert receiver.poll() == KVPoll.WaitingForInput
    receiver.clear()
    receiver = decode(8)
    report_success(decode.manager, 8)
    receiver.init(PAGES, 0)
    assert receiver.poll() == KVPoll.WaitingForInput


def prefill() -> MooncakeKVManager:
    manager = MooncakeKVManager.__new__(MooncakeKVManager)
    manager.__dict__.update(
        disaggregation_mode=DisaggregationMode.PREFILL,
        request_status={},
        transfer_infos={},
        bootstrap_timeout=100,
    )
    return manager


def test_two_prefill_requests_of_one_room_fail():
    """Also if a third comes after the first has ended: no computed request is Bootstrapping."""
    manager = prefill()
    first, second = (MooncakeKVSender(manager, ADDRESS, 7_000_001, [0], 0) for _ in range(2))
    assert first.poll() == second.poll() == KVPoll.Failed
    with pytest.raises(FAILURES, match="bootstrap_room is already in use"):
        first.failure_exception()
    third = MooncakeKVSender(manager, ADDRESS, 7_000_001, [0], 0)
    assert second.poll() == third.poll() == KVPoll.Failed
    for sender in (second, third):
        with pytest.raises(FAILURES):
            sender.failure_exception()
    fourth = MooncakeKVSender(manager, ADDRESS, 7_000_001, [0], 0)
    assert fourth.poll() == KVPoll.Bootstrapping


@pytest.mark.parametrize("is_kept", [True, False])
def test_three_prefill_requests_of_one_room_fail(is_kept):
    """The first is still computed, and is polled last; the second may have been collected."""
    manager = prefill()
    first, second = (MooncakeKVSender(manager, ADDRESS, 7_000_004, [0], 0) for _ in range(2))
    assert second.poll() == KVPoll.Failed
    with contextlib.suppress(*FAILURES):
        second.failure_exception()
    if not is_kept:
        del second
    third = MooncakeKVSender(manager, ADDRESS, 7_000_004, [0], 0)
    assert first.poll() == third.poll() == KVPoll.Failed


def test_late_failure_does_not_reopen_a_room():
    manager = prefill()
    manager.fail(7_000_002, "too late")
    assert not manager.request_status and not manager.failure_records


@pytest.mark.parametrize("unsettled, states", [(0.0, [True, False]), (30.0, [True, True])])
def test_failed_room_waits_a_limited_time_for_other_senders(decode, monkeypatch, unsettled, states):
    """Polls a failed room after 29 and 31 s; it waits longer if a failed write may be running."""
    monkeypatch.setattr(type(decode.manager), "unsettled_seconds", unsettled)
    receiver, now = decode(7), time.monotonic()
    receiver.init(PAGES, 0)
    receiver.abort()
    found = []
    for seconds in (29, 31):
        receiver.failing_since = now - seconds
        found.append(receiver.poll() != KVPoll.Failed)
    assert found == states
    receiver.failing_since = now - unsettled - 31
    assert receiver.poll() == KVPoll.Failed


def test_wall_clock_jump_frees_no_pages(decode, monkeypatch):
    """Neither those of an open room, nor those of a failed one that waits for its senders."""
    made = [decode(room) for room in (7, 8)]
    for receiver in made:
        receiver.init(PAGES, 0)
    made[0].abort()
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 3600)
    assert [receiver.poll() for receiver in made] == [KVPoll.WaitingForInput] * 2
    assert not made[1].abort_sent
