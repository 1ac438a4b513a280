"""Mooncake's real queues and workers: a silent decode rank hardly delays others."""

import concurrent.futures
import statistics
import struct
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from serving_checks import record
from sglang.srt.disaggregation.ascend import conn as ascend
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.kv_layout import (
    Buffer,
    LayoutError,
    RankLayout,
    encode_layout,
)
from sglang.srt.disaggregation.mooncake import conn as mooncake
from sglang.srt.disaggregation.pd import back_off, peers

from pd_harness.polling import wait_until

pytestmark = pytest.mark.engine

DEAD, LIVE = "10.0.0.1:4000", "10.0.0.2:8000"  # both in one queue of four
BUFFER = Buffer("kv", False, 0, 64, None, 8)
LAYOUT = RankLayout(0, 1, 0, 1, 1, "float16", "DRAM", 1, (BUFFER,))


class FailingEngine:
    """Writes to DEAD fail after `seconds`; writes to other sessions succeed at once."""

    def __init__(self, seconds: float):
        self.seconds = seconds
        self.tries = 0

    def batch_transfer_sync(self, session, *lists) -> int:
        if session != DEAD:
            return 0
        self.tries += 1
        time.sleep(self.seconds)
        return -1


@pytest.fixture
def manager(make_prefill):
    """A prefill rank's manager, with one queue and its worker; `notices` are sent to decode.

    Each notice has the time, the room, its status, and the reason.
    """
    manager = make_prefill(
        mooncake.MooncakeKVManager,
        back_off=back_off.PeerBackoff(),
        enable_custom_mem_pool=False,
        kv_args=SimpleNamespace(
            kv_data_ptrs=[1 << 20],
            state_data_ptrs=[],
            aux_data_ptrs=[],
            aux_item_lens=[],
            state_type="none",
            layout=LAYOUT,
            packing=None,
        ),
        engine=FailingEngine(0.0),
        notices=[],
    )
    manager._send_status = lambda req, status, reason: manager.notices.append(
        (time.monotonic(), req.room, status, reason)
    )
    manager.transfer_queues = [mooncake.FastQueue()]
    manager.watch_peer = manager.note_peer_alive = lambda *peer: None  # no sockets
    for session in (DEAD, LIVE):
        manager._handle_bootstrap_message(registration(session))
    with concurrent.futures.ThreadPoolExecutor(1) as executor:
        queue = manager.transfer_queues[0]
        threading.Thread(
            target=manager.transfer_worker, args=(queue, executor), daemon=True
        ).start()
        yield manager


def send(manager, room: int, session: str) -> float:
    """Opens a room and queues its only chunk; returns the time."""
    manager.update_status(room, KVPoll.Bootstrapping)
    open_room(manager, room, session)
    manager.add_transfer_request(room, np.array([2], np.int32), slice(0, 1), True, 0)
    return time.monotonic()


def open_room(manager, room: int, session: str, ranks: int = 1) -> None:
    """Opens a room as a decode rank's metadata does."""
    manager._open_room(
        mooncake.TransferInfo(
            room=room,
            endpoint="10.0.0.1",
            dst_port=1,
            mooncake_session_id=session,
            dst_kv_indices=np.array([3], np.int32),
            dst_aux_index=0,
            dst_state_indices=[],
            required_dst_info_num=ranks,
            is_dummy=False,
        )
    )


def seconds_until_finished(manager, room: int, since: float, patience: float) -> float:
    while manager.check_status(room) not in (KVPoll.Success, KVPoll.Failed):
        assert time.monotonic() - since < patience, "the room waits for the dead decode rank"
        time.sleep(0.001)
    return time.monotonic() - since


def status_after(manager, room: int, session: str, patience: float = 5) -> KVPoll:
    """The status with which a room ends that sends one chunk to this decode rank."""
    seconds_until_finished(manager, room, send(manager, room, session), patience)
    return manager.check_status(room)


@pytest.mark.parametrize(
    "timeout, shortest, load",
    [
        pytest.param(0.3, 0.06, 4.0, id="scaled"),
        pytest.param(5.0, 1.0, 60.0, id="unscaled", marks=pytest.mark.nightly),
    ],
)
def test_dead_decode_rank_does_not_delay_a_live_one(manager, monkeypatch, timeout, shortest, load):
    """Both ranks get a new room ten times per time-out, for `load` seconds."""
    monkeypatch.setattr(back_off, "BACK_OFF_SECONDS", shortest)
    first = 2 * timeout
    manager.engine = engine = FailingEngine(timeout)
    end = time.monotonic() + load
    waited, room = [], 0
    while time.monotonic() < end:
        room += 2
        send(manager, room, DEAD)
        begun = send(manager, room + 1, LIVE)
        waited.append(seconds_until_finished(manager, room + 1, begun, 10 * timeout))
        assert manager.check_status(room + 1) == KVPoll.Success
        time.sleep(timeout / 10)
    median, worst = statistics.median(waited), max(waited)
    record("back_off", timeout=timeout, rooms=len(waited), median=median, worst=worst)
    # Two tries, then one after each back-off, each of them twice as long as the one before.
    assert engine.tries <= 2 + np.log2(load / first + 1) + 1, engine.tries
    assert median < timeout / 10, waited
    assert worst < 2.5 * timeout, waited


def test_single_attempt_in_flight(manager, monkeypatch):
    """During one attempt others are refused at once."""
    monkeypatch.setattr(back_off, "BACK_OFF_SECONDS", 0.2)
    for room in (1, 2):
        assert status_after(manager, room, DEAD) == KVPoll.Failed
    with pytest.raises(RuntimeError, match="retrying in"), manager.back_off.attempt(DEAD):
        pytest.fail("an attempt during the pause")
    assert wait_until(lambda: manager.back_off.retry_in(DEAD) <= 0, 5)
    attempt = manager.back_off.attempt
    with attempt(DEAD), pytest.raises(RuntimeError, match="after the attempt in"), attempt(DEAD):
        pytest.fail("two attempts at a time")
    assert not manager.back_off.is_backing_off(DEAD)  # it succeeded


def test_re_registration_resets_back_off(manager):
    for room in (1, 2):
        assert status_after(manager, room, DEAD) == KVPoll.Failed
    assert manager.back_off.is_backing_off(DEAD)
    manager.back_off.reset(DEAD)
    manager.engine = SimpleNamespace(batch_transfer_sync=lambda *_: 0)
    assert status_after(manager, 3, DEAD) == KVPoll.Success


def registration(session: str) -> list[bytes]:
    """The registration of a decode rank that describes its layout."""
    numbers = (struct.pack("Q", 1 << 20), b"", b"", b"0", b"1", b"64", b"", b"")
    return [b"None", b"10.0.0.1", b"1", session.encode(), *numbers, encode_layout(LAYOUT), b""]


@pytest.mark.parametrize("session", ["10.0.0.1:17217_10565", "[::1]:4000"])
def test_session_ids_of_each_transfer_library(manager, session):
    """MemFabric 1.0.5 to 1.1.2 appends the process id to the port."""
    manager._handle_bootstrap_message(registration(session))
    assert manager.decode_kv_args_table[session].plan is not None
    assert status_after(manager, 3, session) == KVPoll.Success


def test_session_id_with_port_0_is_refused_at_once(manager):
    """MemFabric has no port yet when 0.5.9 reads it: all ranks of a host get one session id."""
    manager._handle_bootstrap_message(registration("10.0.0.1:0"))
    manager.update_status(5, KVPoll.Bootstrapping)
    open_room(manager, 5, "10.0.0.1:0", ranks=2)
    _, room, status, reason = wait_until(lambda: manager.notices, 5)[0]
    assert (room, status) == (5, KVPoll.Failed)
    assert "decode's session id is 10.0.0.1:0, which has no port" in reason


def test_decode_is_notified_only_when_a_failed_write_has_settled(manager):
    """Decode would free its pages. Prefill fails the request and serves others at once."""
    manager.unsettled_seconds, begun = 1.0, time.monotonic()
    assert status_after(manager, 1, DEAD, 0.5) == KVPoll.Failed
    assert "the transfer engine returned -1" in manager.close_failed_room(1)
    assert status_after(manager, 2, LIVE, 0.5) == KVPoll.Success
    assert wait_until(lambda: manager.notices, 5) and manager.notices[0][1] == 2
    assert wait_until(lambda: len(manager.notices) == 2, 5)
    at, room, status, reason = manager.notices[1]
    assert at - begun >= 1.0
    assert (room, status) == (1, KVPoll.Failed) and "the transfer engine returned -1" in reason


def test_decode_is_notified_late_of_a_write_that_raised(manager):
    """Some of its parts may have been started; a page that a side lacks shows that none was."""
    manager.unsettled_seconds, begun = 1.0, time.monotonic()

    def write(session, *lists):
        raise RuntimeError("can't start new thread")

    manager.engine = SimpleNamespace(batch_transfer_sync=write)
    assert status_after(manager, 1, LIVE, 0.5) == KVPoll.Failed
    assert wait_until(lambda: manager.notices, 5) and manager.notices[0][0] - begun >= 1.0
    manager.back_off.reset(LIVE)
    manager.update_status(2, KVPoll.Bootstrapping)
    open_room(manager, 2, LIVE)
    begun = time.monotonic()
    manager.add_transfer_request(2, np.array([99], np.int32), slice(0, 1), True, 0)
    assert wait_until(lambda: len(manager.notices) == 2, 5)
    assert manager.notices[1][0] - begun < 0.5 and "99" in manager.notices[1][3]


def test_success_has_no_reason(manager):
    assert status_after(manager, 1, LIVE, 0.5) == KVPoll.Success
    assert wait_until(lambda: manager.notices, 5)
    assert manager.notices[0][1:] == (1, KVPoll.Success, "")


def test_rank_registers_again_while_it_is_sent_to(manager, monkeypatch):
    """Until the new plan is made, workers send by the old one."""
    info = manager.decode_kv_args_table[LIVE]
    plan, plans = info.plan, []

    def planned(*given):
        plans.append(info.plan)
        return plan

    monkeypatch.setattr(peers, "plan_registered", planned)
    manager._plan_transfers(info)
    assert plans == [plan] and info.plan is plan


@pytest.mark.parametrize("error", [None, LayoutError("other page sizes")])
def test_rank_that_registers_again_always_has_a_plan_or_a_refusal(manager, monkeypatch, error):
    """A worker that sends to it meanwhile would fail a room without a reason."""
    known, seen = manager.decode_kv_args_table[LIVE], []

    class Watched(type(known)):
        def __setattr__(self, name, value):
            super().__setattr__(name, value)
            seen.append(self.plan is not None or bool(self.refusal))

    def planned(*given):
        if error:
            raise error
        return plan

    info, plan = Watched(**vars(known)), known.plan
    if not error:
        info.plan, info.refusal = None, "other page sizes"
    seen.clear()
    monkeypatch.setattr(peers, "plan_registered", planned)
    manager._plan_transfers(info)
    assert all(seen) and (info.plan is None) == bool(error) == bool(info.refusal)


def test_room_refused_before_the_queues_are_made_is_concluded(manager):
    """The thread that reads messages starts first."""
    queues = manager.transfer_queues
    manager._queues = []
    manager.queues_made.clear()
    open_room(manager, 1, LIVE, ranks=2)
    with concurrent.futures.ThreadPoolExecutor(1) as reader:
        done = reader.submit(manager.abort_room, 1, "refused")
        with pytest.raises(concurrent.futures.TimeoutError):
            done.result(0.2)
        manager._queues = queues
        manager.queues_made.set()
        done.result(5)
    assert wait_until(lambda: manager.notices, 5)
    assert manager.notices[0][1:] == (1, KVPoll.Failed, "refused")


@pytest.mark.parametrize("takes_messages", [True, False])
def test_worker_survives_a_dropped_decode_rank(manager, takes_messages):
    """It is dropped between its request and the write; notifying it may raise."""
    del manager._send_status
    sent, known = [], manager.decode_kv_args_table[DEAD]
    if takes_messages:
        manager._connect = lambda *place: SimpleNamespace(send_multipart=sent.append)
    else:
        manager._connect = None
    for room in (1, 2):
        manager.decode_kv_args_table[DEAD] = known
        manager.update_status(room, KVPoll.Bootstrapping)
        open_room(manager, room, DEAD)
        del manager.decode_kv_args_table[DEAD]
        manager.add_transfer_request(room, np.array([2], np.int32), slice(0, 1), True, 0)
        seconds_until_finished(manager, room, time.monotonic(), 5)
        assert manager.check_status(room) == KVPoll.Failed
    if takes_messages:
        assert wait_until(
            lambda: [frames[:2] for frames in sent] == [[b"1", b"0"], [b"2", b"0"]], 5
        )


@pytest.mark.parametrize("kind", [ascend.AscendKVManager, mooncake.MooncakeKVManager])
def test_failed_write_settles_after_30_seconds(kind):
    """The failed call may have timed out, or have failed in part."""
    assert kind.__new__(kind).unsettled_seconds == 30.0


def test_abort_during_the_last_write_fails_the_request(manager):
    """Prefill frees the pages while they are read, so decode must not use what arrives."""
    begun, go_on = threading.Event(), threading.Event()

    def write(*_) -> int:
        begun.set()
        assert go_on.wait(10)
        return 0

    manager.engine = SimpleNamespace(batch_transfer_sync=write)
    sender = mooncake.MooncakeKVSender(manager, "10.0.0.3:1", 70, [0], 0)
    open_room(manager, 70, LIVE)
    sender.init(1, 0)
    sender.send(np.array([2], np.int32))
    assert begun.wait(10)
    sender.abort()
    assert sender.poll() == KVPoll.Failed
    with pytest.raises(mooncake.KVTransferError):
        sender.failure_exception()
    go_on.set()
    ((_, *notice),) = wait_until(lambda: manager.notices, 10)
    assert notice == [70, KVPoll.Failed, "Aborted by AbortReq."]


@pytest.mark.parametrize("first", ["decode", "prefill"])
def test_queued_chunks_of_a_failed_request_do_not_affect_the_next_with_its_room(manager, first):
    """A chunk and a notice wait for another room's write; decode requests the room meanwhile."""
    started, goes_on, written = threading.Event(), threading.Event(), []

    def write(session, *lists):
        started.set()
        written.extend(lists[0])
        return 0 if goes_on.wait(10) else -1

    manager.engine = SimpleNamespace(batch_transfer_sync=write)
    send(manager, 1, LIVE)
    assert started.wait(5)
    send(manager, 2, LIVE)
    manager.fail(2, "a client left")
    assert manager.close_failed_room(2) == "a client left"
    if first == "prefill":
        manager.update_status(2, KVPoll.Bootstrapping)
    open_room(manager, 2, LIVE)
    goes_on.set()
    assert wait_until(lambda: len(manager.notices) == 2, 5)
    assert [notice[1:] for notice in manager.notices] == [
        (1, KVPoll.Success, ""),
        (2, KVPoll.Failed, "a client left"),
    ]
    assert manager.check_status(2) == KVPoll.WaitingForInput and len(written) == 1
    manager.add_transfer_request(2, np.array([2], np.int32), slice(0, 1), True, 0)
    assert wait_until(lambda: len(manager.notices) == 3, 5)
    assert manager.notices[2][1:] == (2, KVPoll.Success, "") and len(written) == 2
    assert not manager.transfer_infos
